"""The engine's state machine: pauses, locks, loads, and which weights each token came from."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from refitd_embedded.engine import DuplicateRequestError, EmbeddedEngine
from refitd_embedded.runner import ForwardResult, GenerationRequest, SamplingParams, VersionSpan
from refitd_embedded.scheduler import Limits
from refitd_embedded.weights import (
    CarefulLoader,
    EngineDiedError,
    UpdateOrder,
    WeightsLoaded,
    WeightsTainted,
    Write,
    load,
)
from support.embedded_kit import PROMPT, answer, ask, checkpoint, open_engine, until_tokens

LONG = 300


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one shape with different answers, `a` and `b`."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("a", "b")):
        checkpoint(root / name, seed)
    return root


@pytest.fixture
async def engine(models: Path) -> AsyncIterator[EmbeddedEngine]:
    """An engine on `a`."""
    async with open_engine(models / "a") as running:
        yield running


def greedy(directory: Path, prompt: list[int], tokens: int) -> list[int]:
    """The answer by brute force: no cache, no batch."""
    decoder, ids = load(directory), list(prompt)
    with torch.inference_mode():
        for _ in range(tokens):
            ids.append(int(decoder(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def update(models: Path, name: str, *, flush_cache: bool = True) -> UpdateOrder:
    """Load `name` and label it so."""
    return UpdateOrder(model_path=str(models / name), weight_version=name, flush_cache=flush_cache)


@asynccontextmanager
async def generating(
    engine: EmbeddedEngine, request: GenerationRequest
) -> AsyncIterator[asyncio.Task[GenerationRequest]]:
    """`request` on its way, with some tokens."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(answer(engine, request))
        await until_tokens(engine, request, 5)
        yield task


