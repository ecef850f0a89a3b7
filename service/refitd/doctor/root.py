"""The root as this host sees it: written to, watched, and measured. A probe folder beneath `.refitd` comes and goes."""

import secrets
import shutil
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from refitd.catalog.watch import root_file_system, wants_polling
from refitd.doctor.finding import Check, Finding, Verdict, good
from refitd.settings import Settings, Watch
from refitd_client.contract.naming import SERVICE_FOLDER

EVENT_SECONDS = 3.0
SKEW_SECONDS = 2.0
NONCE_NAME = "nonce"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nonce:
    """A random text in a file beneath the root. Whoever can say the text sees the file."""

    path: str  # relative to the root
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RootFacts:
    """The root. `event`: a write was told of. `skew` is the file system's clock less this host's, in seconds.

    `version` is the size of the largest version, and `held` of all that lies on the root, in bytes.
    """

    path: Path
    kind: str
    event: bool
    skew: float
    free: int
    version: int | None
    held: int


class RootUnusableError(Exception):
    """The root cannot be probed; the message says why."""


@contextmanager
def probed(root: Path) -> Generator[Nonce]:
    """A nonce on the root for as long as the context lasts.

    Raises:
        RootUnusableError: the root is no folder, or cannot be written.
    """
    if not root.is_dir():
        raise RootUnusableError(f"{root} is no folder")
    folder = root / SERVICE_FOLDER / f"doctor-{secrets.token_hex(8)}"
    nonce = Nonce(path=f"{SERVICE_FOLDER}/{folder.name}/{NONCE_NAME}", text=secrets.token_hex(16))
    is_new = not folder.parent.exists()
    try:
        try:
            folder.parent.mkdir(mode=0o770, exist_ok=True)
            folder.mkdir(mode=0o755)
            (folder / NONCE_NAME).write_text(nonce.text)
        except OSError as error:
            raise RootUnusableError(f"{folder.parent} cannot be written: {error.strerror}") from error
        yield nonce
    finally:
        with suppress(OSError):
            (folder / NONCE_NAME).unlink()
        with suppress(OSError):
            folder.rmdir()
        if is_new:
            with suppress(OSError):  # somebody else has begun to use it
                folder.parent.rmdir()


def look_at_root(root: Path, nonce: Nonce, base_model: Path | None) -> RootFacts:
    """Watch a write, and measure. Blocks for `EVENT_SECONDS` where there are no events."""
    sizes = list(_versions(root))
    skew = _skew(root / nonce.path)  # first: to wait for an event takes longer than a clock may be off
    return RootFacts(
        path=root,
        kind=root_file_system(root),
        event=_tells(root / nonce.path),
        skew=skew,
        free=shutil.disk_usage(root).free,
        version=max([*sizes, *([] if base_model is None else [_weights(base_model)])], default=None),
        held=sum(sizes),
    )


def _skew(nonce: Path) -> float:
    nonce.write_text(nonce.read_text())
    return nonce.stat().st_mtime - time.time()


class _Heard(FileSystemEventHandler):
    def __init__(self) -> None:
        self.event = threading.Event()

    def on_any_event(self, event: FileSystemEvent) -> None:
        self.event.set()


def _tells(nonce: Path) -> bool:
    heard, observer = _Heard(), Observer()
    observer.schedule(heard, str(nonce.parent))
    try:
        observer.start()
    except OSError:
        return False  # inotify has no watch left, or is not there
    try:
        nonce.write_text(nonce.read_text())
        return heard.event.wait(EVENT_SECONDS)
    finally:
        observer.stop()
        observer.join()


def _versions(root: Path) -> Iterator[int]:
    """The sizes of what lies on the root: versions and adapters of runs of any depth, slots and copies."""
    for folder in sorted({file.parent for file in root.rglob("*.safetensors")}):
        with suppress(OSError):
            yield _weights(folder)


def _weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def judge_root(facts: RootFacts, settings: Settings) -> Iterator[Finding]:
    """What the observations mean."""
    subject = str(facts.path)
    yield good(Check.ROOT, subject, f"can be written; it is on {facts.kind or 'a file system that nobody names'}")
    yield _events(facts, settings, subject)
    yield _clock(facts, subject)
    yield _space(facts, settings, subject)


def _events(facts: RootFacts, settings: Settings, subject: str) -> Finding:
    polls = settings.watch is Watch.POLL or (settings.watch is Watch.AUTO and wants_polling(facts.kind))
    if polls:
        return good(Check.EVENTS, subject, "the service polls, and needs no events")
    if facts.event:
        return good(Check.EVENTS, subject, "a write was told of")
    fix = "set --watch poll, or raise fs.inotify.max_user_watches and max_user_instances"
    text = f"a write was not told of within {EVENT_SECONDS:g} s: versions wait for the scan"
    return Finding(check=Check.EVENTS, subject=subject, verdict=Verdict.WARNING, text=text, fix=fix)


def _clock(facts: RootFacts, subject: str) -> Finding:
    text = f"the file system's clock differs by {facts.skew:+.1f} s"
    if abs(facts.skew) <= SKEW_SECONDS:
        return good(Check.ROOT_CLOCK, subject, text)
    fix = "have the file server and this host follow one time server (NTP)"
    return Finding(check=Check.ROOT_CLOCK, subject=subject, verdict=Verdict.WARNING, text=text, fix=fix)


def _space(facts: RootFacts, settings: Settings, subject: str) -> Finding:
    if facts.version is None:
        text = "how much room versions need is not known: there is none yet"
        fix = "name --base-model, whose size a version has"
        return Finding(check=Check.SPACE, subject=subject, verdict=Verdict.UNKNOWN, text=text, fix=fix)
    what = "versions" if settings.lora is None else "adapters"
    copies = settings.copies if settings.takes_deltas and settings.copies_folder is None else 0
    kept = settings.keep_last + settings.slots + 1 + copies
    needed, there = kept * facts.version, facts.free + facts.held
    of_deltas = f", {copies} copies for deltas" if copies else ""
    text = (
        f"{kept} {what} of {_gb(facts.version)} ({settings.keep_last} kept, {settings.slots} slots, 1 being written"
        f"{of_deltas}) take {_gb(needed)}; there are {_gb(there)}"
    )
    if settings.disk_budget is not None and needed > settings.disk_budget:
        text, there = f"{text}, and --disk-budget is {_gb(settings.disk_budget)}", settings.disk_budget
    if needed <= there:
        return good(Check.SPACE, subject, text)
    fix = "make room, or keep fewer: --keep-last, --slots" + (", --copies or --copies-folder" if copies else "")
    return Finding(check=Check.SPACE, subject=subject, verdict=Verdict.FAILED, text=text, fix=fix)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
