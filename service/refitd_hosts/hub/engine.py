"""A host: another refitd with engines of its own, which follows this service and reports to it, as one engine.

A host is brought to a version by the replies to its reports: the hub never calls. Both sides repeat what is so, and
nothing is said once: a report or a reply that is lost costs the time to the next. A host pulls the version, checks it,
rolls it out to its engines and proves it, all by itself: nothing that is lost on the way leaves it in between.

    order     what the host is to serve is written down; it hears that in the reply to its next report
    wait      for the report that says that its engines serve the version, or refuse it: while the host pulls and checks
              the version its engines serve on (PREPARE), then it loads (LOAD). What it says of them meanwhile goes to
              `Target.hears`
    served    the host's proof is compared with that of other hosts of its configuration → ACK; another → TAINTED
    refused   the order is taken back. The host proves what it served before → NACK, else → TAINTED
    silent    UNREACHABLE: what came of the order the next report tells, since a host serves what it proves

Its engines are paused and resumed by the host alone.
"""

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from refitd.clock import Clock
from refitd.engine.fingerprints import comparable
from refitd.engine.http import TRIAL_SECONDS
from refitd.engine.port import (
    EnginePort,
    Outcome,
    Reached,
    Refit,
    Stage,
    Stopwatch,
    Target,
    Unreached,
)
from refitd.engine.port import Process as ServerProcess
from refitd_client.contract.follow import Following, HostEngines, HostReport, HostTrial, HostTrialResult, OrderState
from refitd_client.contract.naming import parse_version_id, version_folder, version_label

AWAY_SECONDS = 60.0  # without a report: a host at rest reports every ten
SILENT_SECONDS = 15.0  # without a report of a host that was given something to do, which reports every second
TAKE_BACK_SECONDS = 60.0
FAULT_SECONDS = 60.0  # a host that cannot pull a version asks again all the time; a newer version may be there by then
Hears = Callable[[HostEngines], None]
NOTHING_PROVED = "(nothing that is proved)"
FIX = "look at the service there: it reports to what its --follow names, and its --engine names its engines"


class Signal(Protocol):
    count: int

    def notify(self) -> None: ...

    async def wait_after(self, seen: int, within: float | None = None) -> int: ...


class HostLine:
    """One host's. `heard` is notified of each of its reports."""

    def __init__(
        self, name: str, clock: Clock, heard: Signal, as_known: Callable[[Following], Following] = lambda told: told
    ) -> None:
        """Nothing was said yet. `heard`: notified of each report. `as_known`: leaves out of what a host says what this
        service does not have. A version may come to be known between two reports, so the last one is looked at again
        each time.
        """
        self.name = name
        self.clock = clock
        self.heard = heard
        self._as_known = as_known
        self._told: Following | None = None
        self.serve: dict[str, str | None] = {}
        self.again = 0
        self.trial: HostTrial | None = None
        self.tried: HostTrialResult | None = None
        self._began, self._began_at = clock.now(), clock.monotonic()
        self._last, self._heard_at = "", 0.0
        self._is_lost = False
        self._refusal: tuple[str, str] | None = None  # when the first report in its name was refused since, and why

    def take(self, report: HostReport) -> None:
        self._told, self.tried = report.told, report.tried
        self._last, self._heard_at, self._is_lost = self.clock.now(), self.clock.monotonic(), False
        self._refusal = None
        self.heard.notify()

    def refuse(self, why: str) -> None:
        if self._refusal is None or self._refusal[1] != why:
            self._refusal = self.clock.now(), why

    @property
    def is_awaited(self) -> bool:
        """Whether the host has had no minute to report yet since this service started."""
        return self._told is None and self.clock.monotonic() - self._began_at <= AWAY_SECONDS

    @property
    def silence(self) -> str:
        """That the host does not report, since when, and why as far as this service knows, in a sentence."""
        since = f"its last report came at {self._last}"
        if self._told is None:
            since = f"nothing was heard of it since this service started at {self._began}"
        text = f"the host {self.name} does not report: {since}"
        if self._refusal is None:
            return text
        at, why = self._refusal
        return f"{text}; a report in its name was refused at {at}: {why}"

    @property
    def told(self) -> Following | None:
        """What the host said last, as far as this service knows of it now; None before its first report."""
        return None if self._told is None else self._as_known(self._told)

    @property
    def here(self) -> Following | None:
        """What the host said last; None where it has not reported for too long."""
        is_away = self._is_lost or self.clock.monotonic() - self._heard_at > AWAY_SECONDS
        return None if is_away else self.told

    async def next(self) -> Following | None:
        """What the host says next; None where it says nothing for too long, and then it counts as away."""
        seen = self.heard.count
        await self.heard.wait_after(seen, within=SILENT_SECONDS)
        if self.heard.count == seen:
            self._is_lost = True
            self.serve = {}  # where it comes back much later, something else may be right by then
            return None
        return self.told

    def order(self, run: str, version: str | None, *, again: bool = False) -> None:
        """Say from now on that the host is to serve a version. `again`: that it is to load it though it serves it."""
        self.serve = {run: version}
        self.again = 1 + secrets.randbelow(2**52) if again else 0

    def ask(self, label: str) -> int:
        self.trial = HostTrial(number=1 + secrets.randbelow(2**52), label=label)
        return self.trial.number


