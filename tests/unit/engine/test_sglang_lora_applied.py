"""Adapters on SGLang: one that it lists is served only where its answers show that the server computes with it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from refitd.engine.port import Outcome, Reached, Refit, Target
from refitd.engine.sglang import SglangAdapters
from support.engines import sglang_adapters
from support.scripted_server import Step, answer, serve, silence
from support.scripted_sglang import ScriptedSglang

LOAD, UNLOAD, ANSWER = "/load_lora_adapter", "/unload_lora_adapter", "/generate"
ROOT_THERE = "/mnt/weights"


@dataclass
class LoraSglang(ScriptedSglang):
    """SGLang with adapters. `scores` says by name what log-probability each token of an answer has; `noise` is added to
    it, a larger one to each answer.
    """

    adapters: dict[str, str] = field(default_factory=dict)
    scores: dict[str | None, float] = field(default_factory=dict)
    noise: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)

    def _work(self, path: str) -> Step:
        match path:
            case "/v1/models":
                cards = [{"id": name, "root": folder, "parent": "/base"} for name, folder in self.adapters.items()]
                return answer(200, {"data": [{"id": "/base", "root": "/base", "parent": None}, *cards]})
            case "/load_lora_adapter":
                body = self.bodies(LOAD)[-1]
                self.adapters[body["lora_name"]] = body["lora_path"]
                return answer(200, {"success": True})
            case "/unload_lora_adapter":
                del self.adapters[self.bodies(UNLOAD)[-1]["lora_name"]]
                return answer(200, {"success": True})
            case "/generate":
                body = self.bodies(ANSWER)[-1]
                self.asked.append(body)
                name = body.get("lora_path")
                score = self.scores.get(name, -float(len(name or "")) - 1.0) - self.noise * len(self.asked)
                return answer(200, {"meta_info": {"output_token_logprobs": [[score, 7, None]] * 8}})
            case _:
                return super()._work(path)


@asynccontextmanager
async def serving(root: Path | None = None, **state: Any) -> AsyncIterator[tuple[LoraSglang, SglangAdapters]]:
    with serve() as server:
        sglang = LoraSglang(server, **state)
        server.steps.append(sglang.step)
        engine = sglang_adapters(sglang.url, name="actor", keep=2, root=root, root_there=ROOT_THERE)
        yield sglang, engine
        await engine.aclose()


def write(root: Path, label: str, *, b: float = 1.0, a: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Target:
    """An adapter of one pair beneath the root, as the engine sees it."""
    folder = root / "run" / f"v{label}"
    folder.mkdir(parents=True)
    pair = {"A": torch.full((2, 4), a), "B": torch.full((4, 2), b)}
    tensors = {f"base_model.model.q_proj.lora_{half}.weight": tensor.to(dtype) for half, tensor in pair.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return Target(path=f"{ROOT_THERE}/run/v{label}", label=label)


async def refit(engine: SglangAdapters, target: Target) -> Refit:
    done = await engine.refit(target, lambda _: None)
    if engine._unloading is not None:  # pyright: ignore[reportPrivateUsage]
        await engine._unloading  # pyright: ignore[reportPrivateUsage]
    return done


async def test_an_adapter_that_changes_the_answers_is_served(tmp_path: Path) -> None:
    async with serving(tmp_path) as (sglang, engine):
        done = await refit(engine, write(tmp_path, "10"))
        after = await refit(engine, write(tmp_path, "110"))
    assert (done.outcome, after.outcome) == (Outcome.ACK, Outcome.ACK)
    assert set(sglang.adapters) == {"actor-v10", "actor-v110"}
    keys = [body["extra_key"] for body in sglang.asked]
    assert len(set(keys)) == len(keys), "an answer may come from prefixes that another has left"


async def test_an_adapter_that_the_server_does_not_compute_with_is_unloaded_and_never_served(tmp_path: Path) -> None:
    async with serving(tmp_path, scores={None: -1.0, "actor-v7": -1.0}) as (sglang, engine):
        done = await refit(engine, write(tmp_path, "7"))
        seen = await engine.probe()
    assert (done.outcome, done.resumed) == (Outcome.NACK, True)
    assert "answered exactly as by the model without it, and its B matrices are not zero" in (done.reason or "")
    assert sglang.adapters == {}
    assert isinstance(seen, Reached)
    assert seen.weight_version is None


async def test_answers_of_the_adapter_before_under_the_new_name_are_not_served(tmp_path: Path) -> None:
    async with serving(tmp_path, scores={None: -1.0, "actor-v6": -3.0, "actor-v7": -3.0}) as (sglang, engine):
        await refit(engine, write(tmp_path, "6", b=2.0))
        done = await refit(engine, write(tmp_path, "7", b=3.0))
    assert done.outcome is Outcome.NACK
    assert "answered exactly as by actor-v6, and the two differ" in (done.reason or "")
    assert set(sglang.adapters) == {"actor-v6"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
async def test_an_adapter_before_its_first_step_answers_as_the_model_and_is_served(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    async with serving(tmp_path, scores={None: -1.0, "actor-v1": -1.0}) as (_, engine):
        done = await refit(engine, write(tmp_path, "1", b=-0.0, dtype=dtype))
    assert (done.outcome, done.reason) == (Outcome.ACK, None)


async def test_a_step_that_changed_nothing_is_served(tmp_path: Path) -> None:
    async with serving(tmp_path, scores={None: -1.0, "actor-v6": -3.0, "actor-v7": -3.0}) as (_, engine):
        await refit(engine, write(tmp_path, "6"))
        done = await refit(engine, write(tmp_path, "7"))
    assert (done.outcome, done.reason) == (Outcome.ACK, None)


async def test_another_scale_alone_is_another_adapter(tmp_path: Path) -> None:
    async with serving(tmp_path, scores={None: -1.0, "actor-v6": -3.0, "actor-v7": -3.0}) as (_, engine):
        await refit(engine, write(tmp_path, "6"))
        target = write(tmp_path, "7")
        (tmp_path / "run/v7/adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 8}))
        done = await refit(engine, target)
    assert done.outcome is Outcome.NACK


async def test_equal_answers_whose_files_cannot_be_read_are_not_believed(tmp_path: Path) -> None:
    async with serving(tmp_path, scores={None: -1.0, "actor-v7": -1.0}) as (sglang, engine):
        done = await refit(engine, Target(path=f"{ROOT_THERE}/run/v7", label="7"))
    assert done.outcome is Outcome.NACK
    assert "cannot be read" in (done.reason or "")
    assert sglang.adapters == {}


async def test_answers_that_differ_with_each_batch_are_asked_for_again(tmp_path: Path) -> None:
    async with serving(tmp_path, noise=1e-6) as (sglang, engine):
        done = await refit(engine, write(tmp_path, "7"))
    assert done.outcome is Outcome.ACK
    assert len(sglang.asked) > 3, "a difference that noise can make was believed at once"


async def test_a_server_that_does_not_answer_to_the_adapter_does_not_serve_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as (sglang, engine):
        sglang.on(ANSWER, answer(200, {"meta_info": {}}))
        done = await refit(engine, write(tmp_path, "7"))
    assert done.outcome is Outcome.NACK
    assert sglang.adapters == {}


async def test_a_server_that_is_too_busy_to_answer_is_believed_by_its_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refitd.engine.sglang.TRIAL_SECONDS", 0.1)
    async with serving(tmp_path) as (sglang, engine):
        sglang.on(ANSWER, silence)
        done = await refit(engine, write(tmp_path, "7"))
    assert (done.outcome, done.reason) == (Outcome.ACK, None)


def _told(**changes: Any) -> Step:
    return answer(200, {"version": "0.5.23", "model_path": "/base", **changes})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dp_size": 2}, "--dp-size"),
        ({"attn_dp_size": 2}, "--attn-dp-size"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
    ],
)
async def test_servers_that_load_adapters_in_a_part_only_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    async with serving(tmp_path) as (sglang, engine):
        sglang.on("/server_info", _told(**changes))
        done = await refit(engine, write(tmp_path, "7"))
        seen = await engine.probe()
    assert done.outcome is Outcome.NACK
    assert why in (done.reason or "")
    assert LOAD not in sglang.calls
    assert isinstance(seen, Reached)
    assert [each.blocks for each in seen.obstacles] == [True]
