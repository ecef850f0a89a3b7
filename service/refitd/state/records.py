"""What the service knows of one engine, one attempt, one rollout: frozen records, replaced when something changes."""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from refitd.engine.port import UNTOLD, Process
from refitd_client.contract.states import EngineState, RolloutState


class Source(StrEnum):
    """Who named an engine: where its entry has to be taken out again."""

    SETTINGS = "settings"
    FILE = "file"
    API = "api"
    DISCOVERED = "discovered"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One try to bring an engine to a version. Written before the first call (`outcome` None), closed after the last.

    One that is found open when the service starts belonged to a process that died: the engine is TAINTED.
    """

    id: str
    engine: str
    version: str
    started_at: str
    outcome: str | None = None
    reason: str | None = None
    timings: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """One engine. `serving` is the version that it is proven to serve, None on start-up weights or unknown contents.

    `known` is False from a load that failed until its contents are proved; an engine that is not known is never
    resumed. `resume_owed` is True while an engine with known contents may still be paused by us.
    `unproven` are versions that it may still be reading: loads that nobody heard the end of.
    `failures` counts refits in a row that did not end in ACK, `taints` those since its contents were last known whose
    end is not known either. `strikes` counts by version the loads that left this engine with unknown contents: the next
    clean load of another version does not forgive them. `unreachable_since` is in seconds of the monotonic clock.
    `removed`: it is named no more; its `id` is its address, and `unreachable_since` when that was.
    `run_named` is True where the operator has said which run it follows. `moved`: that was said by a move, which holds
    against `said`, the run that its source named when it was last heard (`policy/roster.py`).
    `plugin` is the release of refitd's plugin that carries out its loads, None where they are the server's own, for
    `stock_reason`; `takes_offers`: it can copy weights from the memory of a trainer on its host. `through_loader` is
    why its plugin loads tensors through SGLang's loader, `loads_whole` that it loads all of them so. `beneath` is the
    full version that deltas were written into since, from which the plugin would put it back; `wants_full`: it takes no
    delta in place until it was given a full version.
    `held` is what it served before a load in the middle of which the service stopped, as long as its contents are
    unknown and no load of it has failed since.
    `named_before` is what it named before a load that failed, until it is asked. `reload`: somebody has asked for it to
    be loaded again, whatever it serves; a load that comes through ends that.
    `process` is what its server tells of its process, `address` where connections to it go. `contest` says what another
    writer has done to it, None while it serves what this service has loaded; `contests` counts the changes by another
    writer that followed each other, the newest at `contested_at` (monotonic seconds). `taken` says why it is not this
    entry's to load at all: another service leads it, or another entry names the same server.
    """

    id: str
    url: str
    run: str | None = None
    run_named: bool = False
    moved: bool = False
    said: str | None = None
    source: Source = Source.SETTINGS
    state: EngineState = EngineState.PROBING
    serving: str | None = None
    held: str | None = None
    known: bool = True
    resume_owed: bool = False
    unproven: tuple[str, ...] = ()
    weight_version: str | None = None
    model_path: str | None = None
    named_before: str | None = None
    configuration: str | None = None
    startup_path: str | None = None
    plugin: str | None = None
    takes_offers: bool = False
    stock_reason: str | None = None
    through_loader: str | None = None
    loads_whole: bool = False
    beneath: str | None = None
    wants_full: bool = False
    reason: str | None = None
    failures: int = 0
    taints: int = 0
    strikes: dict[str, int] = field(default_factory=dict[str, int])
    skipped: int = 0
    unreachable_since: float | None = None
    last_attempt: AttemptRecord | None = None
    removed: bool = False
    reload: bool = False
    process: Process = UNTOLD
    address: str | None = None
    contest: str | None = None
    contests: int = 0
    contested_at: float | None = None
    taken: str | None = None

    @property
    def to_load(self) -> "EngineRecord":
        """The engine as who decides on its next load sees it: what is to be loaded again counts as not there."""
        return replace(self, serving=None, beneath=None) if self.reload else self

    @property
    def paths(self) -> tuple[str, ...]:
        """Each path that its server may name as the model that it serves, and read again."""
        return tuple(path for path in (self.model_path, self.named_before) if path is not None)

    @property
    def of_others(self) -> str | None:
        """What it serves where this entry has not loaded it, in words; None where nothing says that another has."""
        if self.taken is not None:
            return "what was loaded under another name or by another service"
        return None if self.contest is None else "what another writer has loaded or labelled"

    def serves(self, what: str) -> str:
        """That it serves something, in a sentence without a subject: of one that does not answer, only that it did."""
        if self.state is not EngineState.UNREACHABLE:
            return f"serves {what}"
        is_new = self.known and self.serving is None and self.model_path is None
        return "has not been reached yet" if is_new else f"served {what} when it was last reached"

    @property
    def what_is_slow(self) -> str:
        """What its plugin gives to SGLang's loader, and why."""
        what = "each version" if self.loads_whole else "a part of each version"
        return f"{what} through SGLang's loader: {self.through_loader}"

    @property
    def how_it_loads(self) -> str:
        """Who carries out its loads, in a sentence without a subject."""
        if self.plugin is not None:
            how = "" if self.through_loader is None else f", {self.what_is_slow}"
            return f"loads through refitd's plugin {self.plugin}{how}"
        return f"loads as SGLang does by itself: {self.stock_reason or 'nobody has looked for a plugin yet'}"


NOT_SENT = "NOT_SENT"  # the outcome of an attempt that the engine was never told to load


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What is known of a run beside its versions. `closed_at` is when somebody said that it has ended."""

    run: str
    closed_at: str | None = None


class CheckState(StrEnum):
    """How far the check of a canary is."""

    PENDING = "pending"
    PASSED = "passed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """The way of one version to the engines of its run. `number` grows with each change of a run's target.

    `check` and its `reason` are those of the canary, where the strategy has one. `paused_since` is when an operator has
    paused the rollouts of the run, None while they go on; it is handed on to the run's next rollout.
    """

    number: int
    run: str
    version: str
    cause: str
    started_at: str
    state: RolloutState = RolloutState.PENDING
    check: CheckState = CheckState.PENDING
    reason: str | None = None
    paused_since: str | None = None

    @property
    def why_paused(self) -> str | None:
        """Why no engine of the run goes to anything newer, and what ends that; None while rollouts go on."""
        return None if self.paused_since is None else f"rollouts of {self.run} are paused: refitd resume {self.run}"
