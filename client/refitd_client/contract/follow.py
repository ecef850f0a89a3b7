"""The wire types of following: what a follower and its upstream tell each other over HTTP."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from refitd_client.contract.hosts import HostEngines, OrderState
from refitd_client.contract.wire import STRICT

FOLLOWER_HEADER = "X-Refitd-Follower"  # a follower's name, quoted as in a URL, where it asks a hub for bytes
MAX_REPORTED = 1000  # versions in each list of a report


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerReport:
    """What a follower tells its upstream: which versions it has and serves, and which it pulls.

    `follower` is its name, unique among the upstream's followers; `url` is where it can be called, None if it cannot.
    `zone` labels its place, such as an availability zone, "" for none. `run` is the run that it follows, None where it
    has none yet. `holds` are the ids of versions that it has in whole and validated, and hands on, `pulls` those that
    it pulls now, which the upstream keeps until the lease's end, `serves` the one that its engines are proved to serve.
    `process` is a random name of this follower's process. `wrong` has relays that gave wrong bytes, by the name of
    their process, each with a sentence; `lost` names the processes of those that did not give what they were asked for
    in this pull. `engines` is how many engines it has.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT

    follower: str
    url: str | None = None
    zone: str = ""
    run: str | None = None
    holds: tuple[str, ...] = ()
    pulls: tuple[str, ...] = ()
    serves: str | None = None
    process: str = ""
    wrong: Mapping[str, str] = field(default_factory=dict[str, str])
    lost: tuple[str, ...] = ()
    engines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """A follower that hands on what it has: its URL, and the name of the process there."""

    url: str
    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportAnswer:
    """What the upstream says to a report.

    `lease_seconds` is how long it keeps what the follower pulls without another report. `relays` says, by the id of a
    version, from whom to pull its blocks: counted through all of its files in the order of the manifest, they are of
    the entries in turns. None is the upstream itself. `leads`: the upstream orders by itself what this follower serves
    (PUT /v1/follow/desired), and `leader` is the name by which its orders are known.
    """

    lease_seconds: float
    relays: Mapping[str, tuple[Relay | None, ...]] = field(default_factory=dict[str, "tuple[Relay | None, ...]"])
    leads: bool = False
    leader: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOrder:
    """The body of PUT /v1/follow/desired: what the engines of a host are to serve from now on.

    `version` is its id, None for nothing but what they serve. `fence` is the epoch of the hub's lead (0 of a service
    that belongs to no group): a lower one than the host has seen is refused. `leader` is its name, `told_by` where
    it runs, for people. `again`: the engines are loaded again even if they serve the version.

    `after` is the number of orders (`Following.orders`) that the host had obeyed when this one was made. Where it has
    obeyed another since, this one is late, and is refused, unless it orders what is desired already. None is obeyed
    whenever it comes: the host told no number, or the hub knows of none. A host that tells none refuses the field.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT

    run: str
    version: str | None
    fence: int = 0
    leader: str = ""
    told_by: str = ""
    again: bool = False
    after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTrial:
    """The body of POST /v1/follow/trial: the label of the version whose engines are asked for a few tokens."""

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT

    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTrialResult:
    """What is wrong with the answers of a host's engines, in a sentence; `fault` is None where nothing is."""

    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOut:
    """What this service itself has sent of a version to followers: bytes, and how many copies of it these are."""

    version: str
    bytes: int
    copies: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedFollower:
    """A follower's place: from whom it pulls, by stripe (a follower's name, None for this service itself), and in which
    stripe it hands on (`home`), None where it does in none. `why_not` says why nobody pulls from it now.
    """

    follower: str
    run: str | None
    zone: str
    url: str | None
    home: int | None
    parents: list[str | None]
    why_not: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Relays:
    """Who pulls from whom: GET /v1/relays. `children` is how many each follower may have; 0: all pull from here."""

    children: int
    followers: list[RelayedFollower]
    handed_out: list[HandedOut]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileBlocks:
    """The digests of a file's blocks of `size` bytes, the last one shorter; 32 hexadecimal digits each."""

    blocks: list[str]
    size: int = 2**24  # as older releases, which have those of the manifest alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """What a follower says of itself: GET /v1/follow.

    `upstream` is the one that it follows now, of `upstreams`; `heard_at` is when that last answered, None where it has
    not since the start. `run` is the run that it follows. `desired` is the id of the version that the upstream wants it
    to serve, `ordered` of the last such version that was good here, `serves` of the one that its engines are proved to
    serve. `pulling` is the id of the version that it pulls, of which `pulled_bytes` have arrived. `fault` is what keeps
    it from what it is to serve, in a sentence, None where nothing does.

    `process` is drawn at each start of the service, `release` its release. `leads`: a hub orders what is served here;
    `leader` and `fence` are those of the newest order, `orders` is how many orders have been obeyed here, None where
    that is not counted (the next order is made after so many). `order` says how far the host is with `desired`, and
    `order_reason` why, in a sentence. `configuration` is equal for hosts whose engines' fingerprints can be compared,
    and `proof` sums up the fingerprints of the engines that serve `serves`, None where they have none.
    """

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
    fault: str | None = None
    process: str = ""
    release: str = ""
    leads: bool = False
    leader: str = ""
    fence: int = 0
    orders: int | None = None
    order: OrderState = OrderState.NONE
    order_reason: str | None = None
    configuration: str = ""
    proof: str | None = None
    host: HostEngines | None = None
