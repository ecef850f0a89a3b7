"""What each model answers: asked of a clean engine that no refitd has ever touched, one question at a time."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from chaos.answers import Claim, Tokens
from chaos.models import NAMES
from chaos.plan import VLLM
from support.servers import ADMIN_KEY, API_KEY

ANSWER_TOKENS = 16
_random = random.Random("prompts")
PROMPTS = [[_random.randrange(4, 1000) for _ in range(length)] for length in (8, 16, 24, 40)]


class UnfitReferenceError(Exception):
    """The engines cannot be told apart by their answers, or do not repeat themselves."""


def question(prompt: list[int], tokens: int = ANSWER_TOKENS) -> dict[str, object]:
    """The body of a greedy request."""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": params}


def route_and_body(engine: str, prompt: list[int]) -> tuple[str, dict[str, object]]:
    """The route and the body of a greedy request to an engine."""
    if engine != VLLM:
        return "/generate", question(prompt)
    body: dict[str, object] = {"prompt": prompt, "temperature": 0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    return "/v1/completions", body | {"return_token_ids": True}


@dataclass
class Reference:
    """Answers of a clean engine, each asked for once."""

    url: str
    models: Path
    _loaded: str | None = None
    _known: dict[tuple[str, Tokens], Tokens] = field(default_factory=dict[tuple[str, Tokens], Tokens])

    def __enter__(self) -> Self:
        self._http = httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def learn(self) -> None:
        """Ask all models all prompts."""
        for model in NAMES:
            for number in range(len(PROMPTS)):
                self.expected(model, number)
        first = {answer[:4] for answer in self._known.values()}
        if len(first) != len(self._known):
            raise UnfitReferenceError("two models begin the same answer: choose another seed for the models")

    def expected(self, model: str, prompt: int) -> Tokens:
        """A model's whole answer to a prompt."""
        return self._answer(model, tuple(PROMPTS[prompt]))

    def holds(self, claim: Claim) -> bool:
        """Whether one of the models goes on as claimed."""
        context = (*PROMPTS[claim.prompt], *claim.before)
        return any(self._answer(model, context)[: len(claim.tokens)] == claim.tokens for model in claim.models)

    def _answer(self, model: str, context: Tokens) -> Tokens:
        if (model, context) not in self._known:
            self._load(model)
            reply = self._post("/generate", API_KEY, question(list(context)))
            self._known[model, context] = tuple(reply["output_ids"])
        return self._known[model, context]

    def _load(self, model: str) -> None:
        if model != self._loaded:
            path = str(self.models / model)
            # Right after an answer SGLang may still count its request as running, and then refuses to flush.
            self._post("/pause_generation", ADMIN_KEY, {"mode": "retract"})
            self._post("/update_weights_from_disk", ADMIN_KEY, {"model_path": path, "load_format": "auto"})
            self._post("/continue_generation", ADMIN_KEY, {"torch_empty_cache": False})
            self._loaded = model

    def _post(self, path: str, key: str, body: dict[str, object]) -> dict[str, Any]:
        reply = self._http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
        return reply.raise_for_status().json()


def agree(one: Reference, other: Reference) -> None:
    """See that two kinds of engine give the same answers, so that one of them can check the other's.

    Raises:
        UnfitReferenceError: they do not.
    """
    for model in NAMES:
        for number in range(len(PROMPTS)):
            if one.expected(model, number) != other.expected(model, number):
                raise UnfitReferenceError(f"{one.url} and {other.url} answer prompt {number} differently with {model}")


def answer_now(engine: str, url: str, prompt: int) -> Tokens:
    """What an engine at a URL answers to a prompt at this moment."""
    headers = {"Authorization": f"Bearer {API_KEY}"}
    route, body = route_and_body(engine, PROMPTS[prompt])
    reply = httpx.post(f"{url}{route}", json=body, headers=headers, timeout=60.0, trust_env=False)
    said = reply.raise_for_status().json()
    return tuple(said["choices"][0]["token_ids"] if engine == VLLM else said["output_ids"])
