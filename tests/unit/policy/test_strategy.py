"""Which engines may go to the target, and what becomes of the others when one breaks."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from refitd.engine.port import Outcome, Refit
from refitd.policy import next_action as backoff
from refitd.policy.strategy import Strategy, StrategyName, fault_found, finished_first, released
from refitd.state.records import AttemptRecord, CheckState, EngineRecord, UpdateRecord
from refitd.update import controller
from refitd.update.controller import OperatorCheck
from refitd_client.contract.states import EngineState, UpdateState
from support.endless_server import answering
from support.fleets import Stage, running
from support.records import engine, version
from support.scripted_server import answer, serve, silence
from support.simulated_engine import SimulatedEngine

OLD, NEW = version(1, served_at="t"), version(2)
ROLLING = Strategy(name=StrategyName.ROLLING)
CANARY = Strategy(name=StrategyName.CANARY)
BROKEN = Refit(outcome=Outcome.TAINTED, resumed=False, reason="the reply was lost")
GOOD = Refit(outcome=Outcome.ACK, resumed=True)


def update(**fields: Any) -> UpdateRecord:
    defaults: dict[str, Any] = {"state": UpdateState.ROLLING, "version": NEW.id}
    return UpdateRecord(number=1, run="run", cause="", started_at="t", **(defaults | fields))


def fleet(**states: EngineState) -> list[EngineRecord]:
    """Engines on the old version, but for those that are IN_SYNC: they serve the new one."""
    on = {True: NEW.id, False: OLD.id}
    return [engine(name, state=state, serving=on[state is EngineState.IN_SYNC]) for name, state in states.items()]


BEHIND, IN_SYNC, TAINTED = EngineState.BEHIND, EngineState.IN_SYNC, EngineState.TAINTED


def test_all_go_at_once_whatever_becomes_of_one() -> None:
    engines = fleet(a=TAINTED, b=BEHIND, c=BEHIND)
    assert released(Strategy(), NEW, update(), engines) == {"a", "b", "c"}


def test_rolling_sends_no_more_than_may_be_unavailable() -> None:
    engines = fleet(a=BEHIND, b=BEHIND, c=BEHIND)
    assert released(ROLLING, NEW, update(), engines) == {"a"}
    two = Strategy(name=StrategyName.ROLLING, max_unavailable=2)
    assert released(two, NEW, update(), engines) == {"a", "b"}


@pytest.mark.parametrize(
    "state", [EngineState.UPDATING, EngineState.VERIFYING, EngineState.TAINTED, EngineState.QUARANTINED]
)
def test_rolling_the_others_wait_while_one_is_out_of_service(state: EngineState) -> None:
    engines = fleet(a=BEHIND, b=state, c=BEHIND)
    assert released(ROLLING, NEW, update(), engines) == {"b"}


def test_rolling_a_dead_engine_holds_up_nobody() -> None:
    engines = fleet(a=EngineState.UNREACHABLE, b=BEHIND, c=BEHIND)
    assert released(ROLLING, NEW, update(), engines) == {"b"}


def test_a_canary_goes_first_and_the_others_only_after_its_check() -> None:
    engines = fleet(a=BEHIND, b=BEHIND)
    assert released(CANARY, NEW, update(), engines) == {"a"}
    assert released(CANARY, NEW, update(check=CheckState.FAILED), engines) == {"a"}
    assert released(CANARY, NEW, update(check=CheckState.PASSED), engines) == {"a", "b"}


def test_a_version_that_was_served_before_needs_no_canary() -> None:
    assert released(CANARY, OLD, update(version=OLD.id), fleet(a=BEHIND, b=BEHIND)) == {"a", "b"}


def test_the_named_engine_is_the_canary_and_another_one_where_it_is_away() -> None:
    named = Strategy(name=StrategyName.CANARY, canary="b")
    assert released(named, NEW, update(), fleet(a=BEHIND, b=BEHIND)) == {"b"}
    assert released(named, NEW, update(), fleet(a=BEHIND, b=EngineState.UNREACHABLE)) == {"a"}


def test_a_canary_that_fails_what_another_engine_serves_has_nothing_barred() -> None:
    """Its checksums may be wrong: engines that came through a load speak for the version."""
    went = AttemptRecord(id="1", engine="a", version=NEW.id, started_at="t")
    struck = engine("a", state=TAINTED, strikes={NEW.id: 2}, last_attempt=went)
    assert fault_found(CANARY, NEW, update(), [struck, *fleet(b=BEHIND)]) is not None
    assert fault_found(CANARY, NEW, update(), [struck, *fleet(b=IN_SYNC)]) is None


def test_an_update_in_progress_is_finished_before_a_newer_version_starts() -> None:
    engines = fleet(a=IN_SYNC, b=BEHIND)
    assert finished_first(ROLLING, update(), engines) == NEW.id
    assert finished_first(Strategy(), update(), engines) is None
    assert finished_first(ROLLING, update(state=UpdateState.COMPLETE), engines) is None


def test_an_update_that_an_engine_fails_again_and_again_is_not_waited_for() -> None:
    assert finished_first(ROLLING, update(), [engine("a", state=EngineState.NACKED, failures=3)]) is None


def test_an_update_that_an_engine_has_given_up_is_not_waited_for() -> None:
    """The engine went back to the version before, which has ended its failures in a row; the others wait for it."""
    gave_up = engine("a", state=BEHIND, serving=OLD.id, strikes={NEW.id: 3})
    assert finished_first(ROLLING, update(), [gave_up, *fleet(b=BEHIND)]) is None
    assert finished_first(ROLLING, update(version="run~v000009"), [gave_up, *fleet(b=BEHIND)]) == "run~v000009"


def three() -> dict[str, SimulatedEngine]:
    return {name: SimulatedEngine() for name in "abc"}


@asynccontextmanager
async def on_the_first(folder: Path, engines: dict[str, SimulatedEngine], strategy: Strategy) -> AsyncIterator[Stage]:
    """A fleet that serves version 1."""
    async with running(folder, engines, strategy=strategy) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: served(stage, 1))
        yield stage


def served(stage: Stage, step: int) -> bool:
    return stage.store.versions[version(step).id].served_at is not None


def in_state(stage: Stage, name: str, state: EngineState) -> Callable[[], bool]:
    return lambda: stage.store.engines[f"{name}:1"].state is state


async def test_rolling_one_that_stays_broken_keeps_the_others_on_the_version_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "FIRST_RETRY_SECONDS", 0.01)
    engines = three()
    async with on_the_first(tmp_path, engines, ROLLING) as stage:
        engines["a"].script = [BROKEN] * 4
        stage.store.put_version(version(2))
        await stage.until(in_state(stage, "a", EngineState.QUARANTINED))
        assert engines["b"].label == engines["c"].label == "1"
        engines["a"].down = True
        await stage.until(in_state(stage, "a", EngineState.UNREACHABLE))
        engines["a"].restart()
        await stage.until(lambda: served(stage, 2))


async def test_a_fast_trainer_does_not_starve_a_rolling_update(tmp_path: Path) -> None:
    engines = three()
    async with on_the_first(tmp_path, engines, ROLLING) as stage:
        engines["a"].gate = asyncio.Event()
        stage.store.put_version(version(2))
        await stage.until(in_state(stage, "a", EngineState.UPDATING))
        stage.store.put_version(version(3))
        engines["a"].gate.set()
        await stage.until(lambda: served(stage, 3))
        assert served(stage, 2)
        assert all("/root/run/v000002" in each.loads for each in engines.values())


async def test_a_bad_canary_goes_back_and_no_other_engine_ever_hears_of_the_version(tmp_path: Path) -> None:
    engines = three()
    async with on_the_first(tmp_path, engines, CANARY) as stage:
        engines["a"].fault = "a trial brought no tokens"
        stage.store.put_version(version(2))
        await stage.until(lambda: len(engines["a"].loads) == 3 and in_state(stage, "a", EngineState.IN_SYNC)())
        assert engines["a"].label == "1"
        assert stage.store.versions[version(2).id].barred
        assert "no tokens" in (stage.store.versions[version(2).id].reason or "")
        assert [each.loads for each in engines.values()].count(["/root/run/v000001"]) == 2
        engines["a"].fault = None
        stage.store.put_version(version(3))
        await stage.until(lambda: served(stage, 3))


async def test_a_canary_that_a_version_breaks_is_repaired_with_the_last_good_one(tmp_path: Path) -> None:
    engines = three()
    async with on_the_first(tmp_path, engines, CANARY) as stage:
        engines["a"].script = [BROKEN, GOOD, BROKEN]
        stage.store.put_version(version(2))
        await stage.until(lambda: stage.store.versions[version(2).id].barred)
        await stage.until(in_state(stage, "a", EngineState.IN_SYNC))
        assert {each.label for each in engines.values()} == {"1"}


async def test_one_engine_alone_is_its_own_canary_and_serves_nothing_unchecked(tmp_path: Path) -> None:
    engines = {"a": SimulatedEngine()}
    async with on_the_first(tmp_path, engines, CANARY) as stage:
        engines["a"].fault = "a trial brought no tokens"
        stage.store.put_version(version(2))
        await stage.until(lambda: stage.store.versions[version(2).id].barred)
        assert not served(stage, 2)


@pytest.mark.parametrize(("status", "good"), [(204, True), (422, False)])
async def test_the_operator_has_a_say_in_the_check_of_a_canary(status: int, good: bool) -> None:
    with serve(answer(status, "BLEU fell by half")) as server:
        fault = await OperatorCheck(server.url)(NEW, engine("a"), pytest.fail)
    assert (fault is None) is good
    assert good or "BLEU fell by half" in (fault or "")


async def test_the_password_and_token_of_an_operator_s_check_are_in_no_reason() -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    with serve(answer(500, b"later"), answer(422, b"no\n\x1b[2Jforged")) as server:
        secret = server.url.replace("http://", "http://user:hush@") + "/judge?token=hush"
        fault = await OperatorCheck(secret)(NEW, engine("a"), told.put_nowait) or ""
        assert server.seen[0].headers["authorization"].startswith("Basic ")
    for text in (fault, await told.get()):
        assert "hush" not in text
        assert f"{server.url}/judge" in text
        assert text.isprintable()


async def test_what_an_answer_repeats_of_a_check_s_secrets_is_left_out_before_the_answer_is_cut() -> None:
    for secret in ("hush", "h%75sh", "dXNlcjpodXNo"):
        with serve(answer(422, b"x" * 197 + secret.encode())) as server:
            url = server.url.replace("http://", "http://user:hush@") + "/?token=h%75sh"
            fault = await OperatorCheck(url)(NEW, engine("a"), lambda _: None) or ""
        assert fault.endswith("x***")
    with serve(answer(422, b"it fell by 12 %")) as server:
        fault = await OperatorCheck(f"{server.url}/?version=1&v=12")(NEW, engine("a"), lambda _: None) or ""
    assert "it fell by 12 %" in fault


async def test_a_check_that_does_not_answer_in_time_names_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "CANARY_SECONDS", 0.05)
    with serve(silence) as server:
        url = server.url.replace("http://", "http://user:hush@") + "/judge?token=hush"
        fault = await OperatorCheck(url)(NEW, engine("a"), lambda _: None) or ""
    assert f"{server.url}/judge said nothing within" in fault
    assert "hush" not in fault


async def test_of_an_operator_s_check_without_end_the_beginning_is_read() -> None:
    with answering(b"HTTP/1.1 422 No\r\nTransfer-Encoding: chunked\r\n\r\n", b"10\r\nit fell by 12 %.\r\n") as url:
        fault = await OperatorCheck(url)(NEW, engine("a"), lambda _: None) or ""
    assert "it fell by 12 %" in fault


async def test_an_operator_s_check_that_is_down_is_a_no_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "CANARY_SECONDS", 0.05)
    fault = await OperatorCheck("http://127.0.0.1:9/")(NEW, engine("a"), lambda _: None)
    assert "said nothing within" in (fault or "")


async def test_an_operator_s_check_that_answers_neither_yes_nor_no_is_told_of() -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    with serve(answer(500, b"out of memory")) as server:
        asking = asyncio.create_task(OperatorCheck(server.url)(NEW, engine("a"), told.put_nowait))
        assert "it answered 500: out of memory" in await told.get()
        asking.cancel()
        await asyncio.wait({asking})
