"""Whether a lost journal is rebuilt far enough to collect anything. Pure.

What the journal knew of readers is gone with it: until the root was listed and every engine asked, any version may be
the one that an engine serves, reads or would be brought back to. The first answer of an engine also proves that no load
is under way that the lost journal knew of: a server answers how it was started from the loop that loads.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from refitd.duration import spoken
from refitd.reclaim.leases import DEAD_AFTER, EngineView
from refitd_client.contract.states import EngineState


@dataclass(frozen=True, slots=True)
class Withheld:
    """Nothing is collected now, whatever lies in the root; `reason` is a sentence."""

    reason: str


def unfinished(
    engines: Iterable[EngineView], *, root_fault: str | None, fleet_fault: str | None, dead_after: float = DEAD_AFTER
) -> str | None:
    """What the rebuild still waits for, None when it waits for nothing. The faults say why a list is not known yet."""
    if root_fault is not None:
        return root_fault
    if fleet_fault is not None:
        return fleet_fault
    waits = (_waits_for(engine, dead_after) for engine in engines)
    return next((reason for reason in waits if reason is not None), None)


def _waits_for(engine: EngineView, dead_after: float) -> str | None:
    if engine.state is EngineState.PROBING:
        return f"engine {engine.id} has not answered yet"
    if engine.state is EngineState.UNREACHABLE and engine.unreachable_for < dead_after:
        left = dead_after - engine.unreachable_for
        return f"engine {engine.id} cannot be reached: it counts as dead in {spoken(left)}, or take it out of the fleet"
    return None
