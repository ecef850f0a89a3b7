"""Versions without a verdict: which is looked at next, and when."""

from collections import Counter

from refitd.policy.settle import Settling
from refitd.state.notifier import Notifier
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.states import VersionState

JUDGES = 2  # versions validated at the same time: each reads its files with several threads
RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 10.0
_NOTHING_DUE_SECONDS = 3600.0


class Waiting:
    """The queue. Which versions wait is in the store; here is when each is due, in seconds of the monotonic clock.

    `changed` is notified when one may be due earlier than was thought. `settling` is what is remembered of each between
    looks. `judging` names those that are looked at now: their files are being read.
    """

    def __init__(self, store: Store) -> None:
        self.changed = Notifier()
        self.settling: dict[str, Settling] = {}
        self.judging: set[str] = set()
        self._store = store
        self._due: dict[str, float] = {}
        self._tries: dict[str, int] = {}
        self._alone: str | None = None

    def take(self) -> list[VersionRecord]:
        """Those to look at now, as many as judges are free: of a run the newest, as older ones may never be needed."""
        now = self._store.clock.monotonic()
        due = [
            version
            for version in self._store.open.values()
            if version.id not in self.judging and self._due.get(version.id, 0.0) <= now
        ]
        taken = self._apart(self._in_turn(due))[: JUDGES - len(self.judging)]
        self.judging.update(version.id for version in taken)
        self._alone = next((version.id for version in taken if version.unended), self._alone)
        for version in taken:
            self._due.pop(version.id, None)
        return taken

    def _in_turn(self, due: list[VersionRecord]) -> list[VersionRecord]:
        """Runs that engines follow come first, and each run's newest before any run's second: none waits for another
        that has many.
        """
        followed = {engine.run for engine in self._store.engines.values()}
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
        return others if others or self.judging else due[:1]

    def give_back(self, id_: str) -> None:
        """A look at it is over."""
        self.judging.discard(id_)
        self._alone = None if self._alone == id_ else self._alone
        self.changed.notify()

    def is_busy(self, id_: str) -> bool:
        """Whether somebody looks at it now."""
        return id_ in self.judging

    @property
    def pause(self) -> float | None:
        """Seconds until the next one is due; None where no judge is free for it."""
        if len(self.judging) >= JUDGES or self._alone is not None:
            return None
        now = self._store.clock.monotonic()
        soonest = min(
            (due for id_, due in self._due.items() if self._may_come(id_)), default=now + _NOTHING_DUE_SECONDS
        )
        return max(soonest - now, 0.001)

    def _may_come(self, id_: str) -> bool:
        """Whether it waits for a verdict still, and its turn does not wait for a busy one."""
        version = self._store.open.get(id_)
        return version is not None and id_ not in self.judging and not (self.judging and version.unended)

    def at(self, id_: str, due: float) -> None:
        """Look at it again then."""
        self._due[id_] = due

    def at_once(self, id_: str) -> None:
        """Look at it again now."""
        self._due[id_] = 0.0

    def for_files(self, id_: str) -> None:
        """What was handed over has no files yet: a notice, or the scan that finds them, wakes it earlier."""
        self.at(id_, self._store.clock.monotonic() + LONGEST_RETRY_SECONDS)

    def wake_handed(self) -> None:
        """Something came: the files of what was handed over, or a newer version in their place."""
        for version in self._store.open.values():
            if version.handed and version.id not in self.judging:
                self._due.pop(version.id, None)
        self.changed.notify()

    def wake_unknown(self) -> None:
        """What kept them from a verdict may be over: look at all of them, the newest first."""
        for version in self._store.versions.values():
            if version.state is VersionState.UNKNOWN:
                self.at_once(version.id)
        self.changed.notify()

    def later(self, id_: str) -> None:
        """Look again later, and later still each time: each look may read everything."""
        tries = self._tries[id_] = self._tries.get(id_, 0) + 1
        self.at(id_, self._store.clock.monotonic() + min(RETRY_SECONDS * 2 ** (tries - 1), LONGEST_RETRY_SECONDS))

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
