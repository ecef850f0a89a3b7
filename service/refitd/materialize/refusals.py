"""Deltas that cannot be carried out, or wait: why, and when to look again. What failed is known until a restart."""

from collections.abc import Callable, Iterable

from refitd.policy.materialize import Decision, Ready, Write
from refitd.rollout.targets import Targets
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.states import VersionState

FIRST_SECONDS = 10.0
LONGEST_SECONDS = 60.0


class Refusals:
    """Belongs to one copier. `waiting` says by the ids of deltas what they wait for."""

    def __init__(self, store: Store, targets: Targets) -> None:
        self._store = store
        self._targets = targets
        self._misfits: dict[str, set[str]] = {}
        self._again_at: dict[str, float] = {}
        self._tries: dict[str, int] = {}
        self.waiting: dict[str, str] = {}

    def misfits(self, target: VersionRecord) -> frozenset[str]:
        """From which versions a delta was not reached."""
        return frozenset(self._misfits.get(target.id, ()))

    def misfit(self, target: VersionRecord, order: Write, reason: str) -> None:
        """What came out was not what the delta promises: it is made from something else."""
        source = order.source.id if isinstance(order.source, VersionRecord) else order.source.holds or ""
        self._misfits.setdefault(target.id, set()).add(source)
        self._store.say("version", target.id, f"{reason}: the copy of {target.id} is made from others than {source}")

    def wait(self, target: VersionRecord, reason: str) -> None:
        """It goes on by itself."""
        self.waiting[target.id] = reason

    def carried(self, target: VersionRecord) -> None:
        """A copy holds it."""
        self.waiting.pop(target.id, None)
        self._tries.pop(target.id, None)

    def refuse(self, target: VersionRecord, reason: str) -> None:
        """Engines stay on what they have; it is tried again later, and later still."""
        self.waiting.pop(target.id, None)
        tries = self._tries[target.id] = self._tries.get(target.id, 0) + 1
        wait = min(FIRST_SECONDS * 2 ** min(tries - 1, 10), LONGEST_SECONDS)
        self._again_at[target.id] = self._store.clock.monotonic() + wait
        self._targets.refuse(target, reason)

    def due(
        self, versions: Iterable[VersionRecord], decide: Callable[[VersionRecord], Decision]
    ) -> VersionRecord | None:
        """The first refused delta of some that is to be tried again now. It stays refused until a copy holds it."""
        now = self._store.clock.monotonic()
        self._forget_the_gone()
        for version in versions:
            is_refused = self._targets.carriage.is_refused(version) and version.state is VersionState.SEALED
            if is_refused and not version.barred and now >= self._again_at.get(version.id, now):
                if isinstance(decide(version), Ready | Write):
                    return version
                self._again_at[version.id] = now + FIRST_SECONDS
        return None

    def _forget_the_gone(self) -> None:
        versions = self._store.versions
        for known in (self._misfits, self._again_at, self._tries, self.waiting):
            for version in [version for version in known if version not in versions]:
                del known[version]
