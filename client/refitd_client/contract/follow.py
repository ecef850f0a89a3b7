"""The wire types of following: what a host and the upstream that it follows tell each other over HTTP."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from refitd_client.contract.states import EngineState

STRICT = {"extra": "forbid"}  # of request bodies: a mistyped field name must not mean the field's default

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
    as after a loss of the hub's root; the hub says that. `shares_name`: two hosts report by this name, as the hub says.
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
    shares_name: bool = False

    @property
    def count(self) -> int:
        return sum(self.states.values())


MAX_REPORTED = 1000  # versions in each list of a report


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """What a host says of itself: GET /v1/follow, and in each report to its upstream.

    `follower` is its name, unique among the upstream's hosts. `upstream` is the one that it follows now, of
    `upstreams`; `heard_at` is when that last answered, None where it has not since the start. `run` is the run that it
    follows, None where it has none yet. `desired` is the id of the version that the upstream wants it to serve,
    `ordered` of the last such version that was good here, `serves` of the one that its engines are proved to serve.
    `pulling` is the id of the version that it pulls, of which `pulled_bytes` have arrived, and `source` the URL of what
    they come from: the upstream's, or that of an object store which the upstream has named; "" while it waits for its
    turn, and `ahead` hosts pull before it then, as the upstream said last (0: it has not said yet). `store_fault` is
    why it does not pull from the store that the upstream names, in a sentence. `fault` is what keeps it from what it is
    to serve, in a sentence, None where nothing does.

    `process` is drawn at each start of the service, `release` its release. `leads`: the upstream decides what is served
    here and when; `leader` and `fence` are the name and the epoch of the hub whose reply was obeyed last, `again` is
    the number of the last load that was asked for again, and `refused` is why the last reply was not obeyed. `order`
    says how far the host is with `desired`, and `order_reason` why, in a sentence. `configuration` is equal for hosts
    whose engines' fingerprints can be compared, and `proof` sums up the fingerprints of the engines that serve
    `serves`, None where they have none. `digests` are those of what it has by the ids that it names: of two versions
    with one name, it has the one with that digest. `heard` are the highest epochs that it has heard, by the names of
    hubs.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT

    follower: str
    upstream: str
    upstreams: list[str]
    heard_at: str | None = None
    run: str | None = None
    desired: str | None = None
    ordered: str | None = None
    serves: str | None = None
    pulling: str | None = None
    pulled_bytes: int = 0
    source: str = ""
    ahead: int | None = None
    store_fault: str | None = None
    fault: str | None = None
    process: str = ""
    release: str = ""
    leads: bool = False
    leader: str = ""
    fence: int = 0
    heard: Mapping[str, int] = field(default_factory=dict[str, int])
    again: int = 0
    refused: str | None = None
    order: OrderState = OrderState.NONE
    order_reason: str | None = None
    configuration: str = ""
    proof: str | None = None
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    host: HostEngines | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTrial:
    """A question of the hub, by its number: is each engine that serves the version with this label asked for a few
    tokens, are its answers in order?
    """

    number: int
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTrialResult:
    """What is wrong with the answers to the question of this number, in a sentence; None where nothing is."""

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT

    number: int
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """The body of PUT /v1/hosts/{name}: what a host is at.

    `number` counts the reports of its process: one that comes after a later one counts for nothing. `holds` are the ids
    of versions that it has in whole and validated, `pulls` of those that it pulls now, which the upstream keeps until
    the lease's end. `freely`: the host decides for itself, and goes to the run's target. `tried` answers the newest
    `HostReply.trial`.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT

    told: Following
    number: int = 0
    holds: tuple[str, ...] = ()
    pulls: tuple[str, ...] = ()
    freely: bool = False
    tried: HostTrialResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPull:
    """How a host is to pull `version`, of which it said that it pulls it, or waits to.

    `store` is the URL of an object store that has the same contents, "" where none has. Else it pulls from the
    upstream, once `ahead` is 0: so many hosts pull before it.
    """

    version: str
    ahead: int = 0
    store: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReply:
    """What the upstream says to a report.

    `lease_seconds` is how long it keeps what the host pulls without another report. `serve` says what the host is to
    serve, a version's id by its run; None is what it serves. Of a run that is not named nothing is decided: the host
    stays where it is. `again` is the number of a load that is to be repeated though the host serves the version; 0:
    none is. `leader` and `epoch` are those of the hub, `told_by` says where it runs, for people. A host obeys no epoch
    below one that it has heard. `knows` is the newest good version that the hub knows of a run, or that an operator has
    rolled back from there: a host goes back from nothing newer, since a hub that has lost its memory orders what it
    still knows. `digests` are those of what is to be served: one that a host has with other contents is another
    version. `trial` is a question that the next reports are to answer. `pull` says how to pull; None of an upstream
    that gives no turns. `soon`: something is about to be decided, so that the next report is wanted within
    `busy_seconds`, as while the host is at something: more seconds where there are more hosts.
    """

    lease_seconds: float
    serve: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])
    again: int = 0
    leader: str = ""
    epoch: int = 0
    told_by: str = ""
    knows: Mapping[str, str] = field(default_factory=dict[str, str])
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    trial: HostTrial | None = None
    pull: HostPull | None = None
    soon: bool = False
    busy_seconds: float = 1.0
