"""The port to an engine: what the reconciler asks of one replica, whatever server stands behind it.

`refit` is the whole transaction (prepare → pause → load → verify → resume). Its promise is about what is left behind:

    ACK          serves the target, proved by content; generation was resumed
    NACK         refused and proved untouched: serves what it served before; generation was resumed
    TAINTED      contents unknown: left paused; only a proved full load ends this
    UNREACHABLE  nothing was sent, or nothing that could have started a load: contents as before

An engine with known contents is never left paused: `resumed` is False with ACK or NACK only when the engine
could not be reached, and then the reconciler tries again.

How long each stage of a refit takes, in milliseconds of the monotonic clock.
"""

import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from typing import Protocol

from refitd_client.contract.follow import HostEngines
from refitd_client.contract.plugin import Receiver


class Outcome(Enum):
    """How a refit ended. The docstring of the module defines the contents after each."""

    ACK = auto()
    NACK = auto()
    TAINTED = auto()
    UNREACHABLE = auto()


class Stage(Enum):
    PREPARE = "prepare"
    PAUSE = "pause"
    LOAD = "load"
    VERIFY = "verify"
    RESUME = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFiles:
    """A version that refitd's publisher wrote, as the service has checked it: `path` is relative to the root.

    `digest` and `signature` are those of the version's record, `allow_…` what its notice allows.
    """

    version: str
    path: str
    digest: str
    signature: str
    allow_missing: tuple[str, ...] = ()
    allow_extra: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Coming:
    """A version of which the service does not know yet whether it is good; as `Files`, without what it will find.
    `prove`: its tensors are to be read, and nothing of them is to be written into the model.
    """

    version: str
    path: str
    allow_missing: tuple[str, ...] = ()
    allow_extra: bool = False
    prove: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProof:
    """What tensor-parallel rank `rank` of `ranks` has found in its share of a version's tensors
    (`proof_digest`): `signature` is that of the files that it read, `tensors` and `digest` are of the fingerprints;
    `fault` says why nothing is proved, "" where all values are finite and as the manifest says.
    """

    rank: int
    ranks: int
    signature: str
    tensors: int
    digest: str
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A version in a trainer's memory: `offer` is the file that says where, `path` where the version's files will be.
    Both are relative to the root. `sent`: the trainer sends it over a process group, which takes its time.
    """

    version: str
    path: str
    offer: str
    sent: bool = False


async def never_change() -> bool:
    """For files that only their owner's programs change, such as a start-up model."""
    return True


