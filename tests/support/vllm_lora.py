"""What tests ask a vLLM with LoRA adapters, past refitd."""

from collections.abc import Sequence
from typing import Any

import httpx

from .jobs import PATIENCE
from .servers import API_KEY
from .subject import PROMPT
from .vllm import VllmServer


def call(engine: VllmServer, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    return httpx.post(f"{engine.url}{path}", json=body, headers=headers, timeout=PATIENCE, trust_env=False)


def names_of(engine: VllmServer) -> set[str]:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    cards = httpx.get(f"{engine.url}/v1/models", headers=headers, timeout=PATIENCE, trust_env=False).json()["data"]
    return {card["id"] for card in cards if card["parent"] is not None}


def order(adapter: str | None, tokens: int, prompt: Sequence[int] = PROMPT) -> dict[str, Any]:
    body = {"prompt": [*prompt], "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
    return body | ({} if adapter is None else {"model": adapter})


def answer(engine: VllmServer, adapter: str | None, prompt: Sequence[int] = PROMPT) -> list[int]:
    reply = call(engine, "/v1/completions", order(adapter, 8, prompt))
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]
