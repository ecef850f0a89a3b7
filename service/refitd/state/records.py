"""What the service knows of one engine, one attempt, one update: frozen records, replaced when something changes.

An engine may be taken out of a file, or a DNS may leave out a pod that is not ready; neither stops a load. Where it is
not known what a server holds, or whether it reads on, that stays known of its address (`left_behind`): the versions
that it may read are not written over, and an engine that is named there again is loaded and proved before a resume.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, cast

from refitd.engine.fingerprints import what_was_compared
from refitd.engine.port import UNSEEN, UNTOLD, Process, ServerSeen
from refitd.root.ownership import RootMark
from refitd.state.parts import Parted, fact
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order, parse_version_id
from refitd_client.contract.states import EngineState, Kind, UpdateState


class Source(StrEnum):
    """What named an engine, and so where its entry can be removed."""

    SETTINGS = "settings"
    FILE = "file"
    API = "api"
    DISCOVERED = "discovered"
    REPORTED = "reported"  # a follower, by its own report


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One try to bring an engine to a version. Written before the first call (`outcome` None), closed after the last.

    One that is found open when the service starts belonged to a process that died: the engine is TAINTED.
    `kind` is what it was to load: DELTA is one in place, HANDOVER from its trainer's memory. It is None in attempts
    that an earlier release wrote. `epoch` is that of the lead under which it began, 0 of a service alone.
    """

    id: str
    engine: str
    version: str
    started_at: str
    epoch: int = 0
    outcome: str | None = None
    reason: str | None = None
    kind: Kind | None = None
    timings: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintRecord:
    """What a clean load of a version gave on an engine of a configuration."""

    version: str
    configuration: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """What named an engine, and which run that means. `policy/roster.py` decides it.

    `pair` are the URLs of other servers that are updated together with the engine's own, as one engine. `run_named` is
    True where the operator has said which run it follows. `moved`: by a move, which holds against `said`, the run that
    its source named last. `removed`: it is not named any more; the record's `id` is its address.
    """

    source: Source = Source.SETTINGS
    pair: tuple[str, ...] = ()
    run_named: bool = False
    moved: bool = False
    said: str | None = None
    removed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Believed:
    """What an engine is believed to hold. `policy/observe.py` decides it, by probes and loads.

    `serving` is the version that it is proven to serve, None on start-up weights or unknown contents, and `proof` what
    proves that, None where nothing does. `known` is False from a load that failed until its contents are proved.
    `model_path` and `weight_version` are what it names. `held` is what it served before a load in the middle of which
    the service stopped, as long as its contents are unknown and no load of it has failed since; of a host that proves
    nothing, what it proved last. `kept` says what is left of its start-up weights: "" nothing, else a digest of the
    names of the tensors that each load since its start has left out (`VersionRecord.lacks`); None where there was no
    load (`policy/chain.py`). `beneath` is the full version that deltas were written into since, from which the plugin
    would put it back; `wants_full`: it takes no delta in place until it was given a full version. `given` are the
    fingerprints that it gave for the contents of versions, by their ids: it stays a witness of those that it serves no
    more. `contradiction` says which engines give something else of what it serves, while nothing says who is right.
    `skipped` counts the good versions that it has passed over.
    """

    serving: str | None = None
    known: bool = True
    proof: str | None = None
    model_path: str | None = None
    weight_version: str | None = None
    held: str | None = None
    kept: str | None = None
    beneath: str | None = None
    wants_full: bool = False
    given: dict[str, str] = field(default_factory=dict[str, str])
    contradiction: str | None = None
    skipped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Debts:
    """What is still to be done to an engine, and what it may still read.

    `resume_owed` is True while an engine with known contents may still be paused by us. `reload`: an operator has asked
    for another load, whatever it serves, or a host is about to go elsewhere; a load that succeeds ends that.
    `unproven` are versions that it may still be reading: loads whose end is not known. `named_before` is what it named
    before a load that failed, until the next probe. `may_read` are other folders that it may read again.
    """

    resume_owed: bool = False
    reload: bool = False
    unproven: tuple[str, ...] = ()
    named_before: str | None = None
    may_read: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What went wrong with an engine. `reason` is why it is in its state.

    `failures` counts refits in a row that did not end in ACK, `taints` those since its contents were last known whose
    end is not known either. `strikes` counts by version the loads that left this engine with unknown contents: the next
    clean load of another version does not forgive them. `unreachable_since` is in seconds of the monotonic clock; of an
    engine that is named no more, when it was removed. `contest` says what another writer has done to it, None while it
    serves what this service has loaded; `contests` counts the changes by another writer that followed each other, the
    newest at `contested_at` (monotonic seconds). `taken` says why this entry must not load it at all: another service
    leads it, or another entry names the same server.
    """

    reason: str | None = None
    failures: int = 0
    taints: int = 0
    strikes: dict[str, int] = field(default_factory=dict[str, int])
    unreachable_since: float | None = None
    last_attempt: AttemptRecord | None = None
    contest: str | None = None
    contests: int = 0
    contested_at: float | None = None
    taken: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord(Parted):
    """One engine: what named it, what the last probe saw of its server, what it is believed to hold, what it owes, and
    what went wrong. An engine whose contents are not known is never resumed.

    `process` is what its server says of its process, `address` where connections to it go.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("naming", "seen", "contents", "debts", "trouble")

    id: str
    url: str
    run: str | None = None
    state: EngineState = EngineState.PROBING
    process: Process = UNTOLD
    address: str | None = None
    naming: Naming = Naming()
    seen: ServerSeen = UNSEEN
    contents: Believed = Believed()
    debts: Debts = Debts()
    trouble: Trouble = Trouble()

    serving = cast("str | None", fact("contents.serving"))
    known = cast("bool", fact("contents.known"))
    reason = cast("str | None", fact("trouble.reason"))
    pulls = cast("bool", fact("seen.pulls"))  # it is another refitd, which pulls what it is to serve

    @property
    def doubted(self) -> str | None:
        """Whom it contradicts about what it serves, while nothing says who is right; None where nobody."""
        return self.contents.contradiction if self.known and self.serving in self.contents.given else None

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url, *self.naming.pair)

    @property
    def to_load(self) -> "EngineRecord":
        """The engine for decisions about its next load: one that is to be loaded again counts as serving nothing."""
        return self.having(serving=None, beneath=None) if self.debts.reload else self

    @property
    def paths(self) -> tuple[str, ...]:
        """Each path that its server may name as what it serves, or reads again when a request names an adapter."""
        return (
            *(path for path in (self.contents.model_path, self.debts.named_before) if path is not None),
            *self.debts.may_read,
        )

    @property
    def of_others(self) -> str | None:
        """What it serves, in words, where another entry or writer has loaded it, or a host has by itself; None where
        nothing says so.
        """
        if self.pulls:
            named = () if self.seen.host is None else self.seen.host.engines
            versions = sorted({each.version for each in named if each.version is not None})
            return f"{', '.join(versions)}, as the host says" if versions else "no version that the host has proved"
        if self.trouble.taken is not None:
            return "what was loaded under another name or by another service"
        return None if self.trouble.contest is None else "what another writer has loaded or labelled"

    @property
    def waits(self) -> str | None:
        """Why a host goes to nothing newer, since its own operator has paused it. None of any other engine."""
        return None if self.seen.host is None else self.seen.host.waits

    def serves_newer_than(self, version: VersionRecord) -> bool:
        """Whether it serves something newer than a version of the same run, or did before a load that was broken off:
        to go there is to go back, which no pause of updates keeps it from.
        """
        serving = parse_version_id(self.serving or self.contents.held or "")
        return serving is not None and serving[0] == version.run and serving[1] > version.order

    def serves(self, what: str) -> str:
        """A sentence without a subject that it serves `what`, or served it when it answered last."""
        if self.state is not EngineState.UNREACHABLE:
            return f"serves {what}"
        is_new = self.known and self.serving is None and self.contents.model_path is None
        return "has not been reached yet" if is_new else f"served {what} when it was last reached"

    @property
    def what_is_slow(self) -> str:
        """What its plugin loads through the server's loader, and why."""
        loader = self.seen.loader
        if loader is None:
            return ""
        what = "each version" if loader.whole else "a part of each version"
        return f"{what} through {self.seen.server}'s loader: {loader.reason}"

    @property
    def what_it_is(self) -> str:
        """Its server and release, and whether refitd is inside: a sentence without a subject.

        "" until it was reached. One that does not answer may be another by now.
        """
        if not self.seen.server:
            return ""
        kind = "stock" if self.seen.plugin is None else f"with refitd {self.seen.plugin} inside"
        if self.pulls:
            kind = "on a host that has engines of its own"
        told = f"{self.seen.server} {self.seen.server_version or 'of an unknown release'}, {kind}"
        return f"was {told}, when it was last reached" if self.state is EngineState.UNREACHABLE else f"is {told}"

    @property
    def how_proved(self) -> str | None:
        """What proves that it serves `serving`, in a sentence; None where it serves no version."""
        if self.serving is None or not self.known:
            return None
        proof = self.contents.proof
        return f"Proof that it serves {self.serving}: {proof or 'none'}. {what_was_compared(proof)}"

    @property
    def how_it_loads(self) -> str:
        """What carries out its loads, and those of folders that are no publications, without a subject."""
        if self.seen.plugin is not None:
            how = "" if self.seen.loader is None else f", {self.what_is_slow}"
            return f"loads through refitd's plugin {self.seen.plugin}, {_PLAIN_TOO}{how}"
        if self.pulls:
            return "pulls each version and loads it into its own engines when this service says which"
        if not self.seen.server:
            return "has not said yet what carries out its loads"
        why = f", {_PLAIN_TOO}: {self.seen.stock_reason}" if self.seen.stock_reason else ""
        return f"loads as {self.seen.server} does by itself{why}"