def unheard(host: HostEngines) -> None:
    """For a target of an engine that is no host, or where what a host says meanwhile does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What an engine is to serve: `path` as the engine sees it, `label` the weight_version it gets.

    `fingerprint` is what a clean load of this version gave on an engine of the same configuration, None while
    it was never loaded; `not_fingerprint` is what the engine's contents before the load gave, when the files differ
    (where those are unknown: what it held last).
    `repairs`: the contents before the load are unknown, so that "untouched" is no reason to resume. `unchanged` says
    after the load whether the files are still those that were checked: else it is not known which ones it read.
    `files` is None for what others wrote: an engine's plugin leaves that to the engine; and for what is `offered`.
    `in_place`: it is a delta that the plugin is to write into what is served. `hears` gets what a host says of its
    engines while it carries the order out.
    """

    path: str
    label: str
    fingerprint: str | None = None
    not_fingerprint: str | None = None
    repairs: bool = False
    files: VersionFiles | None = None
    offered: Offered | None = None
    in_place: bool = False
    unchanged: Callable[[], Awaitable[bool]] = field(default=never_change, compare=False)
    hears: Callable[[HostEngines], None] = field(default=unheard, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What a server tells of its process, that another process of the same server would tell otherwise.

    `seed` is drawn at each start, unless the operator gives one; `started` says how the start went, and no second start
    goes like it. None where the server does not tell.
    """

    seed: int | None = None
    started: str | None = None

    def is_as(self, other: "Process") -> bool | None:
        """Whether both are one process; None where they tell nothing that can be compared."""
        for mine, its in ((self.started, other.started), (self.seed, other.seed)):
            if mine is not None and its is not None:
                return mine == its
        return None


UNTOLD = Process()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderUse:
    """What refitd's plugin gives to SGLang's loader in each load, and does not copy by itself: everything, or some
    tensors; `reason` is a sentence. It takes longer, and deltas of these tensors are refused.
    """

    whole: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """What keeps a server from being updated (`blocks`), or makes its updates worse; `fix` says how to start it."""

    text: str
    fix: str
    blocks: bool = True


DRAFT_LEFT = "left as started"
DRAFT_UPDATED = "updated with the model"
"""What becomes of the draft model of a server (speculative decoding) in an update."""

UNNAMED = "(not named)"
"""The `model_path` of a server that tells the label of what it serves and not its path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSeen:
    """What a server is, by what it told the last probe. `server` is what sentences call its kind, such as "SGLang".

    `configuration` is equal for engines whose fingerprints can be compared. `startup_path` is the model that the server
    was started with (None where it does not say): its inventory is what checkpoints are compared with.
    `plugin` is the release of refitd's plugin that carries out its loads; None where they are the server's own, and
    then `stock_reason` says why, where a plugin was looked for. `takes_offers`: it can load from a trainer's memory;
    `receivers` are its ranks that can receive weights over a process group. `proves`: its GPUs can read a version while
    it serves, and say whether it is as its manifest says. `loader`: what its plugin does not copy by itself; None where
    that is nothing, or is not known yet. `draft` says what becomes of its draft model in an update: `DRAFT_LEFT`,
    `DRAFT_UPDATED`, None where it has none. `host`: it is another refitd, which pulls versions itself, and this is what
    that tells of its engines.
    """

    server: str = ""
    server_version: str = ""
    configuration: str | None = None
    startup_path: str | None = None
    plugin: str | None = None
    stock_reason: str | None = None
    takes_offers: bool = False
    receivers: tuple[Receiver, ...] = ()
    proves: bool = False
    loader: LoaderUse | None = None
    draft: str | None = None
    host: HostEngines | None = None

    @property
    def pulls(self) -> bool:
        """Whether it is another refitd, which pulls what it is to serve, deltas with what they stand on."""
        return self.host is not None


UNSEEN = ServerSeen()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached(ServerSeen):
    """What a probe saw. `fingerprint` is not part of a probe: it costs the engine time.

    `address` is where the connection went, equal for two names of one server; `led_by` says which other service leads
    the engine, None where none does. `obstacles` are what is in the way of its updates.
    `may_read` are folders that it may read again, beside `model_path`; where `may_read_more`, also those of before, of
    which the adapter does not know because it was made since.
    Of a host `serves` is the id of the version that it has proved, `desires` of the one that it was ordered to serve
    last.
    """

    configuration: str = ""
    model_path: str
    weight_version: str | None
    process: Process = UNTOLD
    address: str | None = None
    led_by: str | None = None
    obstacles: tuple[Obstacle, ...] = ()
    may_read: tuple[str, ...] = ()
    may_read_more: bool = False
    serves: str | None = None
    desires: str | None = None

    @property
    def told_of_server(self) -> ServerSeen:
        """What the probe saw that stays true of the server: what an engine's record keeps."""
        return ServerSeen(**{each.name: getattr(self, each.name) for each in fields(ServerSeen)})

    def expecting(self, path: str, label: str) -> "Reached":
        """The same with `path`, where the server tells no path and the label is that of what is there."""
        if self.model_path != UNNAMED or self.weight_version != label or not path:
            return self
        return replace(self, model_path=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreached:
    """A probe that failed, and why, in a sentence. `advice` says what an operator can do about it, "" for nothing.

    `recognised`: a server of the adapter's kind is there, and lacks something. `nothing_listens`: every address of the
    server refused the connection. `is_awaited`: it is a host that has had no time to report since the service started,
    so it does not count as away yet.
    """

    reason: str
    advice: str = ""
    recognised: bool = False
    nothing_listens: bool = False
    is_awaited: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeCheck:
    """Whether the engine's key opens changes.

    `fault` says why it does not, None where it does, and `advice` what an operator can do about that.
    """

    fault: str | None = None
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """How a refit ended. `timings` maps stages to milliseconds; `fingerprint` is of the contents left behind.

    `needs_full`: it is a NACK of a delta that is good, and that cannot be written into what the engine holds; `led`: it
    is one because another service leads the engine; `waits`: it is one because a host's own operator has paused it,
    which says nothing of the version. `overwritten`: it is TAINTED for something that says nothing
    against the version, such as another writer's load at the same time. `may_read` and
    `may_read_more` as in `Reached`, after an ACK.
    `recorded`: no clean load of the version was on record, so that its fingerprint was compared with none.
    `configuration` is the one that `fingerprint` is of, None for that of the last probe: a host's is of the engines
    that serve the version, and before a run's first version no engine of it follows the run.
    """

    outcome: Outcome
    resumed: bool
    reason: str | None = None
    fingerprint: str | None = None
    needs_full: bool = False
    led: bool = False
    waits: bool = False
    overwritten: bool = False
    recorded: bool = False
    configuration: str | None = None
    may_read: tuple[str, ...] = ()
    may_read_more: bool = False
    timings: dict[str, float] = field(default_factory=dict[str, float])


class EnginePort(Protocol):
    """One replica. Its reconciler sees to it that calls never overlap. No call raises for what a server does.

    What has a body here is that of an engine that prepares nothing, and that no load pauses.
    """

    async def probe(self) -> Reached | Unreached:
        """Ask what it serves. Cheap, answers while the engine loads, never touches generation."""
        ...

    async def refit(self, target: Target, on_stage: Callable[[Stage], None]) -> Refit:
        """Prepare while it serves, where it can; then pause, load, verify, resume. `on_stage`: a stage begins."""
        ...

    async def prefetch(self, version: Coming | Offered) -> Sequence[RankProof]:
        """Have it make a version ready while it serves, where it can; nothing is written. What comes of that shows in
        the refit: it takes less time, or says why not. Returns what its ranks prove, where the version is to be proved.
        """
        return ()

    async def cancel_prefetch(self) -> None:
        """Have it close what it prepared: no refit to that follows."""

    async def fingerprint(self, alike: str | None = None) -> str | None:
        """One digest over all loaded tensors; None where the server cannot compute it.

        `alike`: the digest to compare it with, so that it is computed in the same way.
        """
        return None

    async def trial(self, label: str) -> str | None:
        """Ask for a few tokens as a rollout would; why the answer is not in order, None where it is."""
        ...

    async def resume(self) -> bool:
        """Let it generate. Harmless on an engine that is not paused. False if the call did not succeed."""
        return True

    async def check_changes(self) -> ChangeCheck:
        """Find out whether its key opens changes, by a call that changes nothing."""
        return ChangeCheck()

    async def aclose(self) -> None:
        """Give back connections."""


class Stopwatch:
    """Times stages, in milliseconds of the monotonic clock, and reports the begin of each."""

    def __init__(self, on_stage: Callable[[Stage], None]) -> None:
        self._on_stage = on_stage
        self.milliseconds: dict[str, float] = {}

    @contextmanager
    def during(self, stage: Stage) -> Generator[None]:
        """Count what happens inside to `stage`."""
        self._on_stage(stage)
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = (time.perf_counter() - started) * 1000
            self.milliseconds[stage.value] = self.milliseconds.get(stage.value, 0.0) + spent
