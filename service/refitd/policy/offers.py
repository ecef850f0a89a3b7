"""Versions that are handed over from a trainer's memory, before their files are there: who may take one. Pure.

An offer is kept in memory alone. It is good for as long as some engine that could take it has not answered; after that,
and after a restart of the service, the version comes by its files like any other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from refitd.policy.in_place import is_past
from refitd.policy.strategy import Strategy, StrategyName
from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.states import EngineState

_AWAY = frozenset(
    {EngineState.PROBING, EngineState.UNREACHABLE, EngineState.TAINTED, EngineState.QUARANTINED, EngineState.CONTESTED}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The file of an offer, relative to the root, the version that it is of, and the engines that may still take it."""

    version: str
    path: str
    waiting: frozenset[str]

    def answered(self, engine: str) -> "Offer":
        """The same when an engine has taken it, or has not and will not."""
        return replace(self, waiting=self.waiting - {engine})


def takers(strategy: Strategy, engines: Iterable[EngineRecord], *, paused: bool) -> frozenset[str]:
    """Who an offer is for. Where engines go one after the other they all wait for the files: a trainer does not wait
    for a canary's check, nor for an operator.
    """
    if strategy.name is not StrategyName.ALL or paused:
        return frozenset()
    return frozenset(engine.id for engine in engines if _can_take(engine))


def offered_to(engine: EngineRecord, offer: Offer | None, versions: Mapping[str, VersionRecord]) -> Offer | None:
    """The offer, where this engine is to take it, or takes it now: it serves nothing newer, and the version was not
    rolled back. As long as there is such an engine the trainer must not change its tensors.
    """
    version = None if offer is None else versions.get(offer.version)
    if offer is None or version is None or engine.id not in offer.waiting or not _can_take(engine):
        return None
    if not version.state.is_open or version.barred:
        return None
    return None if is_past(engine, version, versions) else offer


def _can_take(engine: EngineRecord) -> bool:
    return engine.takes_offers and engine.known and engine.state not in _AWAY
