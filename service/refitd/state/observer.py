"""How other parts follow the store: observers are called with each change, notifiers wake the tasks that wait.

An entry of the log says what became of a version, an engine, an update or a run, or what is wrong with the root or the
journal. It is written once and never changed, so that what follows from later decisions is not in it.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from refitd.clock import turns_of
from refitd.state.records import AttemptRecord, EngineRecord, UpdateRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import parse_version_id
from refitd_client.contract.states import EngineState, LogSeverity, VersionState
from refitd_client.contract.wire import Event


class Observer:
    """Base class: is called for each change right after it took effect, on the loop's thread. Does nothing by itself.

    The change need not be durable yet. An observer must not raise, block, or change the store.
    """

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        """A version is new, or is not what it was."""

    def engine_changed(self, before: EngineRecord | None, after: EngineRecord) -> None:
        """An engine is new, or is not what it was."""

    def engine_dropped(self, engine: EngineRecord) -> None:
        """An engine is not named any more."""

    def update_changed(self, update: UpdateRecord) -> None:
        """The newest update of a run is new, or is not what it was."""

    def lead_changed(self) -> None:
        """This host obeys another hub, or another epoch of it."""

    def attempt_changed(self, attempt: AttemptRecord) -> None:
        """A load begins (its outcome is None), or has ended."""

    def decided(self, event: Event) -> None:
        """Something was written into the log of decisions."""


class Notifier:
    """Notifications are counted, so that one between a look and the wait for the next is not lost.

    Of many tasks that wait a few are woken in each turn of the loop.

    >>> seen = notifier.count
    >>> look()
    >>> seen = await notifier.wait_after(seen, within=2.0)
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiting: dict[asyncio.Future[None], None] = {}  # in order: the first that waits is woken first

    def notify(self) -> None:
        """Wake every task that waits. Call it on the event loop's thread."""
        self.count += 1
        if self._waiting:
            turns_of(next(iter(self._waiting)).get_loop()).wake(self._waiting)
            self._waiting.clear()

    async def wait_after(self, seen: int, within: float | None = None) -> int:
        """Wait until there were more notifications than `seen`, at most `within` seconds; return the new count."""
        if self.count == seen and (within is None or within > 0):
            future = asyncio.get_running_loop().create_future()
            self._waiting[future] = None
            try:
                # Not wait_for: up to Python 3.11 it swallows a cancellation that comes together with the notification.
                with suppress(TimeoutError):
                    async with asyncio.timeout(within):
                        await future
            finally:
                self._waiting.pop(future, None)
        return self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Which entries a reader asks for: those of a run (its versions, its updates, and the engines that followed it at
    the time), those about the engine of an id, those that are at least so grave; None asks for all.
    """

    run: str | None = None
    engine: str | None = None
    severity: LogSeverity | None = None

    def fits(self, event: Event) -> bool:
        return (
            (self.run is None or event.run == self.run)
            and (self.engine is None or (event.kind, event.subject) == ("engine", self.engine))
            and (self.severity is not LogSeverity.WARNING or event.severity is LogSeverity.WARNING)
        )


EVERYTHING = LogFilter()


def severity_of(data: Mapping[str, Any]) -> LogSeverity:
    """How grave it is that something came to the state that an entry's data names."""
    grave = (*(v for v in VersionState if v.is_bad), *(e for e in EngineState if e.is_in_trouble))
    return LogSeverity.WARNING if data.get("state") in grave else LogSeverity.INFO


def run_of(kind: str, subject: str) -> str | None:
    """The run that an entry about a version, an update or a run concerns; None for any other subject."""
    if kind == "run":
        return subject
    parsed = parse_version_id(subject) if kind in {"version", "update"} else None
    return None if parsed is None else parsed[0]


def named(event: Event) -> Mapping[str, Any]:
    """What the entry is about, under the names that the log lines of the service's tasks use."""
    match event.kind:
        case "version" | "engine":
            return {event.kind: event.subject}
        case "update":
            return {"version": event.subject, "update": event.data["number"]}
        case _:
            return {}
