"""Which service leads an engine: the one that took the lease, while its process lives and it renews the lease.

While one leads, an update from the root of another service is refused. Each rank keeps a lease of its own;
where they differ, no rank writes.

The services of a group have one name and take over from each other at once. One whose epoch is lower than another that
was seen of the group has been taken over from, and is refused for good.
"""

import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.plugin import Owner
from refitd_client.files.linux_calls import process_descriptor

LONGEST_SECONDS = 600.0


class LedError(Exception):
    """An update comes from another service than the one that leads. The message names the one that leads."""


@dataclass(frozen=True, slots=True)
class _Held:
    owner: Owner
    seconds: float
    renewed: float
    process: int | None  # a descriptor of the owner's process, where this one can see it


class LeaderLease:
    """The lease of one rank. `clock` is monotonic, in seconds. For any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._held: _Held | None = None
        self._newest: Owner | None = None  # of the group that led last, with the highest epoch that it showed

    def take(self, owner: Owner, seconds: float, pid: int = 0) -> str | None:
        """Take the lease, or renew it. Returns a sentence that names another service that leads; None where none does.

        Args:
            owner: the service that is to lead.
            seconds: for how long, unless it is renewed.
            pid: the owner's process as this one sees it, 0 where it cannot.
        """
        with self._lock:
            held = self._current()
            if held is not None and held.owner.service != owner.service:
                return self._sentence(held)
            newest = self._newest
            if newest is not None and newest.service == owner.service and owner.epoch < newest.epoch:
                who = f"the refitd at {newest.host} (pid {newest.pid})"
                return f"the engine is led by {who}, with epoch {newest.epoch} after {owner.epoch}"
            self._newest = owner
            self._end()
            self._held = _Held(owner, min(seconds, LONGEST_SECONDS), self._clock(), _opened(pid))
            return None

    def renew(self) -> None:
        """Renew the lease of the service that leads: it could not do so while it loaded a version."""
        with self._lock:
            if (held := self._current()) is not None:
                self._held = _Held(held.owner, held.seconds, self._clock(), held.process)

    def leader(self) -> str | None:
        """A sentence that names the service that leads the engine; None where none does."""
        with self._lock:
            held = self._current()
            return None if held is None else self._sentence(held)

    def _current(self) -> _Held | None:
        held = self._held
        if held is not None and (self._clock() - held.renewed >= held.seconds or _has_ended(held.process)):
            self._end()
        return self._held

    def _end(self) -> None:
        if self._held is not None and self._held.process is not None:
            os.close(self._held.process)
        self._held = None

    def _sentence(self, held: _Held) -> str:
        owner, ago = held.owner, self._clock() - held.renewed
        who = f"the refitd of root {owner.root} at {owner.host} (pid {owner.pid})"
        return f"the engine is led by {who}, which said so {ago:.0f} s ago"


def is_of_another_root(path: str, root: Path) -> bool:
    """Whether a folder lies in the root of another service than the one that has `root`."""
    with suppress(OSError):  # what cannot be looked at is not loaded either, and that says why
        nearest = next((above for above in Path(path).absolute().parents if (above / SERVICE_FOLDER).is_dir()), None)
        return nearest is not None and not nearest.samefile(root)
    return False


def _opened(pid: int) -> int | None:
    if pid <= 0:
        return None
    with suppress(OSError):  # it has ended just now, or a kernel without
        return process_descriptor(pid)
    return None


def _has_ended(process: int | None) -> bool:
    """Whether a process has ended: then its descriptor can be read."""
    if process is None:
        return False
    poll = select.poll()  # select() fails on descriptors from 1,024 on
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))
