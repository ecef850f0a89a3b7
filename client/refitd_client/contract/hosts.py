"""What a host that follows an upstream tells of its engines, for the hub that leads it."""

from dataclasses import dataclass, field
from enum import StrEnum

from refitd_client.contract.states import EngineState

MAX_HOST_ENGINES = 16  # engines that a host names one by one


class OrderState(StrEnum):
    """How far a host is with what it was ordered to serve."""

    NONE = "none"  # nothing was ordered
    COMES = "comes"  # it is pulled, checked or loaded
    SERVED = "served"  # the host's engines are proved to serve it
    REFUSED = "refused"  # the host or one of its engines refuses it
    DOUBTFUL = "doubtful"  # an engine's contents are unknown, and it is not being repaired
    AWAY = "away"  # none of the host's engines can be reached


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEngine:
    """One engine of a host, in short. `version` is what it is proved to serve, `paused` whether it may be paused."""

    id: str
    state: EngineState
    version: str | None = None
    reason: str | None = None
    paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEngines:
    """The engines of a host: how many are in each state, and at most 16 of them, those that need a look first.

    `follower` is the name of the service there, `upstream` the upstream that it follows, "" where that is not known.
    `pulling`, `pulled_bytes`, `source`, `ahead` and `store_fault` are as in `Following`, and `loading` is the id of the
    version that its engines are being brought to. A host leaves these to its hub.
    `waits` is why it goes to nothing newer, whatever is ordered, in a sentence: its own operator has paused it. None
    where it goes. `unknown` is the id of the version it has that its hub does not know, or knows with other contents,
    as after a loss of the hub's root; the hub says that.
    """

    follower: str
    states: dict[EngineState, int] = field(default_factory=dict[EngineState, int])
    engines: tuple[HostEngine, ...] = ()
    upstream: str = ""
    pulling: str | None = None
    pulled_bytes: int = 0
    source: str = ""
    ahead: int | None = None
    store_fault: str | None = None
    loading: str | None = None
    waits: str | None = None
    unknown: str | None = None

    @property
    def count(self) -> int:
        """How many engines the host has."""
        return sum(self.states.values())
