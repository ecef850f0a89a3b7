"""Whether a checkpoint is still being written. Pure: looks over time in, one decision out.

refitd's own publisher renames a complete directory into place, so a manifest means complete. A checkpoint that another
program writes has no such moment: it counts as complete when headers, index and files agree and nothing has changed for
`settle` seconds. One that disagrees is still being written, until it has not changed for `timeout` seconds. Where its
trainer is known to write a certain file last, the service waits for that file without a limit: its absence is no fault.
"""

from dataclasses import dataclass

from refitd_client.checkpoint.fault import Code
from refitd_client.contract.states import Kind
from refitd_client.validation.conventions import recognise
from refitd_client.validation.validate import Structure

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
class FolderLook:
    """One look at a checkpoint. `fault` says what does not agree yet, None where all does. `final`: do not wait.

    `awaits` is what its trainer writes last and has not written yet.
    """

    signature: str
    final: bool
    fault: str | None
    awaits: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settling:
    """What is remembered between looks: what the last one saw, and since when (monotonic seconds) it is so."""

    signature: str
    since: float


@dataclass(frozen=True, slots=True)
class Complete:
    """It is complete: validate it."""


@dataclass(frozen=True, slots=True)
class StillWritten:
    """Look again at `until` (monotonic seconds)."""

    memory: Settling
    until: float
    reason: str


@dataclass(frozen=True, slots=True)
class NeverSettles:
    """It will not get complete."""

    reason: str


def look_of(structure: Structure, *, noticed: bool) -> FolderLook:
    """What `settle` has to know. One that was announced is written: only faults that may heal are waited for."""
    fault = structure.faults[0] if structure.faults else None
    foreign = recognise(structure.path)
    # Where a marker is written last, all is written when it is there; on some file systems the rest shows later.
    said = noticed or (foreign is not None and foreign.marker is not None and structure.awaits is None)
    proof = fault is not None and fault.code not in _MAY_HEAL
    return FolderLook(
        signature=structure.signature,
        final=structure.has_manifest or (said and proof) or (said and not noticed and fault is None),
        fault=None if fault is None else fault.reason,
        awaits=None if noticed else structure.awaits,
    )


def settle(
    look: FolderLook, memory: Settling | None, now: float, *, settle_for: float, timeout: float
) -> Complete | StillWritten | NeverSettles:
    """Decide after one look. `settle_for` and `timeout` are seconds."""
    if look.final:
        return Complete()
    if memory is None or memory.signature != look.signature:
        memory = Settling(signature=look.signature, since=now)
    quiet = now - memory.since
    if look.awaits is not None:
        return StillWritten(
            memory, now + min(max(quiet, 0.1), 1.0 if quiet < timeout else _ABANDONED_SECONDS), look.awaits
        )
    if look.fault is None:
        if quiet >= settle_for:
            return Complete()
        return StillWritten(
            memory,
            memory.since + settle_for,
            f"has no manifest: complete when nothing has changed for {settle_for:g} s",
        )
    if quiet >= timeout:
        return NeverSettles(f"{look.fault}, and nothing has changed for {timeout:g} s")
    return StillWritten(memory, now + min(max(quiet, 0.1), 1.0), f"incomplete: {look.fault}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogRules:
    """Times are in seconds. `kind` is what engines get, full versions or adapters; without `deltas` those are refused
    by kind.
    """

    scan_interval: float
    settle_for: float
    settle_timeout: float
    allow_dtype_cast: bool
    kind: Kind = Kind.FULL
    deltas: bool = True