class Gated(CarefulLoader):
    """Writes when it is let."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        super().__init__(engine.decoder)
        self.reached, self.let = asyncio.Event(), threading.Event()
        self._loop = asyncio.get_running_loop()

    def open(self, directory: Path) -> Write:
        write = super().open(directory)

        def gated() -> WeightsLoaded | WeightsTainted:
            self._loop.call_soon_threadsafe(self.reached.set)
            self.let.wait(10)
            return write()

        return gated


async def test_a_batch_is_answered_as_each_prompt_alone(engine: EmbeddedEngine, models: Path) -> None:
    requests = [ask(str(length), prompt=list(range(1, length + 1)), tokens=3 * length) for length in (1, 4, 9, 2, 30)]
    await asyncio.gather(*(answer(engine, request) for request in requests))
    for request in requests:
        assert request.output == greedy(models / "a", request.prompt, len(request.prompt) * 3)
        assert request.finish == {"type": "length", "length": len(request.prompt) * 3}


async def test_more_requests_than_fit_wait_for_their_turn(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    async with open_engine(models / "a", limits=Limits(running=3, prefill=8)) as engine:
        prefill = engine.scheduler._runner.prefill

        def counting(running: list[GenerationRequest], new: list[GenerationRequest]) -> ForwardResult:
            batches.append(len(new))
            assert len(running) + len(new) <= 3
            return prefill(running, new)

        monkeypatch.setattr(engine.scheduler._runner, "prefill", counting)
        requests = [ask(str(number), prompt=[number + 1] * 4, tokens=6) for number in range(5)]
        await asyncio.gather(*(answer(engine, request) for request in requests))
    assert batches[:2] == [2, 1], "8 tokens at a time, 3 requests at most"
    assert [request.output for request in requests] == [greedy(models / "a", one.prompt, 6) for one in requests]


async def test_a_retracted_answer_keeps_its_tokens_and_goes_on_under_the_new_weights(
    engine: EmbeddedEngine, models: Path
) -> None:
    request = ask(tokens=60)
    async with generating(engine, request):
        await engine.pause("retract")
        assert (await engine.update(update(models, "b"))).success
        kept = list(request.output)
        await engine.resume()
    assert kept == greedy(models / "a", PROMPT, len(kept))
    assert request.output[len(kept) :] == greedy(models / "b", PROMPT + kept, 60 - len(kept))
    assert request.spans == [VersionSpan("default", 0, len(kept)), VersionSpan("b", len(kept), 60)]
    assert request.retractions == 1


async def test_an_answer_paused_in_place_keeps_the_old_keys_and_values(engine: EmbeddedEngine, models: Path) -> None:
    request = ask(tokens=60)
    async with generating(engine, request):
        await engine.pause("in_place")
        assert (await engine.update(update(models, "b", flush_cache=False))).success
        kept = list(request.output)
        await engine.resume()
    assert request.output[: len(kept)] == kept == greedy(models / "a", PROMPT, len(kept))
    assert request.output[len(kept) :] != greedy(models / "b", PROMPT + kept, 60 - len(kept))
    assert request.retractions == 0
    assert [span.version for span in request.spans] == ["default", "b"]


async def test_a_refused_flush_leaves_new_weights_under_the_old_label(engine: EmbeddedEngine, models: Path) -> None:
    request = ask(tokens=60)
    async with generating(engine, request):
        await engine.pause("in_place")
        outcome = await engine.update(update(models, "b"))
        assert not outcome.success
        assert outcome.message.startswith("Weights were updated, but the cache was not flushed")
        assert (engine.labels.model_path, engine.labels.weight_version) == (str(models / "a"), "default")
        await engine.resume()
    assert request.spans[-1].version == "b", "answers know better than /model_info"
    assert (await answer(engine, ask())).output == greedy(models / "b", PROMPT, 20)


async def test_a_flush_is_refused_while_requests_run_and_done_once_they_are_retracted(engine: EmbeddedEngine) -> None:
    async with generating(engine, ask(tokens=LONG)) as task:
        assert not await engine.flush()
        await engine.pause("retract")
        assert await engine.flush()
        engine.abort("", every=True)
        await task
    assert await engine.flush()


async def test_an_update_waits_for_requests_in_flight_and_holds_back_new_ones(
    engine: EmbeddedEngine, models: Path
) -> None:
    first, second = ask("first", tokens=100), ask("second")
    async with generating(engine, first), asyncio.TaskGroup() as group:
        loading = group.create_task(engine.update(update(models, "b")))
        await asyncio.sleep(0)
        group.create_task(answer(engine, second))
        await until_tokens(engine, first, len(first.output) + 5)
        assert not loading.done()
        assert not second.output
    assert [span.version for span in first.spans] == ["default"]
    assert first.output == greedy(models / "a", PROMPT, 100)
    assert second.output == greedy(models / "b", PROMPT, 20)


async def test_an_update_while_paused_waits_for_nobody(engine: EmbeddedEngine, models: Path) -> None:
    async with generating(engine, ask(tokens=LONG)) as task:
        await engine.pause("retract")
        assert (await engine.update(update(models, "b"))).success
        assert not task.done()
        engine.abort("r")


async def test_an_update_can_end_all_requests_first(engine: EmbeddedEngine, models: Path) -> None:
    async with generating(engine, ask(tokens=LONG)) as task:
        order = UpdateOrder(model_path=str(models / "b"), abort_all_requests=True)
        assert (await engine.update(order)).success
        assert ((await task).finish or {})["type"] == "abort"
    assert engine.labels.weight_version == "default"


async def test_an_update_that_is_given_up_lets_new_requests_in(engine: EmbeddedEngine, models: Path) -> None:
    async with generating(engine, ask(tokens=LONG)) as task, asyncio.TaskGroup() as group:
        loading = group.create_task(engine.update(update(models, "b")))
        await asyncio.sleep(0)
        second = group.create_task(answer(engine, ask("second")))
        await asyncio.sleep(0)
        loading.cancel()
        assert (await second).output == greedy(models / "a", PROMPT, 20)
        assert not task.done(), "the first one had not to end for it"
        engine.abort("r")


async def test_a_load_given_up_before_the_first_write_changes_nothing(models: Path) -> None:
    async with open_engine(models / "a", load_delay=3600.0) as engine:
        before = await engine.checksums()
        loading = asyncio.create_task(engine.update(update(models, "b")))
        await asyncio.sleep(0)
        settled = asyncio.create_task(engine.settled())
        await asyncio.sleep(0)
        assert not settled.done(), "/server_info waits for a load"
        loading.cancel()
        await settled
        assert await engine.checksums() == before
        assert (await answer(engine, ask())).output == greedy(models / "a", PROMPT, 20)
        assert engine.labels.weight_version == "default"


async def test_a_write_that_began_is_finished_for_a_caller_that_left(engine: EmbeddedEngine, models: Path) -> None:
    engine.reloader.loader = gate = Gated(engine)
    loading = asyncio.create_task(engine.update(update(models, "b")))
    await gate.reached.wait()
    loading.cancel()
    await asyncio.wait((loading,))
    gate.let.set()
    await engine.settled()
    assert (engine.labels.model_path, engine.labels.weight_version) == (str(models / "b"), "b")
    assert (await answer(engine, ask())).output == greedy(models / "b", PROMPT, 20)


async def test_no_token_is_computed_while_weights_are_being_written(engine: EmbeddedEngine, models: Path) -> None:
    """Even if someone resumes in the middle, and new requests come in."""
    engine.reloader.loader = gate = Gated(engine)
    old, new = ask("old", tokens=60), ask("new")
    async with generating(engine, old), asyncio.TaskGroup() as group:
        await engine.pause("retract")
        loading = group.create_task(engine.update(update(models, "b")))
        await gate.reached.wait()
        await engine.resume()
        group.create_task(answer(engine, new))
        before = engine.scheduler.tokens_out
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.scheduler.stepped.until(lambda: engine.scheduler.tokens_out > before)
        assert not loading.done()
        gate.let.set()
    kept = old.output[: old.spans[0].end]
    assert kept == greedy(models / "a", PROMPT, len(kept))
    assert old.output[len(kept) :] == greedy(models / "b", PROMPT + kept, 60 - len(kept))
    assert new.output == greedy(models / "b", PROMPT, 20)


async def test_pausing_with_abort_ends_all_requests_and_holds_back_new_ones(engine: EmbeddedEngine) -> None:
    async with generating(engine, ask(tokens=LONG)) as task, asyncio.TaskGroup() as group:
        await engine.pause("abort")
        assert task.done(), "the pause returns when callers have been told"
        second = group.create_task(answer(engine, held := ask("second")))
        for _ in range(5):
            await engine.settled()
        assert not held.output
        await engine.resume()
    assert len((await second).output) == 20
    assert ((await task).finish or {})["message"] == "Aborted"


async def test_running_and_waiting_requests_are_aborted_in_different_words(engine: EmbeddedEngine) -> None:
    async with generating(engine, ask(tokens=LONG)) as task:
        await engine.pause("retract")
        await engine.settled()
        engine.abort("r")
        waiting = await task
    assert waiting.finish == {"type": "abort", "message": "Abort in waiting queue"}
    assert len(waiting.output) >= 5


async def test_a_request_at_the_gate_is_not_aborted(engine: EmbeddedEngine) -> None:
    """As on the real server, whose scheduler does not know of it yet."""
    await engine.pause("retract")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(answer(engine, ask()))
        await engine.settled()
        engine.abort("r")
        engine.abort("", every=True)
        await engine.resume()
    assert (await task).finish == {"type": "length", "length": 20}
    assert await engine.flush()


async def test_a_pause_also_holds_back_who_was_waiting_for_an_update(models: Path) -> None:
    async with open_engine(models / "a") as engine, asyncio.TaskGroup() as group:
        engine.reloader.loader = gate = Gated(engine)
        loading = group.create_task(engine.update(update(models, "b")))
        await gate.reached.wait()
        behind = ask("behind", tokens=LONG)
        task = group.create_task(answer(engine, behind))
        await asyncio.sleep(0)
        pausing = group.create_task(engine.pause("abort"))
        await asyncio.sleep(0)
        gate.let.set()
        await asyncio.wait((loading, pausing))
        for _ in range(5):
            await engine.settled()
        assert not behind.output
        assert not task.done()
        await engine.resume()
    assert behind.output == greedy(models / "b", PROMPT, LONG)


async def test_two_requests_cannot_share_an_id(engine: EmbeddedEngine) -> None:
    async with generating(engine, ask(tokens=LONG)):
        with pytest.raises(DuplicateRequestError, match="Duplicate request ID detected: r"):
            await answer(engine, ask())
        engine.abort("r")
    with pytest.raises(DuplicateRequestError, match="within the request"):
        async with engine.admitted([ask("x"), ask("x")]):
            pass
    await answer(engine, ask())


async def test_a_token_that_comes_too_late_is_not_added(engine: EmbeddedEngine) -> None:
    """The abort finds a step in flight; what it computes belongs to nobody."""
    async with generating(engine, ask(tokens=LONG)) as task:
        engine.abort("r")
        await engine.settled()
        request = await task
    assert len(request.output) == len(request.output_logprobs) == request.spans[-1].end


async def test_who_joins_a_batch_is_drawn_with_its_own_parameters(engine: EmbeddedEngine) -> None:
    drawn = SamplingParams.parse({"max_new_tokens": 20, "temperature": 5.0, "sampling_seed": 1})
    alone, joining = (GenerationRequest(rid=rid, prompt=[8, 9], params=drawn) for rid in ("alone", "joining"))
    await answer(engine, alone)
    async with generating(engine, ask(tokens=60)):
        await answer(engine, joining)
    assert joining.output == alone.output


async def test_leaving_early_aborts(engine: EmbeddedEngine) -> None:
    request = ask(tokens=LONG, stream=True)
    async with engine.admitted([request]) as progress:
        async for seen in progress:
            assert seen is request
            break
    assert (request.finish or {})["type"] == "abort"
    assert await engine.flush()


async def test_stop_tokens_end_an_answer_and_stay_in_it(models: Path, engine: EmbeddedEngine) -> None:
    whole = greedy(models / "a", PROMPT, 20)
    stop = next(token for token in whole if whole.index(token) > 3)
    raw = {"temperature": 0, "max_new_tokens": 20, "stop_token_ids": [stop]}
    stopped = GenerationRequest(rid="s", prompt=PROMPT, params=SamplingParams.parse(raw))
    assert (await answer(engine, stopped)).output == whole[: whole.index(stop) + 1]
    assert stopped.finish == {"type": "stop", "matched": stop}
    ignoring = GenerationRequest(rid="i", prompt=PROMPT, params=SamplingParams.parse(raw | {"ignore_eos": True}))
    assert (await answer(engine, ignoring)).output == whole


async def test_the_label_alone_can_be_changed(engine: EmbeddedEngine) -> None:
    request = ask(tokens=60)
    async with generating(engine, request):
        await engine.relabel("7", abort_all=False)
    assert [span.version for span in request.spans] == ["default", "7"]
    assert engine.labels.weight_version == "7"


@pytest.mark.parametrize("defects", [False, True])
async def test_an_unknown_load_format_is_refused_or_deadly(models: Path, defects: bool) -> None:
    order = UpdateOrder(model_path=str(models / "b"), load_format="bogus")
    last_words: list[str] = []
    async with open_engine(models / "a", defects=defects) as engine:
        engine.on_death = last_words.append
        if defects:
            with pytest.raises(EngineDiedError, match="bogus"):
                await engine.update(order)
            with pytest.raises(EngineDiedError):
                await answer(engine, ask())
        else:
            assert "bogus" in (await engine.update(order)).message
            assert (await answer(engine, ask())).output == greedy(models / "a", PROMPT, 20)
    assert bool(last_words) == defects


async def test_a_format_that_is_not_loaded_here_is_refused(engine: EmbeddedEngine, models: Path) -> None:
    outcome = await engine.update(UpdateOrder(model_path=str(models / "b"), load_format="gguf"))
    assert (outcome.success, outcome.message[:27]) == (False, "Failed to get model loader:")


async def test_a_restarted_engine_is_back_on_its_first_weights(models: Path) -> None:
    first = open_engine(models / "a")
    async with first:
        await first.update(update(models, "b"))
    async with first.replica(1, load(models / "a")) as second:
        assert second.labels.model_path == str(models / "a")
        assert (await answer(second, ask())).output == greedy(models / "a", PROMPT, 20)
        assert first.labels.weight_version == "b"


@pytest.mark.parametrize("seed", range(6))
async def test_every_token_comes_from_the_weights_that_its_span_names(models: Path, seed: int) -> None:
    """Requests, retracting pauses, updates and aborts in random order: no answer ever mixes weights within a span."""
    dice, requests = random.Random(seed), list[GenerationRequest]()
    async with open_engine(models / "a") as engine, asyncio.TaskGroup() as group:
        await engine.relabel("a", abort_all=False)
        for number in range(25):
            match dice.choice(("ask", "ask", "pause", "update", "resume", "abort", "flush", "step", "step")):
                case "ask":
                    prompt = [dice.randrange(1, 97) for _ in range(dice.randrange(1, 9))]
                    requests.append(ask(str(number), prompt=prompt, tokens=dice.randrange(0, 40)))
                    group.create_task(answer(engine, requests[-1]))
                case "pause":
                    await engine.pause("retract")
                case "update":
                    await engine.pause("retract")
                    assert (await engine.update(update(models, dice.choice("ab")))).success
                case "resume":
                    await engine.resume()
                case "abort" if requests:
                    engine.abort(dice.choice(requests).rid)
                case "flush":
                    await engine.flush()
                case _:
                    await engine.settled()
            await asyncio.sleep(0)
        await engine.resume()
    for request in requests:
        for span in request.spans:
            prompt = request.prompt + request.output[: span.start]
            assert request.output[span.start : span.end] == greedy(models / span.version, prompt, span.end - span.start)
