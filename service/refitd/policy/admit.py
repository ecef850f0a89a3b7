"""What becomes of a notice and of a folder before a version is validated. Pure.

`admit` says whether a notice contradicts what is known. Other content for a step is a conflict as far as it shows from
outside; validation finds what does not show. Files where a version was deleted are a conflict in any case: the root was
emptied under the journal, or the trainer began anew, and no engine would ever be brought to them.

Metadata is what a trainer says about a version for people. It stays in memory and in the journal as long as its
version, and so has limits. A notice wins over a manifest: it came later.

`settle` says whether a checkpoint is still being written. refitd's own publisher renames a complete directory into
place, so a manifest means complete. Any other checkpoint counts as complete when headers, index and files agree and
nothing has changed for `settle` seconds. One that disagrees is still being written, until it has not changed for
`timeout` seconds. So is one with a hole, as a file that was made in full size and is filled later; one that ends in
zeros is waited for longer. A file that its trainer writes last is waited for without a limit.

The service proves a version by reading every byte, or the GPUs of the engines that would load it prove it, at the speed
of their bus while they serve. That is believed where the ranks read the very files that the service looked at, each
tensor has the fingerprint of the manifest, all values are finite, and each tensor was read by a rank. In any doubt the
service reads. It reads also where one of the run's engines has no such GPU, and before the first load of such an engine
that comes later.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from refitd.engine.port import RankProof
from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.fault import Code
from refitd_client.contract.naming import Order, version_folder
from refitd_client.contract.states import EngineState, Kind, VersionState
from refitd_client.contract.wire import Notice
from refitd_client.validation.foreign import recognise
from refitd_client.validation.validate import Evidence, Structure, proof_digest, share_of


class Prove(StrEnum):
    """Who reads tensors to prove them."""

    ENGINE = "engine"
    SERVICE = "service"


def all_prove(version: VersionRecord, engines: Iterable[EngineRecord]) -> bool:
    """Whether each engine of the version's run that could load it now has GPUs that can prove it."""
    there = [each for each in engines if not (each.state.is_away or each.state is EngineState.QUARANTINED)]
    return version.kind is Kind.FULL and bool(there) and all(engine.seen.proves for engine in there)


def needs_reading(version: VersionRecord, engine: EngineRecord) -> bool:
    """Whether the service has to read a version before this engine loads it, since GPUs of others alone have."""
    return bool(version.verdict.proved_by) and not engine.seen.proves


def fault_in(seen: Structure, found: Sequence[RankProof]) -> str | None:
    """Why what the ranks of an engine found does not prove a version, in a sentence; None where it does."""
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


MAX_ENTRIES = 64
MAX_CHARACTERS = 16 * 2**10
LIMITS = f"{MAX_ENTRIES} entries and {MAX_CHARACTERS} characters"
_ZEROS = 10  # times as long a folder is waited for whose last bytes may not have been written yet
_SAY_SO = "its trainer says that it is (POST /v1/versions), or 'refitd publish' publishes it"
_ABANDONED_SECONDS = 10.0  # between two looks at a folder that has stopped changing

