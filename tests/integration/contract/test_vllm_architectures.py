"""Greedy answers of a real vLLM after an update are those of a server that was started on that checkpoint.

Of Qwen2 the other tests of the contract show it: each begins with the answers of a server that was started on model_a.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from refitd.engine.port import Outcome, Reached
from support.architectures import make
from support.servers import VLLM_VENV
from support.vllm import WIDTH, OneVllm, PluggedVllm, VllmSubject

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VLLM_VENV is None, reason="REFITD_VLLM_VENV names no vLLM: make vllm"),
]

Served = tuple[list[VllmSubject], list[int]]  # and what it answers on model_a


@asynccontextmanager
async def served(architecture: str, one_vllm: OneVllm, tokenizer: Path, folder: Path) -> AsyncIterator[Served]:
    """A server on one of two models, with refitd inside, and how it is updated: as a stock one, and with refitd."""
    for seed, name in enumerate(("model_a", "model_b"), start=1):
        make(folder / name, architecture, seed, tokenizer, WIDTH)
    one_vllm.stop()  # one at a time: each takes 2 GB
    root = folder / "root"
    (root / ".refitd").mkdir(parents=True)
    with PluggedVllm(folder, folder / "model_a", root=root) as server:
        stock = VllmSubject(server, folder)
        inside = VllmSubject(server, folder, "vllm-plugged", root)
        try:
            yield [stock, inside], await stock.answer()
        finally:
            await stock.engine.aclose()
            await inside.engine.aclose()


@pytest.mark.parametrize(
    "architecture", [pytest.param("gemma2", marks=pytest.mark.thorough), "llama", "qwen2-tied", "qwen3"]
)
async def test_an_update_gives_the_answers_of_a_server_that_was_started_on_that_checkpoint(
    architecture: str, one_vllm: OneVllm, vllm_models: Path, tmp_path: Path
) -> None:
    async with served(architecture, one_vllm, vllm_models / "model_a", tmp_path) as ((stock, inside), started):
        for subject in (stock, inside, stock, inside):
            b = await subject.refit("model_b", "2", repairs=True)
            assert b.outcome is Outcome.ACK, b.reason
            assert await subject.answer() != started
            a = await subject.refit("model_a", "3")
            assert a.outcome is Outcome.ACK, a.reason
            assert await subject.answer() == started


async def test_experts_on_a_cpu_which_a_reload_would_leave_unpacked_are_refused_by_name(
    one_vllm: OneVllm, vllm_models: Path, tmp_path: Path
) -> None:
    """vLLM 0.32.0 answers 200 and serves garbage then, of Qwen3-MoE as of others."""
    async with served("qwen3-moe", one_vllm, vllm_models / "model_a", tmp_path) as (subjects, started):
        seen = await subjects[1].engine.probe()
        assert isinstance(seen, Reached)
        assert (seen.plugin, "experts" in (seen.stock_reason or "")) == (None, True)
        for subject in subjects:
            refused = await subject.refit("model_b", "2")
            assert (refused.outcome, refused.resumed) == (Outcome.NACK, True)
            assert "experts" in (refused.reason or "")
            assert await subject.answer() == started
