"""The adapter to another refitd: a host with engines of its own, which follows this service.

A host is brought to a version by an order. It pulls the version, checks it, rolls it out to its engines and proves it,
all by itself: nothing that is lost on the way leaves it in between, and the same order may come twice.

    look      GET /v1/follow, which says how many orders the host has obeyed: the order is made after so many
    order     PUT /v1/follow/desired. A host that is led by another service refuses it, and one that has obeyed another
              order since the look: it is looked at again
    wait      GET /v1/follow, which answers when the host's engines serve the version, or refuse it, and every two
              seconds: while the host pulls and checks the version its engines serve on (PREPARE), then it loads (LOAD).
              What it says of them meanwhile goes to `Target.hears`
    served    the host's proof is compared with that of other hosts of its configuration → ACK; another → TAINTED
    refused   the order is taken back. The host proves what it served before → NACK, else → TAINTED
    no answer UNREACHABLE: what came of the order the next probe tells, since a host serves what it proves. So it is
              where another order came in between

Its engines are paused and resumed by the host alone.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from refitd.engine.dialing import Guard
from refitd.engine.http import Reply, Transport
from refitd.engine.plugin.leading import Leads
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
from refitd.engine.refitd.answers import NoAnswer, doubt, following, picture, reached, trial_fault, waits_itself
from refitd_client.contract.follow import Following, HostOrder
from refitd_client.contract.hosts import HostEngines, OrderState
from refitd_client.contract.naming import parse_version_id
from refitd_client.contract.states import EngineState

SECONDS = 5.0
WAIT_SECONDS = 2.0  # that the host holds back an answer, unless something is decided before
TRIAL_SECONDS = 60.0
TAKE_BACK_SECONDS = 60.0
_FOLLOW = "/v1/follow"
_DESIRED = "/v1/follow/desired"
_INCOMPLETE = 422
_BACK = frozenset({OrderState.SERVED, OrderState.NONE})


class RefitdEngine:
    """One host behind the `Engine` port."""

    def __init__(
        self,
        url: str,
        *,
        api_key: Path | None = None,
        admin_key: Path | None = None,
        guard: Guard | None = None,
        root: str,
        load_timeout: float = 600.0,
        leads: Leads | None = None,
    ) -> None:
        """Make no call yet.

        Args:
            url: of the service on the host.
            api_key: file with the token that opens what looks; None for the other one.
            admin_key: file with the token that opens changes; None where none is needed.
            guard: says which addresses may be called.
            root: versions that it serves are named by their paths in this folder.
            load_timeout: seconds that its engines may take, after the last byte that it pulled; and its check before.
            leads: the name of this service and its epoch; None for a reader that orders nothing.
        """
        self._http = Transport(url, api_key=api_key, admin_key=admin_key, guard=guard, server="service")
        self._url = url
        self._root = root
        self._load_timeout = load_timeout
        self._leads = leads
        self._is_doubted = False  # whether its engines are to be loaded again though the host believes them

    async def probe(self) -> Reached | Unreached:
        """See `Engine`."""
        reply = await self._http.get(_FOLLOW, SECONDS)
        told = following(reply, self._url)
        if isinstance(told, NoAnswer):
            return Unreached(
                reason=told.reason,
                advice=told.advice,
                recognised=told.recognised,
                nothing_listens=reply.nothing_listens,
            )
        return reached(told, self._root, getattr(reply, "address", None))

    async def refit(self, target: Target, on_stage: Callable[[Stage], None]) -> Refit:
        """See `Engine`."""
        watch = Stopwatch(on_stage)
        if target.files is None:
            reason = "a host pulls only what refitd's publisher wrote, and this version has no manifest"
            return Refit(outcome=Outcome.NACK, resumed=True, reason=reason)
        version = target.files.version
        before = await self._ask()
        if isinstance(before, NoAnswer):
            return _unreached(before)
        with watch.during(Stage.PREPARE):
            told = await self._order_next(version, before)
            if isinstance(told, NoAnswer):
                return _not_ordered(told)
            told = await self._settled(version, told, self._load_timeout, target.hears, is_pulled=True)
        if not isinstance(told, NoAnswer):
            with watch.during(Stage.LOAD):
                told = await self._settled(version, told, self._load_timeout, target.hears)
        if isinstance(told, NoAnswer):
            return _unreached(told)
        with watch.during(Stage.VERIFY):
            refit = await self._judged(target, version, before, told)
        refit.timings.update(watch.milliseconds)
        return refit

    async def _judged(self, target: Target, version: str, before: Following, told: Following) -> Refit:
        if told.desired != version:
            reason = f"{told.follower}: another order came in between, to serve {told.desired or 'nothing'}"
            return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=reason)
        match told.order:
            case OrderState.SERVED:
                reason = doubt(told.proof, target.fingerprint, target.not_fingerprint)
                self._is_doubted = reason is not None
                if reason is not None:
                    return Refit(outcome=Outcome.TAINTED, resumed=False, reason=f"{told.follower}: {reason}")
                proved_on = told.configuration or None
                return Refit(outcome=Outcome.ACK, resumed=True, fingerprint=told.proof, configuration=proved_on)
            case OrderState.AWAY:
                return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=_told(told, version))
            case OrderState.DOUBTFUL:
                return Refit(outcome=Outcome.TAINTED, resumed=False, reason=_told(told, version))
            case _:
                return await self._taken_back(version, before, told, target.hears)

    async def _taken_back(
        self, version: str, before: Following, told: Following, hears: Callable[[HostEngines], None]
    ) -> Refit:
        """The host does not serve it: it is to serve what it served before, and to go nowhere by itself."""
        reason = _told(told, version)
        goal = before.ordered if before.ordered != version else before.serves
        goal = None if goal == version else goal
        ordered = await self._order(_run_of(version), goal, told)
        if not isinstance(ordered, NoAnswer):
            ordered = await self._settled(goal, ordered, min(self._load_timeout, TAKE_BACK_SECONDS), hears)
        if isinstance(ordered, NoAnswer):
            return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=f"{reason}; then {ordered.reason}")
        if ordered.order in _BACK:
            return Refit(outcome=Outcome.NACK, resumed=True, reason=reason, waits=waits_itself(told))
        text = f"{reason}; and not all of its engines serve what they served before: {ordered.order_reason}"
        return Refit(outcome=Outcome.TAINTED, resumed=False, reason=text)

    async def prefetch(self, version: Coming | Offered) -> Sequence[RankProof]:
        """See `Engine`. A host pulls what is sealed by itself."""
        return ()

    async def cancel_prefetch(self) -> None:
        """See `Engine`."""

    async def fingerprint(self, alike: str | None = None) -> str | None:
        """See `Engine`."""
        told = await self._ask()
        return None if isinstance(told, NoAnswer) else told.proof

    async def trial(self, label: str) -> str | None:
        """See `Engine`. Each engine of the host is asked."""
        return trial_fault(await self._http.post("/v1/follow/trial", {"label": label}, TRIAL_SECONDS))

    async def resume(self) -> bool:
        """See `Engine`. The host resumes its engines by itself."""
        return True

    async def generates(self) -> bool | None:
        """See `Engine`. Whether at least one of its engines does, as far as it names them."""
        told = await self._ask()
        if isinstance(told, NoAnswer) or told.host is None:
            return None
        return any(not engine.paused and engine.state is not EngineState.UNREACHABLE for engine in told.host.engines)

    async def check_changes(self) -> ChangeCheck:
        """See `Engine`. By an order that names nothing, which is refused as incomplete."""
        reply = await self._http.put(_DESIRED, {}, SECONDS)
        if isinstance(reply, Reply) and reply.status == _INCOMPLETE:
            return ChangeCheck(date=reply.date)
        told = following(reply, self._url)
        fault = told.reason if isinstance(told, NoAnswer) else "an order that names nothing was obeyed"
        advice = told.advice if isinstance(told, NoAnswer) else "is it a refitd?"
        return ChangeCheck(fault=fault, advice=advice, date=reply.date if isinstance(reply, Reply) else None)

    async def aclose(self) -> None:
        """See `Engine`. No connection is kept from one call to the next."""

    async def _ask(self) -> Following | NoAnswer:
        return following(await self._http.get(_FOLLOW, SECONDS), self._url)

    async def _order_next(self, version: str, before: Following) -> Following | NoAnswer:
        """Order it after what the host has obeyed by now; look once more where another order came in between."""
        run, again = _run_of(version), self._is_doubted
        told = await self._order(run, version, before, again=again)
        if not isinstance(told, NoAnswer) or not told.overtaken:
            return told
        now = await self._ask()
        return now if isinstance(now, NoAnswer) else await self._order(run, version, now, again=again)

    async def _order(
        self, run: str, version: str | None, known: Following, *, again: bool = False
    ) -> Following | NoAnswer:
        """`known` is the newest answer of the host. One that counts no orders does not know `after`."""
        owner = None if self._leads is None else self._leads.owner
        order = HostOrder(
            run=run,
            version=version,
            fence=0 if owner is None else owner.epoch,
            leader="" if owner is None else owner.service,
            told_by="" if owner is None else f"the refitd of {owner.root} on {owner.host}",
            again=again,
            after=known.orders,
        )
        body = {name: value for name, value in asdict(order).items() if name != "after" or value is not None}
        return following(await self._http.put(_DESIRED, body, SECONDS), self._url)

    async def _settled(
        self,
        version: str | None,
        told: Following,
        patience: float,
        hears: Callable[[HostEngines], None],
        *,
        is_pulled: bool = False,
    ) -> Following | NoAnswer:
        """Wait until the host has what was ordered, refuses it, makes no progress, or waits for its own operator.

        Args:
            version: what was ordered.
            told: what the host said last.
            patience: seconds without progress.
            hears: gets what the host says of its engines.
            is_pulled: it is enough that the version is there and good, and the host's engines are about to be loaded.
        """
        ends, lost = time.monotonic() + patience, 0
        _heard(told, hears)
        while told.order is OrderState.COMES and told.desired == version and time.monotonic() < ends:
            if (is_pulled and told.ordered == version) or _stays(told, version):
                break
            reply = await self._http.get(f"{_FOLLOW}?within={WAIT_SECONDS:g}", SECONDS + WAIT_SECONDS)
            answer = following(reply, self._url)
            if isinstance(answer, NoAnswer):
                lost += 1
                if lost > 1 or not answer.later:
                    return answer
                continue
            if (answer.pulling, answer.pulled_bytes) != (told.pulling, told.pulled_bytes):
                ends = time.monotonic() + patience
            told, lost = answer, 0
            _heard(told, hears)
        return told


def _stays(told: Following, version: str | None) -> bool:
    """Whether its own operator has paused it before any of its engines went there."""
    named = () if told.host is None else told.host.engines
    return waits_itself(told) and not any(engine.version == version for engine in named)


def _heard(told: Following, hears: Callable[[HostEngines], None]) -> None:
    if (host := picture(told)) is not None:
        hears(host)


def _run_of(version: str) -> str:
    parsed = parse_version_id(version)
    if parsed is None:
        raise ValueError(f"{version!r} is no version's id")
    return parsed[0]


def _unreached(fault: NoAnswer) -> Refit:
    return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=fault.reason)


def _not_ordered(fault: NoAnswer) -> Refit:
    """The order was not taken: the host serves what it served."""
    if fault.later and not fault.led:
        return _unreached(fault)
    return Refit(outcome=Outcome.NACK, resumed=True, reason=fault.reason, led=fault.led)


def _told(told: Following, version: str) -> str:
    if told.order is OrderState.COMES:
        if waits_itself(told):
            return f"{told.follower} does not go to {version} now: {told.order_reason}"
        return f"{told.follower} has made no progress with {version} for too long: {told.order_reason}"
    return f"{told.follower}: {told.order_reason}"
