"""Adapters on vLLM: one that it lists is served only where its answers show that the server computes with it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from refitd.engine.port import Outcome, Refit, Target
from refitd.engine.vllm import VllmAdapters
from support.engines import vllm_adapters
from support.scripted_vllm import ScriptedVllm, config, scripted_vllm

ROOT_THERE = "/mnt/weights"
TARGET = Target(path=f"{ROOT_THERE}/run/v7", label="7")


@asynccontextmanager
async def deaf(root: Path) -> AsyncIterator[tuple[ScriptedVllm, VllmAdapters]]:
    """A server that lists adapters, and answers as the model alone."""
    told = config()
    told["vllm_config"]["lora_config"] = {"max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 4}
    with scripted_vllm(told=told, ignores_adapters=True) as vllm:
        engine = vllm_adapters(vllm.url, name="actor", keep=2, root=root, root_there=ROOT_THERE)
        yield vllm, engine
        await engine.aclose()


def write(root: Path, b: float) -> None:
    """The target's files beneath the root."""
    folder = root / "run/v7"
    folder.mkdir(parents=True)
    pair = {"A": torch.ones(2, 4), "B": torch.full((4, 2), b)}
    tensors = {f"base_model.model.q_proj.lora_{half}.weight": tensor for half, tensor in pair.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))


async def refit(engine: VllmAdapters) -> Refit:
    return await engine.refit(TARGET, lambda _: None)


async def test_an_adapter_that_the_server_does_not_compute_with_is_unloaded_and_never_served(tmp_path: Path) -> None:
    write(tmp_path, b=1.0)
    async with deaf(tmp_path) as (vllm, engine):
        vllm.adapters["actor-v6"] = "/mnt/weights/run/v6"
        done = await refit(engine)
    assert (done.outcome, done.resumed) == (Outcome.NACK, True)
    assert "answered exactly as by the model without it, and its B matrices are not zero" in (done.reason or "")
    assert vllm.adapters == {"actor-v6": "/mnt/weights/run/v6"}
    # vLLM would read it from a folder that may be gone, and die.
    assert not [seen for seen in vllm.server.seen if seen.path == "/v1/completions" and b"actor-v6" in seen.body]
