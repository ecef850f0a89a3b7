"""One round: publish, wait for a kill point, kill, start again, and wait until the fleet is in sync."""

import time
from contextlib import ExitStack
from dataclasses import dataclass

import httpx

from chaos.book import AT_START
from chaos.midload import MidLoad
from chaos.plan import Point, Round, Victim
from chaos.stack import Begun, Stack, kill
from chaos.trainer import TrainerError
from refitd_client.contract.wire import Event
from refitd_client.errors import ServiceError
from support.servers import ServerError

REACHED_WITHIN = 30.0
IN_SYNC_WITHIN = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a round ended. `kill_point` is a sentence, `failure` None when the fleet got in sync within `seconds`."""

    round: Round
    kill_point: str
    in_mid_load: bool
    seconds: float
    failure: str | None

    def __str__(self) -> str:
        end = f"in sync after {self.seconds:.1f} s" if self.failure is None else f"FAILED: {self.failure}"
        return f"round {self.round.number:3}  seed {self.round.seed}  {self.kill_point}: {end}"


class NeverReachedError(Exception):
    """A kill point did not come."""


def play(stack: Stack, round_: Round) -> Outcome:
    """Play a round to its end."""
    began, hit, point = time.monotonic(), False, f"kill {round_.victim}"
    try:
        with ExitStack() as cleanup:
            if round_.point is Point.MID_LOAD and stack.mid_load is not None:
                point, hit, began = _in_mid_load(stack, round_, stack.mid_load, cleanup)
            else:
                point, began = _ordinary(stack, round_)
        failure = stack.converge(IN_SYNC_WITHIN)
    except (NeverReachedError, TrainerError, ServerError, ServiceError, httpx.HTTPError) as error:
        failure = f"{type(error).__name__}: {error}"
    return Outcome(round=round_, kill_point=point, in_mid_load=hit, seconds=time.monotonic() - began, failure=failure)


def _ordinary(stack: Stack, round_: Round) -> tuple[str, float]:
    after = stack.follower.now
    begun = stack.publish(round_.chance)
    _await_point(stack, round_, begun, after)
    time.sleep(round_.delay)
    killed = time.monotonic()
    _kill(stack, round_)
    _start_again(stack, round_, begun)
    return f"kill {_whom(round_)} {round_.delay * 1000:.0f} ms after {round_.point.value} (v{begun.step:06d})", killed


def _in_mid_load(stack: Stack, round_: Round, mid_load: MidLoad, cleanup: ExitStack) -> tuple[str, bool, float]:
    cleanup.callback(mid_load.thaw)
    mid_load.freeze()
    begun = stack.publish(round_.chance)
    hit = mid_load.step_into_load(round_.slices)
    killed = time.monotonic()
    _kill(stack, round_)
    if not round_.thaw_late:
        time.sleep(round_.thaw)
        mid_load.thaw()
    _start_again(stack, round_, begun)
    if round_.thaw_late:
        time.sleep(round_.thaw)
        mid_load.thaw()
    where = "while" if hit else "MISSED: not while"
    late = ", which goes on after the restart" if round_.thaw_late and round_.victim is not Victim.ENGINE else ""
    point = f"kill {_whom(round_)} {where} sglang loads v{begun.step:06d}, {round_.slices / 2:.1f} ms into it{late}"
    return point, hit, killed


def _await_point(stack: Stack, round_: Round, begun: Begun, after: int) -> None:
    if round_.point is Point.BEGUN:
        stack.trainer.until("begin", begun.mark, REACHED_WITHIN)
        return
    stack.trainer.until("published", begun.mark, REACHED_WITHIN)
    if round_.point is not Point.PUBLISHED:
        reached = stack.follower.until(lambda event: _is_point(stack, round_, event), after, REACHED_WITHIN)
        if reached is None:
            raise NeverReachedError(f"waited for {REACHED_WITHIN:g} s, and never saw that {round_.point.value}")


def _is_point(stack: Stack, round_: Round, event: Event) -> bool:
    if round_.point is Point.SERVED:
        return event.kind == "version" and event.text.startswith("served")
    state = event.data.get("state")
    return event.kind == "engine" and event.subject == stack.ids[round_.engine] and state == round_.point.name


def _kill(stack: Stack, round_: Round) -> None:
    match round_.victim:
        case Victim.PUBLISHER:
            stack.trainer.kill()
        case Victim.SERVICE:
            kill(stack.refitd)
        case Victim.ENGINE:
            asked = stack.load.asked[round_.engine]
            asked.floor = AT_START.order
            kill(stack.engines[round_.engine])
            asked.killed = time.monotonic()


def _start_again(stack: Stack, round_: Round, begun: Begun) -> None:
    """What was killed, and a publisher publishes again: the same step if it did not live to hear of its end."""
    match round_.victim:
        case Victim.PUBLISHER:
            stack.note(begun)
            stack.trainer.start()
            begun = stack.publish(round_.chance)
        case Victim.SERVICE:
            stack.refitd.start()
            if round_.again is not None:
                time.sleep(round_.again)
                kill(stack.refitd)
                stack.refitd.start()
        case Victim.ENGINE:
            stack.engines[round_.engine].start()
    stack.published(begun, REACHED_WITHIN)


def _whom(round_: Round) -> str:
    whom = round_.engine if round_.victim is Victim.ENGINE else str(round_.victim)
    return whom if round_.again is None else f"{whom} (twice)"
