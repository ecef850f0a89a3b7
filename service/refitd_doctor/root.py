"""The root as this host sees it: can it be written, does it give events, does its clock agree, is there room."""

import asyncio
import errno
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from watchdog.events import FileSystemEventHandler
from watchdog.observers import Observer

from refitd.root.ownership import (
    RootGuard,
    RootMark,
    RootRefusedError,
    adopt,
    is_taken_at_start,
    mounts_now,
    root_file_system,
    wants_polling,
)
from refitd.settings import Settings
from refitd.state.journal.recovery import Sound
from refitd.state.version import VersionRecord
from refitd.text import size_of
from refitd_client.contract.naming import DELTA_NAME, SERVICE_FOLDER
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Keeping
from refitd_client.validation.examine import read_again
from refitd_client.validation.foreign import MANIFESTS
from refitd_doctor.finding import CheckName, Finding, failed, good, unknown, warning
from refitd_doctor.journal import JournalFacts

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_SHARED = "create it, give this user and the trainer's a common group, or name another with --root"
EVENT_SECONDS = 3.0
SKEW_SECONDS = 2.0
_MOVE_FOLDER = (
    "move its folder away: the service then takes it for LOST, and loads no engine with it; publish the step again, "
    "roll back, or put the files back from a backup"
)


class RootUnusableError(Exception):
    """The root cannot be probed; the message says why, `fix` what to do."""

    def __init__(self, message: str, fix: str = _SHARED) -> None:
        super().__init__(message)
        self.fix = fix


@contextmanager
def probed(root: Path) -> Generator[Path]:
    """Write a file beneath the root, and delete it when the context ends.

    Raises:
        RootUnusableError: the root is no folder, or cannot be written.
    """
    if not root.is_dir():
        raise RootUnusableError(f"{root} is no folder")
    folder = root / SERVICE_FOLDER / f"doctor-{secrets.token_hex(8)}"
    probe, is_new = folder / "probe", not folder.parent.exists()
    try:
        try:
            folder.parent.mkdir(mode=0o770, exist_ok=True)
            folder.mkdir(mode=0o755)
            probe.touch()
        except OSError as error:
            fix = "make room there" if error.errno in _NO_ROOM else _SHARED
            raise RootUnusableError(f"{folder.parent} cannot be written: {error.strerror}", fix) from error
        yield probe
    finally:
        with suppress(OSError):  # another process may have begun to use the service's folder
            probe.unlink(missing_ok=True)
            folder.rmdir()
            if is_new:
                folder.parent.rmdir()


def stranger(root: Path, journal: JournalFacts) -> RootMark | None:
    """The root that the journal is about, where another folder lies at the root's path, and a start would wait for it.

    Raises:
        OSError: the root's name cannot be read.
    """
    condition = journal.condition
    mark = condition.origin.root if isinstance(condition, Sound) else None
    if mark is None or is_taken_at_start(root, mark, has_versions=bool(journal.versions), mounts=mounts_now()):
        return None
    return mark


def judge_mark(root: Path, journal: JournalFacts) -> Iterator[Finding]:
    """Say that the root is not the one that the journal is about."""
    try:
        mark = stranger(root, journal)
    except OSError as error:
        fix = "run doctor as the service's user"
        yield unknown(CheckName.ROOT, str(root), f"its name cannot be read: {error.strerror}", fix)
        return
    if mark is not None and (fault := RootGuard(root, mark)()) is not None:
        yield failed(CheckName.ROOT, str(root), fault, "mount its file system, or --repair")


def take_root(root: Path, journal: JournalFacts) -> Iterator[Finding]:
    """Give an emptied root the name that the journal knows, at an operator's word: a file system that is not mounted
    looks the same. Blocks.
    """
    try:
        if (mark := stranger(root, journal)) is not None:
            adopt(root, mark, mounts=mounts_now())
            yield good(CheckName.ROOT, str(root), "is the root of this journal from now on")
    except (OSError, RootRefusedError) as error:
        yield failed(CheckName.ROOT, str(root), f"not repaired: {error}", "do so, and run --repair again")


@dataclass(frozen=True, slots=True, kw_only=True)
class RootFacts:
    """The root. Sizes are in bytes.

    Attributes:
        kind: of its file system.
        event: whether a write gave an event.
        skew: the file system's clock less this host's, in seconds.
        free: room that is left.
        keeps_manifests: whether the service's manifests, of folders that have none, can be written.
        version: size of the largest version; None without one.
        held: size of all versions, slots and copies on it.
        has_deltas: whether a delta lies on it.
    """

    path: Path
    kind: str
    event: bool
    skew: float
    free: int
    keeps_manifests: bool
    version: int | None
    held: int
    has_deltas: bool = False


def look_at_root(root: Path, probe: Path, base_model: Path | None) -> RootFacts:
    """Watch a write, and measure. Blocks for `EVENT_SECONDS` where there are no events."""
    sizes = list(_versions(root))
    probe.touch()
    skew = probe.stat().st_mtime - time.time()  # first: to wait for an event takes longer than a clock may be off
    manifests = root / SERVICE_FOLDER / MANIFESTS
    models = [] if base_model is None else [weights for weights in [_weights(base_model)] if weights]
    return RootFacts(
        path=root,
        kind=root_file_system(root),
        event=_gives_event(probe),
        skew=skew,
        free=shutil.disk_usage(root).free,
        keeps_manifests=not manifests.exists() or (manifests.is_dir() and os.access(manifests, os.W_OK | os.X_OK)),
        version=max([*sizes, *models], default=None),
        held=sum(sizes),
        has_deltas=any(root.rglob(DELTA_NAME)),
    )


