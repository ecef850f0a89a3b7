"""The adapter to a host: another refitd with engines of its own, which follows this service and reports to it.

A host is brought to a version by the replies to its reports (`line.py`). It pulls the version, checks it, rolls it out
to its engines and proves it, all by itself: nothing that is lost on the way leaves it in between.

    order     what the host is to serve is written down; it hears that in the reply to its next report
    wait      for the report that says that its engines serve the version, or refuse it: while the host pulls and checks
              the version its engines serve on (PREPARE), then it loads (LOAD). What it says of them meanwhile goes to
              `Target.hears`
    served    the host's proof is compared with that of other hosts of its configuration → ACK; another → TAINTED
    refused   the order is taken back. The host proves what it served before → NACK, else → TAINTED
    silent    UNREACHABLE: what came of the order the next report tells, since a host serves what it proves

Its engines are paused and resumed by the host alone.
"""

from collections.abc import Callable, Sequence

from refitd.engine.limits import TRIAL_SECONDS
from refitd.engine.port import (
    ChangeCheck,
    Coming,
    Offered,
    Outcome,
    RankProof,
    Reached,
    Refit,
    Stage,
    Stopwatch,
    Target,
    Unreached,
)
from refitd.engine.refitd.answers import FIX, doubt, picture, reached, waits_itself
from refitd.engine.refitd.line import HostLine
from refitd_client.contract.follow import Following
from refitd_client.contract.hosts import HostEngines, OrderState
from refitd_client.contract.naming import parse_version_id

TAKE_BACK_SECONDS = 60.0
FAULT_SECONDS = 60.0  # a host that cannot pull a version asks again all the time; a newer version may be there by then
Hears = Callable[[HostEngines], None]


class RefitdEngine:
    """One host behind the `Engine` port."""

    def __init__(self, line: HostLine, *, root: str, load_timeout: float = 600.0) -> None:
        """Say nothing yet.

        Args:
            line: to the host.
            root: versions that it serves are named by their paths in this folder.
            load_timeout: seconds that its engines may take, after the last byte that it pulled; and its check before.
        """
        self._line = line
        self._root = root
        self._load_timeout = load_timeout
        self._is_doubted = False  # whether its engines are to be loaded again though the host believes them

    @property
    def _silence(self) -> str:
        return f"the host {self._line.name} does not report"

    async def probe(self) -> Reached | Unreached:
        told = self._line.here
        return Unreached(reason=self._silence, advice=FIX) if told is None else reached(told, self._root)

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
        return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=self._silence)

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
            return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=f"{reason}; then {self._silence}")
        if back.order in {OrderState.SERVED, OrderState.NONE}:
            return Refit(outcome=Outcome.NACK, resumed=True, reason=reason, waits=waits_itself(told))
        text = f"{reason}; and not all of its engines serve what they served before: {back.order_reason}"
        return Refit(outcome=Outcome.TAINTED, resumed=False, reason=text)

    async def prefetch(self, version: Coming | Offered) -> Sequence[RankProof]:
        """See `Engine`. A host pulls what is sealed by itself."""
        return ()

    async def cancel_prefetch(self) -> None: ...

    async def fingerprint(self, alike: str | None = None) -> str | None:
        told = self._line.here
        return None if told is None else told.proof

    async def trial(self, label: str) -> str | None:
        """See `Engine`. Each engine of the host is asked."""
        number, ends = self._line.ask(label), self._line.clock.monotonic() + TRIAL_SECONDS
        try:
            while self._line.clock.monotonic() < ends:
                if await self._line.next() is None:
                    return self._silence
                tried = self._line.tried
                if tried is not None and tried.number == number:
                    return tried.fault
            return f"the host {self._line.name} has not tried its engines within {TRIAL_SECONDS:g} s"
        finally:
            self._line.trial = None

    async def resume(self) -> bool:
        """See `Engine`. The host resumes its engines by itself."""
        return True

    async def check_changes(self) -> ChangeCheck:
        """See `Engine`. It asks by itself."""
        return ChangeCheck()

    async def aclose(self) -> None: ...

    def _is_taken(self, told: Following, version: str | None) -> bool:
        """Whether the host has heard what was ordered last."""
        return told.refused is None and told.desired == version and self._line.again in {0, told.again}

    async def _settled(
        self, version: str | None, patience: float, hears: Hears, *, is_pulled: bool = False
    ) -> Following | None:
        """Wait until the host has what was ordered, refuses it, makes no progress, or waits for its own operator; None
        where it does not report.

        Args:
            version: what was ordered.
            patience: seconds without progress.
            hears: gets what the host says of its engines.
            is_pulled: it is enough that the version is there and good, and the host's engines are about to be loaded.
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
