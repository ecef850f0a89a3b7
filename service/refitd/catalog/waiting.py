"""Versions without a verdict: which is looked at next, and when."""

from collections import Counter

from refitd.bell import Bell
from refitd.catalog.record import VersionRecord
from refitd.catalog.settle import Settling
from refitd.ledger import Ledger
from refitd_client.contract.states import VersionState

JUDGES = 2  # versions validated at the same time: each reads its files with several threads
RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 10.0
_NOTHING_DUE_SECONDS = 3600.0


class Waiting:
    """The queue. Which versions wait is in the ledger; here is when each is due, in seconds of the monotonic clock.

    `bell` rings when one may be due earlier than was thought. `settling` is what is remembered of each between looks.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.bell = Bell()
        self.settling: dict[str, Settling] = {}
        self._ledger = ledger
        self._due: dict[str, float] = {}
        self._tries: dict[str, int] = {}
        self._busy = ledger.judging
        self._alone: str | None = None

    def take(self) -> list[VersionRecord]:
        """Those to look at now, as many as judges are free: of a run the newest, as older ones may never be needed."""
        now = self._ledger.clock.monotonic()
        due = [
            version
            for version in self._ledger.open.values()
            if version.id not in self._busy and self._due.get(version.id, 0.0) <= now
        ]
        taken = self._apart(self._in_turn(due))[: JUDGES - len(self._busy)]
        self._busy.update(version.id for version in taken)
        self._alone = next((version.id for version in taken if version.unended), self._alone)
        for version in taken:
            self._due.pop(version.id, None)
        return taken

    def _in_turn(self, due: list[VersionRecord]) -> list[VersionRecord]:
        """Runs that engines follow come first, and each run's newest before any run's second: none waits for another
        that has many.
        """
        followed = {engine.run for engine in self._ledger.engines.values()}
        places = Counter[str]()
        keyed: list[tuple[bool, int, VersionRecord]] = []
        for version in sorted(due, key=_place, reverse=True):
            keyed.append((version.run not in followed, places[version.run], version))
            places[version.run] += 1
        return [version for _, _, version in sorted(keyed, key=lambda each: each[:2])]

    def _apart(self, due: list[VersionRecord]) -> list[VersionRecord]:
        """Those that may be looked at beside the busy ones. One in whose validation the service died is looked at by
        itself: if the service dies again, that was no other's doing.
        """
        if self._alone is not None:
            return []
        others = [version for version in due if not version.unended]
        return others if others or self._busy else due[:1]

    def give_back(self, id_: str) -> None:
        """A look at it is over."""
        self._busy.discard(id_)
        self._alone = None if self._alone == id_ else self._alone
        self.bell.ring()

    def is_busy(self, id_: str) -> bool:
        """Whether somebody looks at it now."""
        return id_ in self._busy

    @property
    def pause(self) -> float | None:
        """Seconds until the next one is due; None where no judge is free for it."""
        if len(self._busy) >= JUDGES or self._alone is not None:
            return None
        now = self._ledger.clock.monotonic()
        soonest = min(
            (due for id_, due in self._due.items() if self._may_come(id_)), default=now + _NOTHING_DUE_SECONDS
        )
        return max(soonest - now, 0.001)

    def _may_come(self, id_: str) -> bool:
        """Whether it waits for a verdict still, and its turn does not wait for a busy one."""
        version = self._ledger.open.get(id_)
        return version is not None and id_ not in self._busy and not (self._busy and version.unended)

    def at(self, id_: str, due: float) -> None:
        """Look at it again then."""
        self._due[id_] = due

    def at_once(self, id_: str) -> None:
        """Look at it again now."""
        self._due[id_] = 0.0

    def for_files(self, id_: str) -> None:
        """What was handed over has no files yet: a notice, or the scan that finds them, wakes it earlier."""
        self.at(id_, self._ledger.clock.monotonic() + LONGEST_RETRY_SECONDS)

    def wake_handed(self) -> None:
        """Something came: the files of what was handed over, or a newer version in their place."""
        for version in self._ledger.open.values():
            if version.handed and version.id not in self._busy:
                self._due.pop(version.id, None)
        self.bell.ring()

    def wake_unknown(self) -> None:
        """What kept them from a verdict may be over: look at all of them, the newest first."""
        for version in self._ledger.versions.values():
            if version.state is VersionState.UNKNOWN:
                self.at_once(version.id)
        self.bell.ring()

    def later(self, id_: str) -> None:
        """Look again later, and later still each time: each look may read everything."""
        tries = self._tries[id_] = self._tries.get(id_, 0) + 1
        self.at(id_, self._ledger.clock.monotonic() + min(RETRY_SECONDS * 2 ** (tries - 1), LONGEST_RETRY_SECONDS))

    def forget_tries(self, id_: str) -> None:
        """It could be read: the next trouble with it is a first one."""
        self._tries.pop(id_, None)

    def forget(self, id_: str) -> None:
        """It has a verdict."""
        self.settling.pop(id_, None)
        self._due.pop(id_, None)
        self._tries.pop(id_, None)


def _place(version: VersionRecord) -> tuple[int, int]:
    return version.order.generation, version.order.step
