"""The engine's state machine: pauses, locks, loads, and which weights each token came from."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
import torch

from refitd_embedded.engine import EmbeddedEngine
from refitd_embedded.runner import GenerationRequest, VersionSpan
from refitd_embedded.weights import CarefulLoader, Write, load
from refitd_embedded.wire import UpdateFromDiskBody
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


def update(models: Path, name: str, *, flush_cache: bool = True) -> UpdateFromDiskBody:
    """Load `name` and label it so."""
    return UpdateFromDiskBody(model_path=str(models / name), weight_version=name, flush_cache=flush_cache)


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

        def gated() -> str | None:
            self._loop.call_soon_threadsafe(self.reached.set)
            self.let.wait(10)
            return write()

        return gated


@pytest.mark.parametrize(("mode", "retractions"), [("retract", 1), ("in_place", 0)])
async def test_a_paused_answer_keeps_its_tokens_and_goes_on_under_the_new_weights(
    engine: EmbeddedEngine, models: Path, mode: Literal["retract", "in_place"], retractions: int
) -> None:
    request = ask(tokens=60)
    async with generating(engine, request):
        await engine.pause(mode)
        assert (await engine.update(update(models, "b", flush_cache=mode == "retract"))).success
        kept = list(request.output)
        await engine.resume()
    assert kept == greedy(models / "a", PROMPT, len(kept))
    assert request.output[len(kept) :] == greedy(models / "b", PROMPT + kept, 60 - len(kept))
    assert request.spans == [VersionSpan("default", 0, len(kept)), VersionSpan("b", len(kept), 60)]
    assert request.retractions == retractions


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
