"""No answer after an update uses a prefix that the weights before it have computed, wherever the engine keeps it."""

from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx

from refitd.engine.port import Outcome, Target
from support.engines import sglang_engine
from support.servers import ADMIN_KEY, API_KEY, EmbeddedServer
from support.stored_prefixes import StoredPrefixes, storing_prefixes

PROMPT = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}}


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {API_KEY if path == '/generate' else ADMIN_KEY}"}
    return httpx.post(f"{url}{path}", json=body, headers=headers, timeout=60.0, trust_env=False).raise_for_status()


def answered(url: str) -> list[int]:
    return post(url, "/generate", PROMPT).json()["output_ids"]


def load(stored: StoredPrefixes, model: Path) -> None:
    """As a client that knows of no store."""
    post(stored.url, "/pause_generation", {"mode": "retract"})
    post(stored.url, "/update_weights_from_disk", {"model_path": str(model), "flush_cache": True})
    post(stored.url, "/flush_cache", {})
    post(stored.url, "/continue_generation", {})


async def test_no_answer_uses_a_prefix_of_the_weights_before_the_update(models: Path, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, models / "model_a") as engine, storing_prefixes(engine.url) as stored:
        before = answered(stored.url)
        load(stored, models / "model_b")
        after = answered(engine.url)
        assert after != before
        assert answered(stored.url) == before, "the imitation forgets prefixes by itself, and so shows nothing"
        async with aclosing(sglang_engine(stored.url, api_key=API_KEY, admin_key=ADMIN_KEY)) as adapter:
            refit = await adapter.refit(Target(path=str(models / "model_b"), label="1"), lambda _: None)
        assert (refit.outcome, refit.reason) == (Outcome.ACK, None)
        assert answered(stored.url) == after
