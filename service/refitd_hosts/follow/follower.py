"""Follows an upstream: learns what is good there, pulls what this host is to serve, and has its engines go there.

    look      the upstream's versions, when it says that something changed, and at intervals as the truth
    plan      `policy/pulls.py`: what to pull, and what must stay here
    turn      from where and when, as the upstream says (`pull_turn.py`)
    pull      one version at a time; one that is not wanted any more is given up
    report    what this host is at (`reporting.py`); a hub that leads it replies what it is to serve
    order     once the catalog has found it good, what is wanted becomes the run's target on this host (`orders.py`)

While no upstream answers, everything else goes on: engines that restart are brought to what was ordered last, from this
root. `heard_at` and the fault say since when nothing was heard.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from refitd.policy.traffic import is_proven
from refitd.state.observer import Notifier
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.fleet import Fleet
from refitd.update.targets import Targets
from refitd_client.backoff import backoff
from refitd_client.contract.follow import (
    MAX_REPORTED,
    Following,
    HostReply,
    HostReport,
    HostTrial,
    HostTrialResult,
    OrderState,
)
from refitd_client.contract.naming import installed_release
from refitd_client.contract.states import VersionState
from refitd_hosts.follow.orders import Orders
from refitd_hosts.follow.pull_turn import PullTurn
from refitd_hosts.follow.puller import Puller, PullRefusedError
from refitd_hosts.follow.reporting import Hearing, UpstreamReporter
from refitd_hosts.follow.upstream import (
    FollowedSources,
    FollowerIdentity,
    GoneError,
    UnreachableError,
    UpstreamError,
    UpstreamRun,
    UpstreamVersion,
)
from refitd_hosts.policy.hosts import (
    engines_of_host,
    not_known_there,
    order_state,
    others_of,
    proof_of_host,
    why_it_waits,
)
from refitd_hosts.policy.pulls import PullPlan, all_as_told, as_told, is_held_back, plan_pulls, pull_fault, why_not_good
from refitd_hosts.policy.upstream import UpstreamWord, decided_by, decides_end, decides_pin, decides_run

PULL_LOOK_SECONDS = 2.0  # between two looks at the upstream
LISTEN_AGAIN_SECONDS = 1.0
PULL_RETRY_SECONDS = 2.0  # after a pull that failed
LONGEST_PULL_RETRY_SECONDS = 60.0

log = structlog.get_logger("refitd")


@dataclass(slots=True)
class _Failure:
    """Why a version was not pulled, how often in a row, and when (monotonic seconds) it is tried again. `is_final`: not
    only because its sources could not be reached or had gone on.
    """

    reason: str
    times: int
    until: float
    is_final: bool


class UpstreamFollower:
    """Follows one run of the first upstream that answers, or the only one for None. `nudge` has the catalog scan soon.
    `quorum` engines must serve a version before it counts as served. `freely`: this host decides for itself, also where
    a hub would lead it.
    """

    def __init__(
        self,
        store: Store,
        targets: Targets,
        fleet: Fleet,
        puller: Puller,
        sources: FollowedSources,
        *,
        identity: FollowerIdentity,
        run: str | None,
        nudge: Callable[[], None],
        quorum: int = 1,
        freely: bool = False,
        urls: Sequence[str] = (),
    ) -> None:
        self._store, self._fleet, self._puller, self._sources = store, fleet, puller, sources
        self._identity, self._nudge, self._quorum, self._freely = identity, nudge, quorum, freely
        self._wake = Notifier()
        self._orders = Orders(store, targets, self._wake, run=run)
        self._turn = PullTurn(sources, store.clock)
        self._reporter = UpstreamReporter(
            sources, self._as_report, self._answered, self._is_busy, refused=lambda name: self._turn.heard(name, None)
        )
        self._release = installed_release()
        self.urls = urls
        self._planned: str | None = None  # what was to be served when the look began that the plan was made of
        self._offered: UpstreamRun | None = None
        self._knows: tuple[str, Mapping[str, str]] = "", {}  # of the upstream of this name: the newest of each run
        self._plan = PullPlan()
        self._kept_for: frozenset[str] | None = None
        self._failures: dict[str, _Failure] = {}
        self._in_the_way: dict[str, str] = {}  # of whose names the hub has others, and why they stay
        self._pulling: tuple[str, asyncio.Task[None]] | None = None
        self._reports = 0
        self._trying: tuple[int, asyncio.Task[None]] | None = None
        self._tried: HostTrialResult | None = None
        self._hearing = Hearing(store.clock)
        self._word: UpstreamWord | None = None

    @property
    def needs(self) -> frozenset[str]:
        """The ids of versions that must stay here, since the upstream wants them or what stands on them."""
        return self._plan.needs.union(filter(None, [self._pulled]))

    @property
    def _pulled(self) -> str | None:
        """The id of the version that is being pulled."""
        return None if self._pulling is None else self._pulling[0]

    @property
    def run_followed(self) -> str | None:
        """The run that this host follows; None where the upstream has several and none was named."""
        if self._orders.run is not None:
            return self._orders.run
        if self._offered is not None:
            return self._offered.run
        return next(iter(self._store.runs.desired), None)

    @property
    def is_led(self) -> bool:
        """Whether the upstream says what is served here."""
        return self._sources.upstream.leads and not self._freely

    def decides_run(self, run: str) -> bool:
        return decides_run(self._word, run)

    def decides_end(self, run: str) -> bool:
        return decides_end(self._word, run)

    def decides_pin(self, version: VersionRecord) -> bool:
        return decides_pin(self._word, version)

    def decided_by(self, do: str) -> str:
        return decided_by(self.urls[0] if self._word is None else self._word.name, do)

    def following(self) -> Following:
        run, store = self.run_followed or "", self._store
        desired, serves, engines = store.runs.desired.get(run), self._serves(run), store.engines_of(run)
        paused = why_it_waits(store.updates.get(run))
        order, reason = order_state(
            desired,
            store.runs.ordered.get(run),
            store.versions.get(desired or ""),
            engines,
            quorum=self._quorum,
            refused=self._refused(desired),
            paused=paused,
        )
        configuration, proof = proof_of_host(serves, engines, store.fingerprint)
        named = (store.versions.get(each or "") for each in (desired, store.runs.ordered.get(run), serves))
        return Following(
            follower=self._identity.name,
            upstream=self._sources.upstream.name,
            upstreams=[upstream.name for upstream in self._sources.upstreams],
            heard_at=self._hearing.heard_at,
            run=self.run_followed,
            desired=desired,
            ordered=store.runs.ordered.get(run),
            serves=serves,
            pulling=self._pulled,
            pulled_bytes=self._puller.arrived if self._pulling is not None and self._turn.ahead is None else 0,
            source=self._turn.source,
            ahead=self._turn.ahead,
            store_fault=self._turn.store_fault,
            fault=store.faults.upstream,
            process=self._identity.process,
            release=self._release,
            leads=self.is_led,
            leader=self._orders.lead.leader,
            fence=self._orders.lead.fence,
            heard=self._orders.lead.heard,
            again=self._orders.lead.orders,
            refused=self._orders.refused,
            order=order,
            order_reason=reason,
            configuration=configuration,
            proof=proof,
            digests={each.id: each.digest for each in named if each is not None and each.digest is not None},
            host=engines_of_host(self._identity.name, store.engines.values(), paused),
        )

    def _refused(self, desired: str | None) -> str | None:
        """Why what is to be served cannot be had, by a look at the upstream that began after it was ordered."""
        if desired is None or self._planned != desired or self._offered is None:
            return None
        failures = {id_: each.reason for id_, each in self._failures.items() if each.is_final} | self._in_the_way
        here = {v.id: v.state for v in self._store.versions_of(self._offered.run) if v.id not in self._in_the_way}
        return pull_fault(desired, self._offered.versions, here, failures)

    def _as_report(self) -> HostReport:
        run = self.run_followed
        held = self._store.versions_of(run) if run is not None else []
        holds = [v.id for v in held if v.state is VersionState.SEALED and v.files.owned][:MAX_REPORTED]
        self._reports += 1
        return HostReport(
            told=self.following(),
            number=self._reports,
            holds=tuple(holds),
            pulls=() if self._pulled is None else (self._pulled,),
            freely=self._freely,
            tried=self._tried,
        )

    def _is_busy(self) -> bool:
        return self._pulling is not None or self.following().order is OrderState.COMES

    def _answered(self, reply: HostReply) -> None:
        upstream = self._sources.upstream
        self._knows = upstream.name, reply.knows
        self._hearing.took_report()
        if upstream.leads:
            self._orders.hear(self.run_followed, reply, upstream.name)
        self._turn.heard(upstream.name, reply.pull)
        if not self.is_led:
            return
        before = dict(self._store.runs.desired)
        run = self._orders.obey(reply, self._sources.upstream.name)
        if self._orders.refused is not None:
            self._sources.next()  # it may be another one that leads
        elif before != self._store.runs.desired:
            for version in reply.serve.values():
                self._failures.pop(version or "", None)
        for engine in () if run is None else self._store.engines_of(run):
            self._fleet.resync(engine.id)
        if run is not None or before != self._store.runs.desired or reply.trial is not None:
            self._sources.told.notify()  # the hub hears at once that it was obeyed
        if reply.trial is not None and (self._trying is None or self._trying[0] != reply.trial.number):
            if self._trying is not None:
                self._trying[1].cancel()
            self._trying = reply.trial.number, asyncio.create_task(self._try(reply.trial), name="follow: trial")

    async def _try(self, asked: HostTrial) -> None:
        """Ask each engine that serves the version with this label for a few tokens, as a rollout would."""
        version = self._store.versions.get(self.following().serves or "")
        if version is None or version.label != asked.label:
            serves = "no version" if version is None else f"{version.id} and not {asked.label!r}"
            faults = [f"the host is proved to serve {serves}"]
        else:
            asked_of = [engine for engine in self._store.engines_of(version.run) if engine.serving == version.id]
            found = await asyncio.gather(*(self._fleet.trial(version, engine, lambda _: None) for engine in asked_of))
            faults = [f"engine {engine.id}: {fault}" for engine, fault in zip(asked_of, found, strict=True) if fault]
        self._tried = HostTrialResult(number=asked.number, fault=faults[0] if faults else None)
        self._sources.told.notify()

    def _serves(self, run: str) -> str | None:
        ordered = self._store.runs.ordered.get(run)
        engines = self._store.engines_of(run)
        return ordered if ordered is not None and is_proven(ordered, engines, self._quorum) else None

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._listen(), name="follow: listen")
                group.create_task(self._orders.run_forever(), name="follow: order")
                group.create_task(self._reporter.run(), name="follow: report")
                group.create_task(self._watch(), name="follow: watch")
                while True:
                    seen, desired = self._wake.count, self._store.runs.desired.get(self.run_followed or "")
                    await self._look()
                    self._go(group)
                    await self._tidy()
                    self._planned = desired
                    self._tell()
                    await self._wake.wait_after(seen, within=PULL_LOOK_SECONDS)
        finally:
            if self._trying is not None:
                self._trying[1].cancel()
            await self._sources.aclose()
            self._puller.close()

    async def _listen(self) -> None:
        """Look again whenever the upstream says that something has changed."""
        while True:
            upstream = self._sources.upstream
            try:
                async for is_own in upstream.changes(self._identity.name):
                    (self._sources.told if is_own else self._wake).notify()
                    if upstream is not self._sources.upstream:
                        break
            except UpstreamError as error:
                log.debug("the upstream's events broke off", upstream=upstream.name, reason=str(error))
            await asyncio.sleep(LISTEN_AGAIN_SECONDS)

    async def _watch(self) -> None:
        """Report whenever this host has come to something else."""
        seen, before = -1, None
        while True:
            seen = await self._store.changed.wait_after(seen)
            told = self.following()
            now = told.desired, told.ordered, told.serves, told.order, told.pulling
            if now != before:
                before = now
                self._sources.told.notify()

    async def _look(self) -> None:
        """Ask the upstream, or the next one that answers, for the versions of the run."""
        for _ in self._sources.upstreams:
            upstream = self._sources.upstream
            try:
                runs = await upstream.look(self._orders.run)
            except UpstreamError as error:
                self._hearing.failed(str(error))
                self._sources.next()
                continue
            self._hearing.answered()
            if self._would_go_back(runs):
                self._knows = "", {}  # it may have lost since what it knew when it replied last
                await self._reporter.report()
            self._take(runs)
            return

    def _would_go_back(self, runs: Sequence[UpstreamRun]) -> bool:
        """Whether a hub that does not lead this host wants something older than what engines here serve."""
        wanted = next((run for run in runs if run.run == self.run_followed), None)
        if self.is_led or not self._sources.upstream.leads or wanted is None or wanted.desired is None:
            return False
        return not_known_there(wanted.run, self._orders.stands(wanted.run), wanted.desired) is not None

    def _take(self, runs: Sequence[UpstreamRun]) -> None:
        mine = [run for run in runs if run.run == self.run_followed] or list(runs)
        if len(mine) > 1:
            names = ", ".join(sorted(run.run for run in mine))
            self._offered, self._hearing.unclear = None, f"the upstream has several runs ({names}): name one with --run"
            return
        self._offered = mine[0] if mine else None
        if self._offered is None:
            return
        known, run = self._store.runs, self._offered.run
        self._orders.follow_end(run, self._sources.upstream.name, is_closed=self._offered.is_closed)
        stands = (known.desired.get(run), known.ordered.get(run)) if self.is_led else ()
        for told in all_as_told(self._store.versions, self._offered.versions, self._offered.barred):
            if told.barred and told.id in stands:
                continue  # the next reply names what is served in its place: until then nothing older is loaded
            self._store.put_version(told)
            self._nudge()
        if self._offered.versions and all(version.barred for version in self._offered.versions):
            self._hearing.unclear = f"the upstream has no version of {self._offered.run} to serve: all are barred there"
        desired, before = self._offered.desired, known.desired.get(run)
        if self.is_led:
            return
        if desired is None or (self._offered.is_paused and is_held_back(desired, before)):
            return
        upstream, digests = self._sources.upstream, {each.id: each.digest for each in self._offered.versions}
        knows = self._knows[1].get(run, "") if self._knows[0] == upstream.name else ""
        knows = knows if upstream.leads else None
        if self._orders.desire(run, desired, upstream.name, knows=knows, digest=digests.get(desired)):
            self._failures.pop(desired, None)

    def _go(self, group: asyncio.TaskGroup) -> None:
        """Begin to pull what is next, and give up what is not wanted any more."""
        offered = self._offered
        if offered is None:
            return
        now = self._store.clock.monotonic()
        here = {version.id: version.state for version in self._store.versions_of(offered.run)}
        refused = {version for version, failure in self._failures.items() if failure.until > now}
        desired = self._store.runs.desired.get(offered.run)
        others = self._others(offered)
        # What was retired and has its folder yet is not used again: it goes first, also where it is wanted by now.
        going = others | {version for version, state in here.items() if state is VersionState.RETIRED}
        here = {version: state for version, state in here.items() if version not in others}
        plan = plan_pulls(offered.versions, desired, here, refused=refused | going)
        self._plan = replace(plan, needs=plan.needs - going)
        needed = {*plan.needs, self._orders.asked or ""} & others
        self._in_the_way = self._orders.make_way(needed, self._sources.upstream.name)
        # One that the catalog has found already has its name: its pull is about to end by itself.
        kept = {*self._plan.pull, *(version for version, state in here.items() if not state.is_gone)}
        if self._pulling is not None and self._pulled not in kept:
            self._pulling[1].cancel()
        if self._pulling is None and self._plan.pull:
            wanted = next(version for version in offered.versions if version.id == self._plan.pull[0])
            self._turn.begin(wanted.id)
            task = group.create_task(self._pull(wanted), name=f"pull {wanted.id}")
            self._pulling = wanted.id, task
            task.add_done_callback(lambda _: self._pull_ended())

    def _others(self, offered: UpstreamRun) -> frozenset[str]:
        """The ids of the versions of a hub of which this host has others."""
        return others_of(offered.versions, self._store.versions) if self._sources.upstream.leads else frozenset()

    async def _tidy(self) -> None:
        """Remove what is left of pulls whose versions are not wanted any more."""
        if self._offered is not None and self._pulling is None and self._kept_for != self._plan.needs:
            is_tidy = await self._puller.keep_only(self._offered.run, needs := self._plan.needs)
            self._kept_for = needs if is_tidy else None

    def _pull_ended(self) -> None:
        self._pulling = None
        self._turn.end()
        self._wake.notify()
        self._sources.told.notify()

    async def _pull(self, version: UpstreamVersion) -> None:
        self._kept_for = None  # what a pull that is given up leaves is removed, also where all else is as before
        await self._reporter.report()
        await self._puller.keep_only(version.run, self._plan.needs | {version.id})
        began = self._store.clock.monotonic()
        try:
            took = await self._turn.pulled(
                lambda sources: self._puller.pull(version.id, version.digest or "", sources),
                lambda why: self._store.say("version", version.id, why, of_run=version.run, is_fault=True),
            )
        except (UpstreamError, PullRefusedError) as error:
            if isinstance(error, UnreachableError):
                self._sources.next()
            self._failed(version.id, error)
            return
        self._failures.pop(version.id, None)
        text = took.text(self._store.clock.monotonic() - began, self._sources.upstream.name)
        self._store.say("version", version.id, text, of_run=version.run)
        known = self._store.versions.get(version.id)
        if known is None or known.state.is_gone:
            anew = version.announced(self._store.clock.now())
            anew = anew if known is None else anew.having(given_up=known.career.given_up)
            self._store.put_version(as_told(anew, version))
        self._nudge()

    def _failed(self, version: str, error: Exception) -> None:
        known = self._failures.get(version)
        times = 1 if known is None else known.times + 1
        looks = isinstance(error, GoneError) and times == 1  # the upstream has gone on: look what it has now
        wait = 0.0 if looks else backoff(times, PULL_RETRY_SECONDS, LONGEST_PULL_RETRY_SECONDS)
        is_final = not isinstance(error, UnreachableError | GoneError)
        self._failures[version] = _Failure(str(error), times, self._store.clock.monotonic() + wait, is_final)
        if known is None or known.reason != str(error):
            self._store.say("version", version, f"was not pulled: {error}", is_fault=True)

    def _tell(self) -> None:
        """Set the fault of the upstream, or clear it, and what is known of it."""
        turn, name = self._turn, self._sources.upstream.name
        word = self._word = self._hearing.word(
            name,
            self.run_followed,
            self._offered,
            host=self._identity.name,
            leads=self.is_led,
            wanted=self._store.runs.desired.get(self.run_followed or ""),
            pulling=self._pulled,
            source=turn.source,
            ahead=turn.ahead,
            store_fault=turn.store_fault,
            disobeyed=self._unreported() or self._orders.refused or self._orders.lost,
        )
        self._store.runs.set_upstream(word)
        before, fault = self._store.faults.upstream, self._fault()
        self._store.faults.set(upstream=fault)
        if fault is not None and before is None:
            self._store.say("root", "upstream", fault, is_fault=True)
        elif fault is None and before is not None:
            self._store.say("root", "upstream", f"{name} is heard, and has what is wanted")

    def _unreported(self) -> str | None:
        """Why the upstream orders nothing here; None where it takes reports, or does not answer."""
        fault = self._reporter.fault
        return None if fault is None else f"the hub takes no report of this host: {fault}"

    def _fault(self) -> str | None:
        desired = self._store.runs.desired.get(self.run_followed or "")
        failure = self._failures.get(desired or "")
        not_pulled = None if failure is None else f"{desired} was not pulled: {failure.reason}"
        not_good = why_not_good(self._store.versions.get(desired or ""))
        return (
            self._hearing.fault
            or self._unreported()
            or self._orders.refused
            or (self._refused(desired) if self._in_the_way else None)
            or self._orders.lost
            or not_pulled
            or self._plan.lacks
            or not_good
        )
