"""Who proves a version: the service, which reads every byte, or the GPUs of the engines that would load it. Pure.

A GPU reads a version's tensors at the speed of its bus while its engine serves, and nothing is written into the model.
That is believed where it proves as much as the service's own reading would: the ranks read the very files that the
service looked at, each tensor has the fingerprint of the manifest, all values are finite, and each tensor was read by
one of the ranks. In any doubt the service reads by itself.

Engines without such a GPU have nothing of their own to go by. So the service reads where one of the run's engines is of
that kind, and before the first load of one that comes later.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from refitd.engine.port import RankProof
from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.states import EngineState, Kind
from refitd_client.validation.proof import proof_digest, share_of
from refitd_client.validation.validate import Structure


class Prove(StrEnum):
    """The setting. BOTH: the service reads as well, and where they disagree the version is read again."""

    ENGINE = "engine"
    SERVICE = "service"
    BOTH = "both"


def all_prove(version: VersionRecord, engines: Iterable[EngineRecord]) -> bool:
    """Whether each engine of the version's run that could load it now has GPUs that can prove it.

    Args:
        version: the version.
        engines: those of its run.
    """
    there = [each for each in engines if not (each.state.is_away or each.state is EngineState.QUARANTINED)]
    return version.kind is Kind.FULL and bool(there) and all(engine.proves for engine in there)


def needs_reading(version: VersionRecord, engine: EngineRecord) -> bool:
    """Whether the service has to read a version before this engine loads it, since GPUs of others alone have."""
    return bool(version.proved_by) and not engine.proves


def fault_in(seen: Structure, found: Sequence[RankProof]) -> str | None:
    """Why what the ranks of an engine found does not prove a version, in a sentence; None where it does.

    Args:
        seen: the service's look at the files.
        found: what each rank found.
    """
    manifest = seen.manifest
    if manifest is None or not found:
        return "no rank has read it"
    sizes = {proof.ranks for proof in found}
    if len(sizes) > 1 or {proof.rank for proof in found} != set(range(min(sizes))):
        return "not all of its ranks have read it"
    for proof in found:
        if proof.fault:
            return f"rank {proof.rank}: {proof.fault}"
        if proof.signature != seen.signature:
            return f"rank {proof.rank} sees other files"
        names = share_of(seen.headers, proof.rank, proof.ranks)
        if (proof.tensors, proof.digest) != (len(names), proof_digest(manifest.fingerprints, names)):
            return f"rank {proof.rank} found other fingerprints than refit.json has"
    return None
