"""Collects what the GPUs of engines prove of versions that wait for their verdict, for the one that judges them.

The reconcilers have engines look at a version before its verdict; with what an engine prepares comes what its ranks
have found in the tensors. The judge waits for the first engine that proves the version. It does not wait long for an
engine that does not begin: another load may be under way there.
"""

from collections.abc import Sequence

from refitd.engine.port import RankProof
from refitd.policy.admit import Prove, all_prove, fault_in
from refitd.state.observer import Notifier
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.targets import Targets
from refitd_client.validation.validate import Structure

_FIRST_ASKED_SECONDS = 0.25  # until the first engine has been asked
_PROVE_SECONDS = 30.0  # 1.6 TB over a bus of 55 GB/s


class RankProofs:
    """Who was asked to prove what, and what came of it. In memory alone: after a restart the service reads."""

    def __init__(self, store: Store, targets: Targets, prove: Prove) -> None:
        self._store, self._targets, self._prove = store, targets, prove
        # By version, what engines were asked, and what they answered: None until they have.
        self._asked: dict[str, dict[str, Sequence[RankProof] | None]] = {}
        self._changed = Notifier()

    def begin(self, version: VersionRecord, engine: str) -> bool:
        """Whether this engine is to prove a version while it prepares it."""
        if self._prove is Prove.SERVICE or not all_prove(version, self._store.engines_of(version.run)):
            return False
        self._asked = {id_: asked for id_, asked in self._asked.items() if id_ in self._store.open}
        self._asked.setdefault(version.id, {})[engine] = None
        self._changed.notify()
        return True

    def end(self, version: str, engine: str, found: Sequence[RankProof]) -> None:
        """Note what an engine's ranks have found; nothing where they did not come to an end."""
        if (asked := self._asked.get(version)) is not None:
            asked[engine] = tuple(found)
            self._changed.notify()

    async def of(self, version: VersionRecord, seen: Structure) -> tuple[str, ...]:
        """Wait for the engines that prove a version; none where no engine is asked, or all have come to nothing."""
        if not self._expected(version):
            return ()
        clock = self._store.clock
        begun = clock.monotonic()
        while True:
            count, now = self._changed.count, clock.monotonic()
            found = self._asked.get(version.id, {})
            faults = {engine: fault_in(seen, proofs) for engine, proofs in found.items() if proofs is not None}
            if by := tuple(engine for engine, fault in faults.items() if fault is None):
                return by
            left = begun + (_PROVE_SECONDS if found else _FIRST_ASKED_SECONDS) - now
            if left <= 0 or (found and len(faults) == len(found)):
                return ()
            await self._changed.wait_after(count, within=left)

    def _expected(self, version: VersionRecord) -> bool:
        """Whether an engine was asked, or will be at its next turn."""
        if version.id in self._asked:
            return True
        engines = self._store.engines_of(version.run)
        if self._prove is Prove.SERVICE or not all_prove(version, engines):
            return False
        return any(self._targets.of_engine(engine).coming == version.id for engine in engines)
