"""Whether the service knows yet which versions and engines there are, and what it says until then. Pure.

What a lost journal knew of readers is gone with it: until the root was listed and every engine asked, any version may
be
the one that an engine serves, reads or would be brought back to, so nothing is collected. The first answer of an engine
also proves that no load is under way: a server answers how it was started from the loop that loads.
"""

from dataclasses import dataclass

from refitd.policy.leases import DEAD_AFTER
from refitd.problem import ProblemError, Slug
from refitd.state.records import EngineRecord
from refitd.state.store import Store
from refitd.text import spoken
from refitd_client.contract.states import EngineState

_ASK_AGAIN = {"Retry-After": "1"}  # seconds; listing a root takes less


@dataclass(frozen=True, slots=True)
class Withheld:
    """Nothing is collected now, whatever lies in the root; `reason` is a sentence."""

    reason: str


def waits_for(known: Store) -> str | None:
    """What the rebuild of the journal still waits for; None where nothing is to be rebuilt, or nothing is missing."""
    if known.origin.rebuilt:
        return None
    now = known.clock.monotonic()
    waits = (_waits_for(engine, now) for engine in known.engines.values())
    return known.faults.root or known.faults.fleet or next(filter(None, waits), None)


def _waits_for(engine: EngineRecord, now: float) -> str | None:
    if engine.state is EngineState.PROBING:
        return f"engine {engine.id} has not answered yet"
    since = engine.trouble.unreachable_since
    left = DEAD_AFTER if since is None else DEAD_AFTER - (now - since)
    if engine.state is EngineState.UNREACHABLE and left > 0:
        return f"engine {engine.id} cannot be reached: it counts as dead in {spoken(left)}, or take it out of the fleet"
    return None


def why_rebuilding(known: Store) -> str | None:
    """That a lost journal is being rebuilt, and what for; None where none was lost, or it is rebuilt."""
    if known.origin.rebuilt or not known.origin.lost:
        return None
    return f"the journal was lost and is being rebuilt: {waits_for(known) or 'it is about to be done'}"


def why_not_ready(known: Store) -> str | None:
    """Why the service cannot say yet which versions there are; None where it can. No listing finds the versions of a
    lost journal that were announced with a path of their own.
    """
    return known.faults.root or why_rebuilding(known)


def unknown(known: Store, kind: Slug, detail: str) -> ProblemError:
    """The problem to raise for a version or a run that the service does not know. `detail` is said when it is ready."""
    why = why_not_ready(known)
    return ProblemError(kind, detail) if why is None else not_ready(why)


def not_ready(why: str) -> ProblemError:
    return ProblemError(Slug.NOT_READY, why, _ASK_AGAIN)
