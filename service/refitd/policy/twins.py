"""One server under two names: `localhost` and `127.0.0.1`, a host's name and its address, a file and a setting. Pure.

Names are compared where connections to them go, and what the servers there tell of their processes must not differ: a
proxy may have several servers behind one address. One of the entries loads the server, the other is left alone.
"""

from collections.abc import Iterable

from refitd.engine.port import Reached, Unreached
from refitd.state.records import EngineRecord
from refitd_client.contract.states import EngineState

_AWAY = frozenset({EngineState.PROBING, EngineState.UNREACHABLE})


def twin_of(engine: EngineRecord, seen: Reached, engines: Iterable[EngineRecord]) -> str | None:
    """Which other entry loads the server that a probe has reached, in a sentence; None where this one does.

    The one that serves something already loads it, else the first by name.
    """
    for other in engines:
        if other.id == engine.id or other.state in _AWAY or other.taken is not None:
            continue
        if _is_one(seen, other) and _rank(other) < _rank(engine):
            names = f"{other.id} ({other.url})"
            return f"{engine.url} is the server of engine {names}, which loads it: take one of the two names out"
    return None


def is_one_server(one: Reached | Unreached, other: Reached | Unreached) -> bool:
    """Whether two probes have reached the same server."""
    return isinstance(one, Reached) and isinstance(other, Reached) and _is_one(one, other)


def _is_one(one: Reached, other: Reached | EngineRecord) -> bool:
    return one.address is not None and one.address == other.address and one.process.is_as(other.process) is not False


def _rank(engine: EngineRecord) -> tuple[bool, str]:
    return (engine.serving is None, engine.id)