_PLAIN_TOO = "checkpoints without refit.json as well"
NOT_SENT = "NOT_SENT"  # the outcome of an attempt that the engine was never told to load


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLead:
    """Which hub says what is served on this host. `leader` is the name in the newest reply that was obeyed, `told_by`
    says for people from where it came. `orders` is the number of the last load that was asked for again. `heard` are
    the highest epochs that were obeyed, by the hubs' names, the newest last: each name has epochs of its own.
    """

    leader: str = ""
    told_by: str = ""
    orders: int = 0
    heard: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def fence(self) -> int:
        return self.heard.get(self.leader, 0)


UNLED = HostLead()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What is known of a run beside its versions. `closed_at` is when it was closed.

    On a host that follows an upstream, `desired` is the id of the version that the upstream wants it to serve, and
    `ordered` that of the last such version that was found good here: what the engines of this host are to serve.
    `deleted` is the newest version that the run had when an operator deleted it: nothing up to there comes back.
    `left` are, by hosts' names, what each had when an operator rolled back and this service did not know, by its own
    word: the id of a newer version, or "", and a higher epoch, or 0. They go back from there.
    """

    run: str
    closed_at: str | None = None
    desired: str | None = None
    ordered: str | None = None
    deleted: Order | None = None
    left: dict[str, tuple[str, int]] = field(default_factory=dict[str, "tuple[str, int]"])


class CheckState(StrEnum):
    PENDING = "pending"
    PASSED = "passed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """The move of a run's engines to one version. `number` grows with each change of a run's target.

    `check` and its `reason` are those of the canary, where the strategy has one. `paused_since` is when an operator
    paused the updates of the run, None while they go on; the run's next update takes it over.
    """

    number: int
    run: str
    version: str
    cause: str
    started_at: str
    state: UpdateState = UpdateState.PENDING
    check: CheckState = CheckState.PENDING
    reason: str | None = None
    paused_since: str | None = None

    @property
    def why_paused(self) -> str | None:
        """Why no engine of the run goes to anything newer, and what ends that; None while updates go on."""
        return None if self.paused_since is None else f"updates of {self.run} are paused: refitd resume {self.run}"


def interrupted(attempt: AttemptRecord, engine: EngineRecord | None) -> tuple[AttemptRecord, EngineRecord | None]:
    """An attempt whose process died in the middle of it, and the record of its engine, None where that is not named.

    How the load ended is not known, and neither are the engine's contents. A host carries out by itself what it was
    ordered, and proves what it serves when it is asked: with it nothing but the answer is lost.
    """
    if engine is not None and engine.pulls:
        reason = f"the service stopped while the host was bringing its engines to {attempt.version}"
        closed = replace(attempt, outcome="UNREACHABLE", reason=reason)
        return closed, engine.having(last_attempt=closed, reason=reason)
    reason = f"the service stopped in the middle of loading {attempt.version}"
    closed = replace(attempt, outcome="TAINTED", reason=reason)
    if engine is None:
        return closed, None
    return closed, _doubted(engine, (attempt.version,), reason).having(
        state=EngineState.TAINTED,
        held=engine.serving or engine.contents.held,
        last_attempt=closed,
    )


def in_mid_load(engine: EngineRecord, version: str) -> EngineRecord:
    """The record of an engine that is removed while it loads: what it holds is not known until the load has ended."""
    return _doubted(engine, (version,), f"it was removed in the middle of loading {version}")


def unvouched(engine: EngineRecord) -> EngineRecord:
    """An engine of which a lost journal may have known more: a load that broke off, a quarantine."""
    reason = "the journal was lost: nothing vouches for its contents"
    return engine.having(known=False, serving=None, held=engine.serving or engine.contents.held, reason=reason)


def left_behind(engine: EngineRecord, now: float) -> EngineRecord | None:
    """What stays known of a removed engine's address, None where nothing has to. `now` is of the monotonic clock."""
    if engine.known and not engine.debts.unproven:
        return None
    return engine.having(
        id=engine.url, removed=True, state=EngineState.UNREACHABLE, resume_owed=False, unreachable_since=now
    )


def given_back(engine: EngineRecord, removed: EngineRecord | None) -> EngineRecord:
    """An engine that is named, with what stayed known of its address."""
    return engine if removed is None else _doubted(engine, removed.debts.unproven, removed.reason)


def _doubted(engine: EngineRecord, versions: tuple[str, ...], reason: str | None) -> EngineRecord:
    unproven = (*engine.debts.unproven, *(version for version in versions if version not in engine.debts.unproven))
    return engine.having(known=False, serving=None, unproven=unproven, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The journal's first record, written when it is made. A journal without it was never used.

    `cause` says why an empty journal began on a root that was in use, None where the root was new. `lost` says that an
    earlier journal is gone, and with it what it knew of the engines' contents. `rebuilt` is False until the root was
    listed and every engine asked: nothing is collected before. It is on disk, so a kill in between changes nothing.
    `root` is the root that it is about, None until that has a mark. `lead` is which hub this host obeys.
    """

    cause: str | None = None
    lost: bool = False
    rebuilt: bool = True
    root: RootMark | None = None
    lead: HostLead = UNLED


NEW = Origin()
