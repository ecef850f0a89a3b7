"""The queue of versions without a verdict: which is judged next, and when."""

from collections import Counter

from refitd.policy.settle import Settling
from refitd.state.observer import Notifier
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.states import VersionState

JUDGES = 2  # versions validated at the same time: each reads its files with several threads
RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 10.0
_NOTHING_DUE_SECONDS = 3600.0


class Waiting:
    """The queue. The store has which versions wait; this has when each is due, in seconds of the monotonic clock.

    Attributes:
        changed: is notified when a version may be due earlier than before.
        settling: what settling remembers of each version between looks.
        judging: the ids of those that are judged now: their files are being read.
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
        """Return the versions to judge now, as many as judges are free."""
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
        """Order versions: runs that engines follow first, and each run's newest before any run's second.

        So no run waits for another that has many, and of a run the newest comes first: older ones may never be needed.
        """
        followed = {engine.run for engine in self._store.engines.values()}
        places = Counter[str]()
        keyed: list[tuple[bool, int, VersionRecord]] = []
        for version in sorted(due, key=lambda each: (each.order.generation, each.order.step), reverse=True):
            keyed.append((version.run not in followed, places[version.run], version))
            places[version.run] += 1
        return [version for _, _, version in sorted(keyed, key=lambda each: each[:2])]

    def _apart(self, due: list[VersionRecord]) -> list[VersionRecord]:
        """Return those that may be judged beside the ones under way.

        A version in whose validation the service died is judged alone: if the service dies again, it is that version's
        doing and no other's.
        """
        if self._alone is not None:
            return []
        others = [version for version in due if not version.unended]
        return others if others or self.judging else due[:1]

    def give_back(self, id_: str) -> None:
        """End a version's turn."""
        self.judging.discard(id_)
        self._alone = None if self._alone == id_ else self._alone
        self.changed.notify()

    @property
    def pause(self) -> float | None:
        """Seconds until the next version is due; None where no judge is free for it."""
        if len(self.judging) >= JUDGES or self._alone is not None:
            return None
        now = self._store.clock.monotonic()
        dues = (due for id_, due in self._due.items() if self._may_come(id_))
        return max(min(dues, default=now + _NOTHING_DUE_SECONDS) - now, 0.001)

    def _may_come(self, id_: str) -> bool:
        """Return whether it still waits for a verdict, and need not wait to be judged alone."""
        version = self._store.open.get(id_)
        return version is not None and id_ not in self.judging and not (self.judging and version.unended)

    def at(self, id_: str, due: float) -> None:
        """Judge a version at a time of the monotonic clock."""
        self._due[id_] = due

    def at_once(self, id_: str) -> None:
        """Judge a version now."""
        self._due[id_] = 0.0

    def for_files(self, id_: str) -> None:
        """Wait for the files of a version that was handed over: a notice, or the scan that finds them, wakes it."""
        self.at(id_, self._store.clock.monotonic() + LONGEST_RETRY_SECONDS)

    def wake_handed(self) -> None:
        """Judge versions that were handed over: their files may be there, or a newer version in their place."""
        for version in self._store.open.values():
            if version.handed and version.id not in self.judging:
                self._due.pop(version.id, None)
        self.changed.notify()

    def wake_unknown(self) -> None:
        """Judge all UNKNOWN versions, the newest first: what kept them from a verdict may be over."""
        for version in self._store.versions.values():
            if version.state is VersionState.UNKNOWN:
                self.at_once(version.id)
        self.changed.notify()

    def later(self, id_: str) -> None:
        """Judge a version later, after a longer wait each time: each try may read everything."""
        tries = self._tries[id_] = self._tries.get(id_, 0) + 1
        self.at(id_, self._store.clock.monotonic() + min(RETRY_SECONDS * 2 ** (tries - 1), LONGEST_RETRY_SECONDS))

    def forget_tries(self, id_: str) -> None:
        """Forget the tries of a version that could be read: the next trouble with it is a first one."""
        self._tries.pop(id_, None)

    def forget(self, id_: str) -> None:
        """Forget a version that has a verdict."""
        self.settling.pop(id_, None)
        self._due.pop(id_, None)
        self._tries.pop(id_, None)
