"""The wire types of the HTTP API (v1), as plain frozen dataclasses: FastAPI serves them, the clients read them.

Times of day are RFC 3339 strings in UTC and for display only. Durations in `timings` are milliseconds.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

from refitd_client.contract.follow import STRICT, HostEngines
from refitd_client.contract.states import (
    EngineGlance,
    EngineState,
    Kind,
    LogSeverity,
    Standing,
    UpdateState,
    VersionGlance,
    VersionState,
    WaitOutcome,
)

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """ "Weights ready": the body of POST /v1/versions. The same notice again is the same version.

    `path` is absolute or relative to the root; without one it is where the SDK would have published the step.
    `allow_missing` has patterns of the names of tensors that it may lack of those of the engines' model, such as
    `mtp.*`; `allow_extra` lets it have more.
    `publish_ms` is how long publishing took, in milliseconds: it is shown beside the other stages of the update.
    `digest` is that of the published manifest, and `root` the name in the `.refitd/id` of the publisher's root, empty
    if it has none: a notice of another version than the one in the service's root is refused.
    `engines` is "mine" if the service should bring engines to a run that none follows: those that follow no run, and
    those of runs that are closed. Without any such engine the notice is refused.
    With kind `handover` the version's files are not there yet: `offer` is the name of the file in the run's folder that
    says in which process's memory it lies; or `failed` says why a handed-over version will have no files.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT

    run: str
    step: int
    path: str | None = None
    kind: Kind = Kind.FULL
    base: str | None = None
    allow_missing: list[str] = field(default_factory=list[str])
    allow_extra: bool = False
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    publish_ms: float | None = None
    digest: str | None = None
    root: str | None = None
    offer: str | None = None
    failed: str | None = None
    engines: Literal["mine"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOnVersion:
    """One engine of the run, when the service answered.

    `version` is the id of the version that it serves, which names run and generation; None while that is not known,
    since the engine does not answer or has unknown contents, and while it serves none. `step` is that version's, where
    it belongs to the same run and generation as the version asked for. `serves`: it serves the version asked for.
    """

    id: str
    state: EngineState
    step: int | None
    reason: str | None = None
    serves: bool = False
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version as the service sees it. `bytes` counts all its files; `timings` maps stages to milliseconds.

    `base` is the version that a delta leads from. `proved_by` are the engines whose GPUs have proved its tensors, where
    the service has not read these itself. `needs_full`: it cannot be carried out, for the reason given, and the next
    one that can is a full version. `in_memory`: it was handed over from its trainer's memory, and has no good files
    yet, or never will: no engine can be brought back to it. `allow_missing` and `allow_extra` are its notice's;
    `left_out` are the first of the tensors that it lacks of those of the engines' model, and `left_out_count` says how
    many there are. `notes` say what else is worth knowing of its files. `glance` is the state as lists show it.
    """

    id: str
    run: str
    generation: int
    step: int
    kind: Kind
    state: VersionState
    path: str
    created_at: str
    reason: str | None = None
    bytes: int | None = None
    digest: str | None = None
    pinned: bool = False
    barred: bool = False
    base: str | None = None
    needs_full: bool = False
    in_memory: bool = False
    proved_by: list[str] = field(default_factory=list[str])
    engines: list[EngineOnVersion] = field(default_factory=list[EngineOnVersion])
    timings: dict[str, float] = field(default_factory=dict[str, float])
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    allow_missing: list[str] = field(default_factory=list[str])
    allow_extra: bool = False
    left_out: list[str] = field(default_factory=list[str])
    left_out_count: int = 0
    notes: list[str] = field(default_factory=list[str])
    glance: VersionGlance | None = None


def left_out_clause(names: Sequence[str], count: int) -> str:
    """What a version leaves out, as a clause; "" where it leaves out nothing. `names` are the first of the tensors,
    `count` is of all.
    """
    if not count:
        return ""
    more = f" and {count - 3:,} more" if count > 3 else ""
    text = f"leaves out {count:,} of the model's tensors ({', '.join(names[:3])}{more})"
    return f"{text}: engines keep their start-up weights of those"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitResult:
    """The answer of the long poll. `followers`, by name, follow the run, or none yet: they take versions from files."""

    outcome: WaitOutcome
    version: Version
    followers: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try to bring an engine to a version. `outcome` is None while it runs, `timings` are known at its end.

    `outcome` is ACK (serves it), NACK (refused, untouched), TAINTED (contents unknown), UNREACHABLE or NOT_SENT.
    `kind` is what was loaded: `delta` in place; None where an earlier release has recorded the load.
    """

    engine: str
    version: str
    started_at: str
    outcome: str | None = None
    reason: str | None = None
    kind: Kind | None = None
    timings: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine (a replica) as the service sees it. `version` is what it is proven to serve.

    `pair` are the URLs of other servers that are updated together with the one at `url`, as one engine.
    `behind` counts the trainer's steps from there to its run's target; None if they cannot be compared: on start-up
    weights or unknown contents, without a target, between generations and between runs.
    `server` and `server_version` are its server's, such as "vLLM" and "0.32.0", None until it was reached; `proof` is
    what proves that it serves `version`, such as "digests of parameters", None where nothing does.
    `plugin` is the release of refitd's plugin that carries out its loads; None if the server does, for `stock_reason`.
    `through_loader` says why the plugin loads tensors through the server's loader, which takes longer and refuses
    deltas of them; None if it copies all, or has loaded nothing yet. `loads_whole`: it loads all of them so.
    `draft` says what becomes of its draft model in an update, such as "left as started"; None where it has none.
    `in_memory` is that of the version it serves: after a restart it could not be brought back to it. `known` is False
    while its contents are unknown. `unreachable_since` is when it was first found not to answer, as far as this service
    has seen; None while it answers. `moved`: an operator has moved it to its run, against the settings or the engines
    file. `host` has the engines of one that is another refitd. `glance` is the state as lists show it.
    """

    id: str
    url: str
    state: EngineState
    run: str | None = None
    version: str | None = None
    step: int | None = None
    behind: int | None = None
    weight_version: str | None = None
    reason: str | None = None
    paused: bool = False
    last_attempt: Attempt | None = None
    skipped: int = 0
    server: str | None = None
    server_version: str | None = None
    proof: str | None = None
    plugin: str | None = None
    stock_reason: str | None = None
    through_loader: str | None = None
    loads_whole: bool = False
    draft: str | None = None
    in_memory: bool = False
    known: bool = True
    unreachable_since: str | None = None
    moved: bool = False
    pair: tuple[str, ...] = ()
    host: HostEngines | None = None
    glance: EngineGlance | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEngine:
    """The body of POST /v1/engines. `run` may be left out where there is one run."""

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT

    url: str
    id: str | None = None
    run: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The body of POST /v1/engines/move: engines, by id or URL, follow `run` from now on.

    Engines of a run that is not closed are moved with `insist` only.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT

    engines: list[str]
    run: str
    insist: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChange:
    """The body of POST /v1/runs: what becomes of a run, whether it is `closed` or its updates are `paused`."""

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT

    run: str
    closed: bool | None = None
    paused: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedRun:
    """A run that was deleted, and how many versions go with it."""

    run: str
    versions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """The body of POST /v1/rollback. `to` is a version id; without it, the last good one before the current."""

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT

    run: str
    to: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackPlan:
    """Where a rollback would lead: from which version (`leaves`) to which (`goal`), and what it would bar for good.

    All are ids of versions, those `barred` the newest first; `unreachable` are ids of engines that would follow later.
    `unknown` are newer versions that hosts have and the service does not know, as after a restore from a backup: hosts
    go back from them.
    """

    run: str
    leaves: str
    goal: str
    barred: list[str]
    unreachable: list[str]
    unknown: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What it cannot do now, in sentences: list its root, read its engines, write its journal, keep to its disk budget,
    take in all `folders`, have from its `upstream` what is to be served, push to a store, use its `tls` files; None
    where it can. The last good engines and TLS files count."""

    root: str | None = None
    engines: str | None = None
    journal: str | None = None
    disk: str | None = None
    folders: str | None = None
    upstream: str | None = None
    push: str | None = None
    tls: str | None = None

    @property
    def sentences(self) -> list[str]:
        return [sentence for sentence in asdict(self).values() if sentence is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGlance:
    """A run at a glance: are its engines on the newest version, and if not, why not.

    `headline` answers that in a sentence, `reasons` say why not, the most important first; a program reads
    `standing`. `trouble` is the first of the reasons why it is TROUBLED, None where it is not. `target` is the version
    that engines should serve, `newest` the one that was published last, whatever became of it. `engines` are counted
    by state. `paused_since` is None while updates go on, `closed_at` while the run is not closed.
    """

    run: str
    standing: Standing
    headline: str
    reasons: list[str]
    target: str | None
    target_step: int | None
    newest: str | None
    newest_step: int | None
    update: UpdateState | None
    paused_since: str | None
    engines: dict[EngineState, int]
    in_sync: int
    closed_at: str | None = None
    trouble: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLead:
    """Which service of a group leads: its `address`, `since` when (RFC 3339), and the number of the takeover."""

    address: str
    since: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What a service keeps on its root: its settings `keep_last`, `slots` and `disk_budget`."""

    last: int
    slots: int
    disk_budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Everything at a glance, as of event `event`: with that as Last-Event-ID the event stream goes on from there.

    `versions` counts them by state. `held_bytes` is what versions take on disk. `wants_token`: the service asks for a
    bearer token, for changes at least. `leader` is the service that answers, None where it belongs to no group. `keeps`
    is what it keeps. `follows` says which service this one follows, in a sentence; None where it follows none.
    """

    at: str
    event: int
    strategy: str
    faults: Faults
    runs: list[RunGlance]
    engines: list[Engine]
    versions: dict[VersionState, int]
    held_bytes: int
    wants_token: bool = False
    leader: GroupLead | None = None
    keeps: Keeping | None = None
    follows: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaimable:
    """One line of the reclaim plan: what happens to a version or a leftover folder, and why.

    `bytes` is what it takes on disk. `foreign_bytes` are those of them that refitd may not delete: they always stay,
    and do not count in a disk budget.
    """

    path: str
    keep: bool
    reasons: list[str]
    version: str | None = None
    bytes: int | None = None
    foreign_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimPlan:
    """What would be, or was, deleted and kept. `freed_bytes` counts the lines that are not kept.

    `kept_bytes` counts the others that lie in the root, and `disk_budget` is the limit for that, None if none is
    set. Neither sum counts `foreign_bytes`, which refitd may not delete.
    """

    items: list[Reclaimable]
    freed_bytes: int
    kept_bytes: int = 0
    foreign_bytes: int = 0
    disk_budget: int | None = None
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a run, a version or an engine is where it is, in sentences, the most important first."""

    id: str
    sentences: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One entry of the journal's log, as the event stream sends it. `seq` is its number, for Last-Event-ID.

    `run` is the run that it concerns: for an engine, the run that it followed then. None for the root and the journal,
    and in entries of releases that did not write it.
    """

    seq: int
    at: str
    kind: str
    subject: str
    text: str
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    run: str | None = None
    severity: LogSeverity = LogSeverity.INFO


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[ItemT]):
    """A page of a list; `next_cursor` is None on the last one."""

    items: list[ItemT]
    next_cursor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An RFC 9457 problem document. `type` is `urn:refitd:problem:<slug>`; the slug names the kind of error."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None

    @property
    def slug(self) -> str:
        return self.type.rpartition(":")[2]


MAX_BARRED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPage(Page[Version]):
    """A page of versions. `root` is the name in the `.refitd/id` of the service's root, None while that is not there:
    a publisher finds by it that it writes into another folder. `folder` is that root's path on the service's host.
    `refuses` says why this service, which follows another, takes no notice of a version; None where it does. `barred`
    are, where good versions of one run are asked for, the ids of the newest ones that no engine goes to any more and
    whose files are gone, at most `MAX_BARRED`: a host that follows may have their files. `begins` is the generation
    with which the next publisher of the run that was asked for begins, where that run was deleted. `on_hosts` is the id
    of the newest version of that run which hosts have and this service does not know, as after a loss of its root: a
    publisher counts its name as used up, so that no two versions have one name.
    """

    items: list[Version]
    root: str | None = None
    folder: str | None = None
    refuses: str | None = None
    barred: list[str] = field(default_factory=list[str])
    begins: int | None = None
    on_hosts: str | None = None
