"""Which of many engines come first: those that need an operator."""

from collections import Counter
from collections.abc import Collection, Iterable

from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import Engine


def by_need(engines: Iterable[Engine]) -> list[Engine]:
    """The engines, those that need an operator first, the healthy ones last; of a state in the order of their names."""
    order = EngineState.by_need()
    return sorted(engines, key=lambda engine: (order.index(engine.state), engine.id))


def counted(engines: Collection[Engine]) -> str:
    """How many engines are in each state, as "3 TAINTED, 997 IN_SYNC"."""
    counts = Counter(engine.state for engine in engines)
    return ", ".join(f"{counts[state]:,} {state}" for state in EngineState.by_need() if counts[state])
