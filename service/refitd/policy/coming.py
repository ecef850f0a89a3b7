"""A version on its way to its verdict, and which engines look at it meanwhile. Pure.

An engine that has the plugin makes a version ready while it serves, and writes nothing. That need not wait until the
service has read every byte: both happen side by side, and the load waits for both.
"""

from collections.abc import Iterable

from refitd.policy.in_place import Versions, is_past, step_in_place
from refitd.policy.strategy import Strategy, StrategyName
from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.states import EngineState, Kind, VersionState

_SERVES = frozenset({EngineState.IN_SYNC, EngineState.BEHIND, EngineState.NACKED})


def coming(versions: Iterable[VersionRecord], engines: Iterable[EngineRecord]) -> str | None:
    """The newest version of a run, where it waits for its verdict and its files are there; nobody asks without plugin.

    What a trainer hands over has no files yet when engines hear of it, and who serves it needs none.
    """
    if all(engine.plugin is None for engine in engines):
        return None
    newest = max(versions, key=lambda version: version.order, default=None)
    if newest is None or not newest.state.is_open or newest.barred or newest.handed:
        return None
    return newest.id if newest.noticed or newest.state is VersionState.VALIDATING else None


def looks_ahead(
    engine: EngineRecord, version: VersionRecord, versions: Versions, strategy: Strategy, *, paused: bool
) -> bool:
    """Whether an engine would be brought to a version at once, as it is, were it found good now."""
    if strategy.name is not StrategyName.ALL or paused:
        return False
    if engine.plugin is None or not engine.known or engine.state not in _SERVES:
        return False
    if is_past(engine, version, versions):
        return False
    return version.kind is Kind.FULL or step_in_place(engine, version, versions) == version
