"""What the service's events tell of a run: pure."""

from collections import Counter
from collections.abc import Iterable

from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import Event

_TROUBLES = frozenset(
    {
        EngineState.TAINTED,
        EngineState.NACKED,
        EngineState.UNREACHABLE,
        EngineState.QUARANTINED,
        EngineState.CONTESTED,
    }
)


def updates_done(events: Iterable[Event]) -> int:
    """Loads that were proved."""
    return _steps(events)[EngineState.VERIFYING, EngineState.IN_SYNC]


def troubles(events: Iterable[Event]) -> Counter[str]:
    """How often engines got into states that only failures bring."""
    counted: Counter[str] = Counter()
    for (before, state), count in _steps(events).items():
        if state in _TROUBLES and state is not before:
            counted[state] += count
    return counted


def _steps(events: Iterable[Event]) -> Counter[tuple[EngineState | None, EngineState]]:
    """Each state that an engine got into, with the one before."""
    last: dict[str, EngineState] = {}
    counted: Counter[tuple[EngineState | None, EngineState]] = Counter()
    for event in events:
        if event.kind == "engine" and "state" in event.data:
            state = EngineState(event.data["state"])
            counted[last.get(event.subject), state] += 1
            last[event.subject] = state
    return counted