# Faults of a checkpoint that may just not have been written to its end.
_MAY_HEAL = frozenset(
    {
        Code.MISSING_FILE,
        Code.TORN_FILE,
        Code.NO_WEIGHTS,
        Code.BAD_INDEX,
        Code.INDEX_MISMATCH,
        Code.CHANGED,
        Code.UNREADABLE,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenFolder:
    """What a look at the directory showed: the manifest's digest, kind and base where there is one. Not `there`: the
    directory is gone, and all this is what is known of it.
    """

    order: Order
    path: str
    digest: str | None
    signature: str
    kind: tuple[Kind, str | None] | None = None
    there: bool = True


def admit(notice: Notice, seen: SeenFolder, known: VersionRecord | None) -> str | None:
    """Why a notice contradicts what is known; None where it brings a new version, or is about the known version."""
    if known is None:
        return _other_digest(notice, seen)
    step = f"step {notice.step} of run {notice.run} (generation {known.order.generation})"
    advice = "publish the next step, or restart the publisher, which opens a new generation"
    if known.path != seen.path:
        return f"{step} is {known.path}, not {seen.path}: {advice}"
    # The watch may have found it first, and its manifest may not have been read yet.
    kind, base = (known.kind, known.base) if known.announced.noticed or seen.kind is None else seen.kind
    if (kind, base) != (notice.kind, notice.base):
        return f"{step} was announced as {_told(kind, base)}, not {_told(notice.kind, notice.base)}: {advice}"
    if known.state is VersionState.DELETED and seen.there:
        return f"{step} was served or passed over, and collected; its files are there again: {advice}"
    is_other = notice.digest is not None and known.digest is not None and notice.digest != known.digest
    # Without a manifest another look says nothing of the bytes: the files are read again (catalog/checks.py).
    differs = None not in {known.digest, seen.digest} and known.digest != seen.digest
    if is_other or (not known.state.is_over and differs):
        return f"the files of {step} are not those that were published first: {advice}"
    return _other_digest(notice, seen)


def _other_digest(notice: Notice, seen: SeenFolder) -> str | None:
    if not seen.there or None in (notice.digest, seen.digest) or notice.digest == seen.digest:
        return None
    return f"what is at {seen.path} here has digest {seen.digest}, and {notice.digest} was published"


def _told(kind: Kind, base: str | None) -> str:
    return kind.value if base is None else f"{kind.value} on {base}"


def fits(metadata: Mapping[str, str]) -> bool:
    size = sum(len(key) + len(value) for key, value in metadata.items())
    return len(metadata) <= MAX_ENTRIES and size <= MAX_CHARACTERS


def completed(noticed: dict[str, str], published: Mapping[str, str]) -> dict[str, str] | None:
    """The notice's metadata and, beneath it, the manifest's; None where that is too much to be kept."""
    both = {**published, **noticed}
    return both if fits(both) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderLook:
    """One look at a checkpoint. `fault` says what does not agree yet. `final`: do not wait. `awaits` is what its
    trainer writes last and has not written yet. `zeros` names a file that ends in zeros.
    """

    signature: str
    final: bool
    fault: str | None
    awaits: str | None = None
    zeros: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settling:
    """What is remembered between looks: what the last look saw, and since when (monotonic seconds)."""

    signature: str
    since: float


@dataclass(frozen=True, slots=True)
class StillWritten:
    """Look again at `until` (monotonic seconds)."""

    memory: Settling
    until: float
    reason: str


@dataclass(frozen=True, slots=True)
class NeverSettles:
    reason: str


def look_of(structure: Structure, *, noticed: bool) -> FolderLook:
    """What `settle` has to know. Of an announced version only faults that may heal are waited for."""
    fault = structure.faults[0] if structure.faults else None
    foreign = recognise(structure.path)
    # Where a marker is written last, all is written when it is there; on some file systems the rest shows later.
    said = noticed or (foreign is not None and foreign.marker is not None and structure.awaits is None)
    proof = fault is not None and fault.code not in _MAY_HEAL
    reason, hole = None if fault is None else fault.reason, None if said else structure.hole
    # What is stored through a mapping changes no time on a tmpfs; but pages come, and zeros go.
    seen = (structure.signature, sum(file.blocks for file in structure.files.values()), structure.zeros)
    return FolderLook(
        signature=structure.signature if structure.has_manifest else repr(seen),
        final=structure.has_manifest or (said and proof) or (said and not noticed and fault is None),
        fault=f"{hole}, as one that is not written to its end: {_SAY_SO}" if reason is None and hole else reason,
        awaits=None if noticed else structure.awaits,
        zeros=None if noticed else structure.zeros,
    )


def settle(
    look: FolderLook, memory: Settling | None, now: float, *, settle_for: float, timeout: float
) -> StillWritten | NeverSettles | None:
    """Decide after one look; None where the checkpoint is complete. `settle_for` and `timeout` are seconds."""
    if look.final:
        return None
    if memory is None or memory.signature != look.signature:
        memory = Settling(signature=look.signature, since=now)
    quiet = now - memory.since
    if look.awaits is not None:
        return StillWritten(
            memory, now + min(max(quiet, 0.1), 1.0 if quiet < timeout else _ABANDONED_SECONDS), look.awaits
        )
    if look.fault is None:
        needed = settle_for * (1 if look.zeros is None else _ZEROS)
        if quiet >= needed:
            return None
        why = "has no manifest" if look.zeros is None else f"{look.zeros} ends in zeros, and there is no manifest"
        reason = f"{why}: complete when nothing has changed for {needed:g} s"
        return StillWritten(memory, min(memory.since + needed, now + settle_for), reason)
    if quiet >= timeout:
        return NeverSettles(
            f"{look.fault}. Nothing has changed for {timeout:g} s: mend the folder, then announce it again"
        )
    ends = f"rejected when nothing has changed for {timeout:g} s"
    return StillWritten(memory, now + min(max(quiet, 0.1), 1.0), f"incomplete: {look.fault}; {ends}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogRules:
    """Times are in seconds. `kind` is what engines get; without `deltas` those are refused."""

    scan_interval: float
    settle_for: float
    settle_timeout: float
    allow_dtype_cast: bool
    kind: Kind = Kind.FULL
    deltas: bool = True
    prove: Prove = Prove.ENGINE


def without_files(record: VersionRecord, versions: Sequence[VersionRecord]) -> VersionRecord | None:
    """What becomes of a version that was handed over and has no files; None while nothing does.

    Trainers write in order: after a newer version none come. A version that was to have none is RETIRED then, but not
    before
    a newer one was served: until then it may be all that engines can serve.
    """
    newer = [version for version in versions if version.order > record.order]
    if not newer:
        return None
    if record.durability is None:
        reason = f"its files never came: its trainer went on to {newer[0].id}"
        return record.having(state=VersionState.REJECTED, reason=reason, unended=0)
    if all(version.served_at is None for version in newer):
        return None
    reason = f"it had no files (durable={record.durability}), and its run went on to {newer[0].id}"
    return record.having(state=VersionState.RETIRED, reason=reason, state_before=record.state, unended=0)


def too_late(record: VersionRecord, versions: Sequence[VersionRecord], evidence: Evidence) -> str | None:
    """Why a version of an earlier generation is refused, whose writer may have meant the current one."""
    current = versions[0].order.generation
    if record.order.generation == current or (evidence.structure is not None and evidence.structure.has_manifest):
        return None
    name = version_folder(Order(current, record.order.step))
    return (
        f"{record.path} counts as generation {record.order.generation}, and run {record.run} is at generation "
        f"{current}: if it belongs there, call it {name}, or publish it with 'refitd publish'"
    )
