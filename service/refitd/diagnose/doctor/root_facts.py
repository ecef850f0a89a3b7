"""The root as this host sees it: written to, watched, and measured."""

import logging
import shutil
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from refitd.diagnose.doctor.nonce import Nonce
from refitd.root.file_systems import root_file_system

EVENT_SECONDS = 3.0


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
        version=max([*sizes, *_of_base(base_model)], default=None),
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
        with _stopping():
            observer.stop()
            observer.join()


@contextmanager
def _stopping() -> Generator[None]:
    """An event that is on its way while an observer is stopped is an error to watchdog, and nothing here."""
    log = logging.getLogger("watchdog.observers.inotify")
    log.addFilter(_is_of_interest)
    try:
        yield
    finally:
        log.removeFilter(_is_of_interest)


def _is_of_interest(record: logging.LogRecord) -> bool:
    return "thread is inactive" not in record.getMessage()


def _of_base(model: Path | None) -> Iterator[int]:
    """The size of the model that versions are like, where it has any weights."""
    if model is not None and (weights := _weights(model)):
        yield weights


def _versions(root: Path) -> Iterator[int]:
    """The sizes of what lies on the root: versions and adapters of runs of any depth, slots and copies."""
    for folder in sorted({file.parent for file in root.rglob("*.safetensors")}):
        with suppress(OSError):
            yield _weights(folder)


def _weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
