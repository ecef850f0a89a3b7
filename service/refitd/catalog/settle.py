"""Whether a checkpoint is still being written. Pure: looks over time in, one decision out.

refitd's own publisher renames a complete directory into place, so a manifest means complete. A checkpoint that somebody
else writes has no such moment: it counts as complete when headers, index and files agree and nothing has changed for
`settle` seconds. One that disagrees is still being written, until it has not changed for `timeout` seconds.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at a checkpoint. `fault` says what does not agree yet, None where all does. `final`: do not wait."""

    signature: str
    final: bool
    fault: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settling:
    """What is remembered between looks: what the last one saw, and since when (monotonic seconds) it is so."""

    signature: str
    since: float


@dataclass(frozen=True, slots=True)
class Complete:
    """Nobody is writing: validate it."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again at `until` (monotonic seconds)."""

    memory: Settling
    until: float
    reason: str


@dataclass(frozen=True, slots=True)
class Hopeless:
    """It will not get complete."""

    reason: str


def settle(
    look: Look, memory: Settling | None, now: float, *, settle_for: float, timeout: float
) -> Complete | Wait | Hopeless:
    """Decide after one look. `settle_for` and `timeout` are seconds."""
    if look.final:
        return Complete()
    if memory is None or memory.signature != look.signature:
        memory = Settling(signature=look.signature, since=now)
    quiet = now - memory.since
    if look.fault is None:
        if quiet >= settle_for:
            return Complete()
        return Wait(
            memory,
            memory.since + settle_for,
            f"has no manifest: complete when nothing has changed for {settle_for:g} s",
        )
    if quiet >= timeout:
        return Hopeless(f"{look.fault}, and nothing has changed for {timeout:g} s")
    return Wait(memory, now + min(max(quiet, 0.1), 1.0), f"incomplete: {look.fault}")