class RefitdEngine(EnginePort):
    def __init__(self, line: HostLine, *, root: str, load_timeout: float = 600.0) -> None:
        """Say nothing yet. `root`: versions that it serves are named by their paths in this folder. `load_timeout`:
        seconds that its engines may take, after the last byte that it pulled; and its check before.
        """
        self._line = line
        self._root = root
        self._load_timeout = load_timeout
        self._is_doubted = False  # whether its engines are to be loaded again though the host believes them

    async def probe(self) -> Reached | Unreached:
        told, line = self._line.here, self._line
        if told is None:
            return Unreached(reason=line.silence, advice=FIX, is_awaited=line.is_awaited)
        return reached(told, self._root)

    async def refit(self, target: Target, on_stage: Callable[[Stage], None]) -> Refit:
        watch = Stopwatch(on_stage)
        if target.files is None:
            reason = "a host pulls what has a manifest, and of this version there is none: use 'refitd publish'"
            return Refit(outcome=Outcome.NACK, resumed=True, reason=reason)
        version, before = target.files.version, self._line.here
        if before is None:
            return self._unreached()
        self._line.order(_run_of(version), version, again=self._is_doubted)
        with watch.during(Stage.PREPARE):
            told = await self._settled(version, self._load_timeout, target.hears, is_pulled=True)
        if told is not None and self._is_taken(told, version) and told.ordered == version:
            with watch.during(Stage.LOAD):
                told = await self._settled(version, self._load_timeout, target.hears)
        if told is None:
            return self._unreached()
        with watch.during(Stage.VERIFY):
            refit = await self._judged(target, version, before, told)
        refit.timings.update(watch.milliseconds)
        return refit

    def _unreached(self) -> Refit:
        return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=self._line.silence)

    async def _judged(self, target: Target, version: str, before: Following, told: Following) -> Refit:
        if not self._is_taken(told, version):
            reason = told.refused or f"{told.follower} does not take what it is to serve: see its log"
            is_led = told.refused is not None
            outcome = Outcome.NACK if is_led else Outcome.UNREACHABLE
            return Refit(outcome=outcome, resumed=True, reason=reason, led=is_led)
        match told.order:
            case OrderState.SERVED:
                reason = doubt(told.proof, target.fingerprint, target.not_fingerprint)
                self._is_doubted = reason is not None
                if reason is not None:
                    said = f"{told.follower}: {reason}"
                    return Refit(outcome=Outcome.TAINTED, resumed=False, reason=said, fingerprint=told.proof)
                proved_on = told.configuration or None
                return Refit(outcome=Outcome.ACK, resumed=True, fingerprint=told.proof, configuration=proved_on)
            case OrderState.AWAY:
                return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=_told(told, version))
            case OrderState.DOUBTFUL:
                return Refit(outcome=Outcome.TAINTED, resumed=False, reason=_told(told, version))
            case _:
                return await self._taken_back(version, before, told, target.hears)

    async def _taken_back(self, version: str, before: Following, told: Following, hears: Hears) -> Refit:
        """The host does not serve it: it is to serve what it served before."""
        reason = _told(told, version)
        goal = before.ordered if before.ordered != version else before.serves
        goal = None if goal == version else goal
        self._line.order(_run_of(version), goal)
        back = await self._settled(goal, TAKE_BACK_SECONDS, hears)
        if back is None:
            return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=f"{reason}; then {self._line.silence}")
        if back.order in {OrderState.SERVED, OrderState.NONE}:
            return Refit(outcome=Outcome.NACK, resumed=True, reason=reason, waits=waits_itself(told))
        text = f"{reason}; and not all of its engines serve what they served before: {back.order_reason}"
        return Refit(outcome=Outcome.TAINTED, resumed=False, reason=text)

    async def fingerprint(self, alike: str | None = None) -> str | None:
        told = self._line.here
        return None if told is None else told.proof

    async def trial(self, label: str) -> str | None:
        """See `Engine`. Each engine of the host is asked."""
        number, ends = self._line.ask(label), self._line.clock.monotonic() + TRIAL_SECONDS
        try:
            while self._line.clock.monotonic() < ends:
                if await self._line.next() is None:
                    return self._line.silence
                tried = self._line.tried
                if tried is not None and tried.number == number:
                    return tried.fault
            return f"the host {self._line.name} has not tried its engines within {TRIAL_SECONDS:g} s"
        finally:
            self._line.trial = None

    def _is_taken(self, told: Following, version: str | None) -> bool:
        """Whether the host has heard what was ordered last."""
        return told.refused is None and told.desired == version and self._line.again in {0, told.again}

    async def _settled(
        self, version: str | None, patience: float, hears: Hears, *, is_pulled: bool = False
    ) -> Following | None:
        """Wait until the host has what was ordered, refuses it, makes no progress for `patience` seconds, or waits for
        its own operator; None where it does not report. `is_pulled`: it is enough that the version is there and good,
        and the host's engines are about to be loaded.
        """
        clock, told, is_new = self._line.clock, self._line.told, False
        ends, seen = clock.monotonic() + patience, set[tuple[str | None, int, str | None]]()
        while told is not None and clock.monotonic() < ends:
            if (host := picture(told)) is not None:
                hears(host)
            if not self._is_taken(told, version):
                if is_new and told.refused is not None:
                    break
            elif told.order is not OrderState.COMES or (is_pulled and told.ordered == version) or _stays(told, version):
                break
            answer = await self._line.next()
            if answer is not None:
                # A pull that fails and begins again looks as it did before: that is no progress.
                state = answer.pulling, answer.pulled_bytes, answer.fault
                # Behind other hosts it waits for its turn, which this service gives. In its turn it pulls, or fails.
                if state not in seen or (answer.ahead and answer.fault is None):
                    ends = clock.monotonic() + (patience if answer.fault is None else min(patience, FAULT_SECONDS))
                seen.add(state)
            told, is_new = answer, True
        return told


