"""What the reconciler relies on, held against every engine: the port's promises over real HTTP, with real weights."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path

import httpx
import pytest

from refitd.engine.http import NoReply
from refitd.engine.port import EnginePort, Outcome, Process, Reached, Refit, Stage
from refitd.engine.sglang.dialect import SglangDialect
from refitd.engine.transaction import ServerEngine
from refitd_client.rollout import spans
from support.engines import sglang_engine
from support.servers import ADMIN_KEY, API_KEY, EmbeddedServer, EngineServer
from support.subject import Streamed, Subject, ignore_stage

pytestmark = pytest.mark.timeout(400)

TOKENS = 400
REQUESTS = 4


async def test_what_a_server_tells_of_its_process_stays_the_same_whoever_loads_it_and_not_when_it_restarts(
    subject: Subject,
) -> None:
    async def told() -> Process:
        engine = subject.adapter()  # one that has asked nothing yet, as the service's own after a change
        try:
            seen = await engine.probe()
        finally:
            await engine.aclose()
        assert isinstance(seen, Reached)
        assert seen.address == f"localhost:{subject.server.port}"
        return seen.process

    first = await told()
    assert (first.seed is not None) is subject.habits.seeded
    assert first.started is not None
    await subject.refit("model_b", "3")
    assert await told() == first
    if subject.habits.starts_at_once:
        subject.server.restart()
        assert first.is_as(await told()) is False


async def test_from_a_to_b_and_back_gives_the_same_answers_and_fingerprint_as_before(subject: Subject) -> None:
    first = await subject.refit("model_a", "1", repairs=True)
    answer = await subject.answer()
    other = await subject.refit("model_b", "2", not_fingerprint=first.fingerprint)
    assert (other.outcome, other.resumed, other.reason) == (Outcome.ACK, True, None)
    assert other.fingerprint is not None
    assert not subject.agree(other.fingerprint, first.fingerprint)
    assert await subject.answer() != answer
    back = await subject.refit("model_a", "3", fingerprint=first.fingerprint, not_fingerprint=other.fingerprint)
    assert (back.outcome, back.resumed) == (Outcome.ACK, True)
    assert subject.agree(back.fingerprint, first.fingerprint)
    assert subject.agree(await subject.engine.fingerprint(first.fingerprint), first.fingerprint)
    assert await subject.answer() == answer


async def test_a_trial_of_a_bad_canary_tells_what_is_wrong(subject: Subject) -> None:
    """The files of a version can be in order and its numbers nonsense: this is what the canary is for."""
    refit = await subject.refit("bad_nan", "9")
    # Where the update itself ends with a trial, this is what it says; elsewhere the canary's comes next.
    fault = refit.reason if refit.outcome is Outcome.TAINTED else await subject.engine.trial("9")
    await subject.refit("model_a", "10", repairs=True)
    assert fault is not None
    assert "trial" in fault


async def test_an_engine_with_unknown_contents_is_not_resumed_by_a_repair_that_it_refuses(subject: Subject) -> None:
    await subject.refit("model_a", "1", repairs=True)
    tainted = await subject.refit("model_b", "2", fingerprint=subject.habits.other_fingerprint)
    assert tainted.outcome is Outcome.TAINTED
    refused = await subject.refit("nowhere", "3", repairs=True)
    assert (refused.outcome, refused.resumed) == (Outcome.TAINTED, False)
    assert subject.habits.unopened in (refused.reason or "")
    with pytest.raises(httpx.TimeoutException):
        await subject.answer(within=1.0)
    assert (await subject.refit("model_a", "3", repairs=True)).outcome is Outcome.ACK
    assert await subject.answer()


async def test_requests_in_flight_are_all_answered_in_full_when_weights_change_under_them(subject: Subject) -> None:
    await subject.refit("model_a", "1")
    engine = subject.adapter()
    async with asyncio.TaskGroup() as group:
        begun = [asyncio.Event() for _ in range(REQUESTS)]
        answers = [group.create_task(subject.stream(TOKENS, event)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        refit = await engine.refit(subject.target("model_b", "2"), ignore_stage)
        assert refit.outcome is Outcome.ACK, refit.reason
        assert not any(answer.done() for answer in answers)
    await engine.aclose()
    label = "2" if subject.habits.labels_answers else None
    assert [answer.result() for answer in answers] == [Streamed(TOKENS, "length", label)] * REQUESTS


async def test_requests_that_something_else_pauses_in_place_before_the_load_are_answered_in_full_by_an_empty_cache(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang has written the version then, and refuses to flush. The repair retracts what runs."""
    if not (isinstance(subject.engine, ServerEngine) and isinstance(subject.engine.dialect, SglangDialect)):
        pytest.skip("its cache is emptied while requests run")
    await subject.refit("model_a", "1")
    modes: list[str] = []

    async def pause(dialect: SglangDialect, mode: str, *, drains: bool) -> NoReply | str | None:
        modes.append(mode)
        return await as_usual(dialect, mode, drains=drains)

    as_usual = SglangDialect._pause  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(SglangDialect, "_pause", pause)

    def paused_in_place(stage: Stage) -> None:
        if stage is Stage.LOAD and modes == ["retract"]:  # before the first of two
            with httpx.Client(base_url=subject.server.url) as http:
                admin, user = ({"Authorization": f"Bearer {key}"} for key in (ADMIN_KEY, API_KEY))
                http.post("/continue_generation", json={}, headers=admin).raise_for_status()
                short = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
                http.post("/generate", json=short, headers=user).raise_for_status()  # after it those before it run
                http.post("/pause_generation", json={"mode": "in_place"}, headers=admin).raise_for_status()

    async with asyncio.TaskGroup() as group:
        begun = [asyncio.Event() for _ in range(REQUESTS)]
        answers = [group.create_task(subject.stream(TOKENS, event)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        refit = await subject.engine.refit(subject.target("model_b", "2"), paused_in_place)
        assert (refit.outcome, refit.resumed) == (Outcome.TAINTED, False), refit.reason
        repair = await subject.refit("model_b", "2", repairs=True)
        assert repair.outcome is Outcome.ACK, repair.reason
    assert modes == ["retract", "retract"]
    label = "2" if subject.habits.labels_answers else None
    assert [answer.result() for answer in answers] == [Streamed(TOKENS, "length", label)] * REQUESTS


async def test_an_answer_says_which_of_its_tokens_which_version_generated(subject: Subject) -> None:
    if not subject.habits.labels_answers:
        pytest.skip("its routes for completions do not say it, and the one that does is off by default")
    await subject.refit("model_a", "1", repairs=True)
    begun = asyncio.Event()
    asked = asyncio.create_task(subject.last_event(TOKENS, begun))
    await begun.wait()
    assert (await subject.refit("model_b", "2")).outcome is Outcome.ACK
    before, after = spans(await asked, run="run")
    assert (before.version, after.version) == ("run~v000001", "run~v000002")
    assert (before.start, before.end, after.end) == (0, after.start, TOKENS)


async def test_an_engine_that_its_trainer_holds_paused_is_updated_and_the_trainer_resumes_it_last(
    subject: Subject,
) -> None:
    """As verl does: it ends all requests and pauses the engine, has refitd update it, and then resumes it itself."""
    pause, resume = (
        ("/pause?mode=abort", "/resume") if "vllm" in subject.kind else ("/pause_generation", "/continue_generation")
    )
    await subject.refit("model_a", "1")
    before = await subject.answer()
    async with subject.http() as http:
        http.headers["Authorization"] = f"Bearer {ADMIN_KEY}"
        (await http.post(pause, json={})).raise_for_status()
        refit = await subject.refit("model_b", "2")
        (await http.post(resume, json={})).raise_for_status()
    assert (refit.outcome, refit.resumed) == (Outcome.ACK, True)
    assert await subject.answer() != before


def _needs_keys(subject: Subject) -> None:
    if not subject.habits.asks_for_keys:
        pytest.skip("its routes for weights are open to everybody who reaches them")


@pytest.mark.parametrize("admin_key", [None, "wrong"])
async def test_without_the_admin_key_nothing_changes_and_the_setting_is_named(
    subject: Subject, admin_key: str | None
) -> None:
    _needs_keys(subject)
    await subject.refit("model_a", "1")
    async with aclosing(sglang_engine(subject.server.url, api_key=API_KEY, admin_key=admin_key)) as engine:
        refit = await engine.refit(subject.target("model_b", "2"), ignore_stage)
    assert (refit.outcome, refit.resumed) == (Outcome.NACK, False)  # it could not be told to resume either
    assert "--engine-admin-key-file" in (refit.reason or "")
    assert (await subject.named())[1] == "1"
    assert await subject.answer()


async def test_what_is_served_can_be_asked_while_a_load_is_under_way(subject: Subject, tmp_path: Path) -> None:
    if not subject.habits.told_while_it_loads:
        pytest.skip("the process that loads is the one that says what it serves")
    await subject.refit("model_a", "1")
    with _long_load(subject, tmp_path) as (server, begin, end):
        engine, other = (Subject(subject.kind, server, subject.models, subject.root).engine for _ in range(2))
        before = await other.probe()
        assert isinstance(before, Reached)
        begun = asyncio.Event()

        def on_stage(stage: Stage) -> None:
            if stage is Stage.LOAD:
                begin()
                begun.set()

        loading = asyncio.create_task(engine.refit(subject.target("model_b", "2"), on_stage))
        await begun.wait()
        assert not (await asyncio.wait({loading}, timeout=0.5))[0]
        assert await other.probe() == before
        assert not loading.done()
        end()
        assert (await loading).outcome is Outcome.ACK
        await engine.aclose()
        await other.aclose()


@contextmanager
def _long_load(
    subject: Subject, folder: Path
) -> Generator[tuple[EngineServer, Callable[[], None], Callable[[], None]]]:
    """A server, and what makes a load long and ends it. The embedded engine is one process: it loads slowly instead."""
    if not isinstance(subject.server, EmbeddedServer):
        scheduler = subject.server.scheduler
        try:
            yield subject.server, scheduler.suspend, scheduler.resume
        finally:
            scheduler.resume()
    else:
        with EmbeddedServer(folder, subject.models / "model_a", "--load-delay", "3") as server:
            yield server, lambda: None, lambda: None


async def test_a_load_that_outlasts_the_time_out_taints_and_the_next_refit_waits_for_its_end(subject: Subject) -> None:
    await subject.refit("model_a", "1", repairs=True)
    async with aclosing(subject.adapter(load_timeout=3.0)) as hurried:
        await hurried.probe()
        with _frozen_at_load(subject) as on_stage:
            late = await hurried.refit(subject.target("model_b", "2"), on_stage)
            assert (late.outcome, late.resumed) == (Outcome.TAINTED, False)
            assert "did not answer within 3 s" in (late.reason or "")
            beside = await hurried.refit(subject.target("model_a", "3", repairs=True), ignore_stage)
            assert (beside.outcome, beside.resumed) == (Outcome.UNREACHABLE, False)
            assert "may still be running" in (beside.reason or "")
        with pytest.raises(httpx.TimeoutException):  # the load has ended, well or not: it stays paused
            await subject.answer(within=1.0)
        repaired = await _until_heard(hurried, subject)
    assert (repaired.outcome, repaired.resumed) == (Outcome.ACK, True), repaired.reason
    assert (await subject.named())[1] == "3"
    assert await subject.answer()


@contextmanager
def _frozen_at_load(subject: Subject) -> Generator[Callable[[Stage], None]]:
    """A callback that freezes the weights' process when the load begins; it thaws at the end."""
    with ExitStack() as frozen:

        def on_stage(stage: Stage) -> None:
            if stage is Stage.LOAD:
                frozen.enter_context(subject.server.frozen())

        yield on_stage


async def _until_heard(engine: EnginePort, subject: Subject) -> Refit:
    """Refit as the reconciler does: again while the engine does not answer in time, which a busy machine may cause."""
    while (refit := await engine.refit(subject.target("model_a", "3", repairs=True), ignore_stage)).outcome is (
        Outcome.UNREACHABLE
    ):
        pass
    return refit
