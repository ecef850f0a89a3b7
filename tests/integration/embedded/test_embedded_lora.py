"""Adapters of the embedded engine: a request that names one is computed with it, whatever shares its batch."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from refitd_embedded.server import create_app
from support.adapters import MODULES, write_adapter
from support.embedded_kit import PROMPT, checkpoint, open_engine

SCALE = 8 / 4  # lora_alpha / r of `write_adapter`


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("models") / "a", 0)


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(open_engine(model, enable_lora=True))
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://e") as client:
        yield client


@pytest.fixture
async def client(model: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with served(model) as client:
        yield client


async def load(client: httpx.AsyncClient, name: str, folder: Path) -> httpx.Response:
    return await client.post("/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})


async def answer(client: httpx.AsyncClient, adapter: str | None = None) -> list[list[float]]:
    params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    named = {} if adapter is None else {"lora_path": adapter}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
    reply = (await client.post("/generate", json=body | named)).raise_for_status().json()
    return [[logprob, token] for logprob, token, _ in reply["meta_info"]["output_token_logprobs"]]


async def test_it_answers_as_the_model_into_which_the_adapter_was_merged(
    client: httpx.AsyncClient, model: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "adapter", model, 1)
    weights, adapter = load_file(model / "model.safetensors"), load_file(folder / "adapter_model.safetensors")
    for module in MODULES:
        first, second = (adapter[f"base_model.model.{module}.lora_{half}.weight"] for half in "AB")
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + SCALE * second @ first
    merged = checkpoint(tmp_path / "merged", 0)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    async with served(merged) as other:
        expected = await answer(other)
    plain = await answer(client)
    assert (await load(client, "actor-v1", folder)).status_code == 200
    found = await answer(client, "actor-v1")
    assert [token for _, token in found] == [token for _, token in expected]
    assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in expected], abs=1e-3)
    assert found != plain
    assert await answer(client) == plain


async def test_requests_with_other_adapters_and_with_none_share_a_batch(
    client: httpx.AsyncClient, model: Path, tmp_path: Path
) -> None:
    for seed in (1, 2):
        await load(client, f"actor-v{seed}", write_adapter(tmp_path / str(seed), model, seed))
    names = [None, "actor-v1", "actor-v2"]
    alone = [await answer(client, name) for name in names]
    together = await asyncio.gather(*(answer(client, name) for name in names))
    assert len({str(each) for each in alone}) == 3
    for one, other in zip(alone, together, strict=True):
        assert [token for _, token in one] == [token for _, token in other]