def _stays(told: Following, version: str | None) -> bool:
    """Whether its own operator has paused it before any of its engines went there."""
    named = () if told.host is None else told.host.engines
    return waits_itself(told) and not any(engine.version == version for engine in named)


def _run_of(version: str) -> str:
    parsed = parse_version_id(version)
    if parsed is None:
        raise ValueError(f"{version!r} is no version's id")
    return parsed[0]


def _told(told: Following, version: str) -> str:
    if told.order is OrderState.COMES:
        if waits_itself(told):
            return f"{told.follower} does not go to {version} now: {told.order_reason}"
        return f"{told.follower} has made no progress with {version} for too long: {told.order_reason}"
    return f"{told.follower}: {told.order_reason}"


def reached(told: Following, root: str) -> Reached | Unreached:
    """What a probe says of a host that reports. `root`: the root as engines of this kind are said to see it: versions
    are named by their paths in it.
    """
    if told.order is OrderState.AWAY or told.host is None or not told.host.count:
        why = told.order_reason or "it has no engine"
        return Unreached(reason=f"the host {told.follower} reports, and {why}", advice=FIX, recognised=True)
    path, label = named(told.serves, root)
    return Reached(
        model_path=path,
        weight_version=label,
        server_version=told.release,
        configuration=told.configuration,
        startup_path=None,
        process=ServerProcess(started=told.process),
        server="refitd",
        host=picture(told),
        serves=told.serves,
        desires=told.desired,
    )


def of_these(told: Following, digest_of: Callable[[str], str | None]) -> Following:
    """What a host says, without the versions of which it has others than this service, by their digests. `digest_of`: a
    version here, by its id; None where it is not known.
    """
    other = {id_ for id_, digest in told.digests.items() if digest_of(id_) not in {None, digest}}
    if not other:
        return told
    serves = None if told.serves in other else told.serves
    return replace(
        told,
        desired=None if told.desired in other else told.desired,
        ordered=None if told.ordered in other else told.ordered,
        serves=serves,
        proof=None if serves is None else told.proof,
    )


def picture(told: Following) -> HostEngines | None:
    """What a host says of its engines, and of what it does for them now; None where it names no engines."""
    if told.host is None:
        return None
    goes = told.order is OrderState.COMES and not waits_itself(told)
    is_loading = goes and told.ordered == told.desired
    return replace(
        told.host,
        upstream=told.upstream,
        pulling=told.pulling,
        pulled_bytes=told.pulled_bytes,
        source=told.source,
        ahead=told.ahead,
        store_fault=told.store_fault,
        loading=told.desired if is_loading else None,
    )


def waits_itself(told: Following) -> bool:
    """Whether what was ordered is there and good, and the host goes nowhere since its own operator has paused it."""
    return told.host is not None and told.host.waits is not None and told.order_reason == told.host.waits


def named(version: str | None, root: str) -> tuple[str, str | None]:
    """The path and label by which the reconciler knows a version that a host serves."""
    parsed = parse_version_id(version or "")
    if parsed is None:
        return NOTHING_PROVED, None
    run, order = parsed
    return f"{root}/{run}/{version_folder(order)}", version_label(order)


def doubt(proof: str | None, expected: str | None, not_expected: str | None) -> str | None:
    """Why a host that proves a version to itself is not believed, None where it is. `expected`: what another clean load
    of the version gave; None where none is on record. `not_expected`: what the contents before gave, where the files
    differ.
    """
    if proof is None:
        return None
    if comparable(proof, expected) and proof != expected:
        return "its engines' fingerprints are not those that the version has on other hosts"
    if proof == not_expected:
        return "its engines' fingerprints are those of what they served before"
    return None