def _gives_event(probe: Path) -> bool:
    heard, handler, observer = threading.Event(), FileSystemEventHandler(), Observer()
    handler.on_any_event = lambda event: heard.set()
    observer.schedule(handler, str(probe.parent))
    try:
        observer.start()
    except OSError:
        return False  # inotify has no watch left, or is not there
    try:
        probe.write_text("a write that is to be told of")
        return heard.wait(EVENT_SECONDS)
    finally:
        observer.stop()
        observer.join()


def _versions(root: Path) -> Iterator[int]:
    """The sizes of versions, adapters, slots and copies, in folders of any depth."""
    for folder in sorted({file.parent for file in root.rglob("*.safetensors")}):
        with suppress(OSError):
            yield _weights(folder)


def _weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def judge_root(facts: RootFacts, settings: Settings, keeps: Keeping | None = None) -> Iterator[Finding]:
    """What the observations mean.

    Args:
        settings: doctor's own.
        keeps: what the service that runs on the root says that it keeps; None where it does not say it.
    """
    subject = str(facts.path)
    yield good(CheckName.ROOT, subject, f"can be written; it is on {facts.kind or 'a file system of unknown kind'}")
    if not facts.keeps_manifests:
        kept = f"{SERVICE_FOLDER}/{MANIFESTS}"
        text = f"{kept} cannot be written: engines load checkpoints without refit.json as servers do by themselves"
        yield failed(CheckName.ROOT, subject, text, f"let the service's user write {kept}")
    if not facts.event and not wants_polling(facts.kind):  # where it polls the service needs no events
        fix = "raise fs.inotify.max_user_watches and max_user_instances"
        text = f"a write gave no event within {EVENT_SECONDS:g} s: versions wait for the scan"
        yield warning(CheckName.ROOT, subject, text, fix)
    if abs(facts.skew) > SKEW_SECONDS:
        text = f"the file system's clock differs by {facts.skew:+.1f} s"
        fix = "have the file server and this host follow one time server (NTP)"
        yield warning(CheckName.ROOT, subject, text, fix)
    yield _space(facts, settings, keeps, subject)


def _space(facts: RootFacts, settings: Settings, told: Keeping | None, subject: str) -> Finding:
    if facts.version is None:
        text = "how much room versions need is not known: there is none yet"
        fix = "name --base-model, whose size a version has"
        return unknown(CheckName.SPACE, subject, text, fix)
    what = "versions" if settings.lora is None else "adapters"
    keeps = told or settings.keeping
    # Engines that know no deltas read a copy of one, while that of the next is made.
    copies, budget = 2 if facts.has_deltas else 0, keeps.disk_budget
    kept = keeps.last + keeps.slots + 1 + copies
    needed, there = kept * facts.version, facts.free + facts.held
    of_deltas = f", {copies} copies for deltas" if copies else ""
    whose = "as the service keeps them" if told is not None else "by doctor's own settings"
    text = (
        f"{kept} {what} of {size_of(facts.version)} ({keeps.last} kept, {keeps.slots} slots, 1 being written"
        f"{of_deltas}; {whose}) take {size_of(needed)}; there are {size_of(there)}"
    )
    if budget is not None and needed > budget:
        text, there = f"{text}, and --disk-budget is {size_of(budget)}", budget
    if needed <= there:
        return good(CheckName.SPACE, subject, text)
    fix = "make room, or keep fewer: --keep-last, --slots"
    return failed(CheckName.SPACE, subject, text, fix)


async def read_versions(
    root: Path, known: Iterable[VersionRecord], progress: Callable[[int, int], None]
) -> list[Finding]:
    """Read every byte of every good version of the journal, and hold it against the digest that it was sealed with.

    A service reads a version again where its files look otherwise than they did; this finds what changed without a
    trace. A version that looks otherwise is left to the service.

    Args:
        progress: gets the bytes that are read, and of how many.
    """
    sealed = [version for version in known if version.state is VersionState.SEALED and version.digest is not None]
    total, done = sum(version.files.bytes or 0 for version in sealed), 0
    findings: list[Finding] = []
    stop, bytes_of_good, count = threading.Event(), 0, 0

    def on_read(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    try:
        for version in sealed:
            found = await asyncio.to_thread(_read, root, version, stop, on_read)
            if isinstance(found, Finding):
                findings.append(found)
            elif found:
                count, bytes_of_good = count + 1, bytes_of_good + (version.files.bytes or 0)
    finally:
        stop.set()  # when this is cancelled, the thread would read on to the end
    text = f"{count} of {len(sealed)} good versions were read, {size_of(bytes_of_good)}: they are as they were sealed"
    return [good(CheckName.VERSIONS, str(root), text), *findings]


def _read(root: Path, version: VersionRecord, stop: threading.Event, on_read: Callable[[int], None]) -> Finding | bool:
    """What is wrong with a version, else whether it has the bytes that it had: not if the service sees to it."""
    path = version.path
    try:
        found = read_again(root, path, stop=stop, on_read=on_read)
    except FileNotFoundError:
        return False
    except OSError as error:
        text = f"{path} cannot be read to its end: {error}"
        return unknown(CheckName.VERSIONS, version.id, text, "see to its disk, or run doctor as the service's user")
    if found.digest == version.digest:
        return True
    if found.signature != version.files.signature:
        return False
    why = "" if found.fault is None else f" ({found.fault})"
    text = f"the bytes in {path} are not those that were sealed, though names, sizes and times are{why}"
    return failed(CheckName.VERSIONS, version.id, text, _MOVE_FOLDER)
