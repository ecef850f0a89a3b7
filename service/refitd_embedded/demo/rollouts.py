"""Rollouts: answers of the engines to problems over HTTP, held against the versions that the engines claim to serve.

Each engine gets its share in one batch, all at once. An engine that is paused for an update keeps the request waiting;
one that is starting refuses it, and one that pauses by aborting sends it back unfinished: such answers are asked for
again, until `DEADLINE`. Each answer has a seed of its own, so that the same run gives the same answers.

The trainer keeps copies of the weights of its last versions under the labels that engines give to them. Each token of a
rollout names the version that it was sampled from; the copy of that version must find the token as likely as the engine
did. Weights that are a step older, a mixture of two steps, or another model do not.
"""

import asyncio
import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx
import torch
from torch import Tensor

from refitd_embedded.demo.policy import ANSWER, CountingProblem, answer_distribution, chosen
from refitd_embedded.model import Decoder

DEADLINE = 60.0
"""Seconds in which an engine must have given all its answers."""
PAUSE = 0.2
"""Seconds before the next request to an engine that did not answer."""


class RolloutError(Exception):
    """An engine gives no answers, or none that can be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answer. `logprobs` and `versions` have an entry for each of its tokens: what the engine said of it."""

    problem: CountingProblem
    engine: str
    answer: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[str, ...]

    @property
    def tokens(self) -> list[int]:
        return [*self.problem.prompt, *self.answer]


@dataclass(frozen=True, slots=True)
class Question:
    """A problem, and the seed of its answer."""

    problem: CountingProblem
    seed: int


class Engines:
    """The engines that rollouts come from.

    `check` is called before an engine is asked again, and may raise what ends the asking; `deadline` is in seconds,
    for each engine to answer everything.
    """

    def __init__(self, urls: Sequence[str], check: Callable[[], None], deadline: float = DEADLINE) -> None:
        self._urls, self._check, self._deadline = [url.rstrip("/") for url in urls], check, deadline
        self._runner = asyncio.Runner()
        # Proxies of the environment are not for engines next door.
        self._http = httpx.AsyncClient(trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._http.aclose())
        self._runner.close()

    def leave_out(self, url: str) -> None:
        self._urls.remove(url.rstrip("/"))

    def take_back(self, url: str) -> None:
        self._urls.append(url.rstrip("/"))

    def answer(self, questions: Sequence[Question]) -> list[Rollout]:
        """Answers in the questions' order. Raises RolloutError, and what `check` raises."""
        return self._runner.run(self._all(questions))

    async def _all(self, questions: Sequence[Question]) -> list[Rollout]:
        share = -(-len(questions) // len(self._urls))
        parts = [questions[place : place + share] for place in range(0, len(questions), share)]
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._from(*one)) for one in zip(self._urls, parts, strict=False)]
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        return list(itertools.chain.from_iterable(task.result() for task in asked))

    async def _from(self, url: str, questions: Sequence[Question]) -> list[Rollout]:
        """Ask one engine until it has answered everything."""
        answered: dict[int, Rollout] = {}
        last = "it has not answered"
        try:
            async with asyncio.timeout(self._deadline):
                while missing := [place for place in range(len(questions)) if place not in answered]:
                    found, last = await self._ask(url, [questions[place] for place in missing])
                    answered |= {place: one for place, one in zip(missing, found, strict=False) if one is not None}
                    if len(answered) < len(questions):
                        self._check()
                        await asyncio.sleep(PAUSE)
        except TimeoutError:
            owed = f"{len(questions) - len(answered)} of {len(questions)} answers after {self._deadline:g} s: {last}"
            raise RolloutError(f"engine {url} owes {owed}") from None
        return [answered[place] for place in range(len(questions))]

    async def _ask(self, url: str, questions: Sequence[Question]) -> tuple[list[Rollout | None], str]:
        """Ask for one batch: the answers, None for one that was cut short; or none, and why the engine has none now."""
        try:
            reply = await self._http.post(f"{url}/generate", json=request(questions), timeout=self._deadline)
        except httpx.TransportError as problem:
            return [], f"{type(problem).__name__}: {problem}"
        said = f"HTTP {reply.status_code}: {reply.text[:200]}"
        if reply.status_code >= 500 or reply.status_code == 429:
            return [], said
        if reply.status_code != 200:
            raise RolloutError(f"engine {url} refuses to generate: {said}")
        return [read(each.problem, url, raw) for each, raw in zip(questions, reply.json(), strict=True)], said


def request(questions: Sequence[Question]) -> dict[str, Any]:
    """The body of POST /generate for a batch, as SGLang takes it."""
    params = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": ANSWER, "ignore_eos": True}
    return {
        "input_ids": [question.problem.prompt for question in questions],
        "sampling_params": [params | {"sampling_seed": question.seed} for question in questions],
        "return_logprob": True,
    }


def read(problem: CountingProblem, engine: str, raw: dict[str, Any]) -> Rollout | None:
    """An engine's answer, or None if it was cut short, as by a pause that aborts.

    `weight_versions` has spans where weights changed in the middle of an answer; an engine that does not report them
    names one version for all.
    """
    meta = raw["meta_info"]
    pairs = meta["output_token_logprobs"]
    if len(pairs) != ANSWER or any(pair[0] is None for pair in pairs):
        return None
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": ANSWER}]
    return Rollout(
        problem=problem,
        engine=engine,
        answer=tuple(pair[1] for pair in pairs),
        logprobs=tuple(pair[0] for pair in pairs),
        versions=tuple(str(span["version"]) for span in spans for _ in range(span["start"], span["end"])),
    )


TOLERANCE = 1e-4
"""In nats. Rounding makes a hundredth of it, one gradient step a hundred times as much."""
KEPT = 8
START_UP = "default"
"""SGLang's label for the weights that an engine was started on."""


class DisagreementError(Exception):
    """An engine does not serve the version that it claims."""


class VersionCopies:
    """Copies of the weights of the last versions, and of the start-up weights, by the label that engines give."""

    def __init__(self, start_up: Decoder) -> None:
        self._copies = {START_UP: (0, _copy_of(start_up))}
        self._probe = copy.deepcopy(start_up)

    def remember(self, label: str, step: int, policy: Decoder) -> None:
        """Keep a copy of the policy as the version of `label`, and of the versions before it only the last few."""
        self._copies[label] = (step, _copy_of(policy))
        for label in [label for label in self._copies if label != START_UP][:-KEPT]:
            del self._copies[label]

    def step_of(self, label: str) -> int:
        """The step that a version was made by. Raises DisagreementError for a label that is none of the trainer's."""
        if label not in self._copies:
            raise DisagreementError(
                f"an engine claims to serve version {label!r}; the trainer knows {', '.join(self._copies)}: "
                "does another trainer publish to this engine?"
            )
        return self._copies[label][0]

    @torch.no_grad()
    def logprobs(self, label: str, tokens: Tensor, answer: int) -> Tensor:
        """The version's log-probabilities, [rows, answer]."""
        self.step_of(label)
        self._probe.load_state_dict(self._copies[label][1])
        return chosen(answer_distribution(self._probe, tokens, answer), tokens)


def largest_difference(history: VersionCopies, rollouts: Sequence[Rollout]) -> float:
    """The largest |engine's - trainer's| over all tokens. Raises DisagreementError beyond the tolerance."""
    found = 0.0
    for label in sorted({label for rollout in rollouts for label in rollout.versions}):
        mine = [rollout for rollout in rollouts if label in rollout.versions]
        said = torch.tensor([rollout.logprobs for rollout in mine])
        known = history.logprobs(label, torch.tensor([rollout.tokens for rollout in mine]), said.shape[1])
        of_version = torch.tensor([[one == label for one in rollout.versions] for rollout in mine])
        difference = (known - said).abs()[of_version].max().item()
        if not difference <= TOLERANCE:  # also when it is no number
            engines = ", ".join(sorted({rollout.engine for rollout in mine}))
            raise DisagreementError(
                f"log-probabilities said to be of version {label} differ by {difference:.3g} from the trainer's own "
                f"(at most {TOLERANCE:g} is rounding): {engines} served other weights"
            )
        found = max(found, difference)
    return found


def served_by(history: VersionCopies, rollouts: Sequence[Rollout]) -> dict[str, int]:
    """The oldest step that each engine claims to have answered with. Raises DisagreementError as `step_of` does."""
    found: dict[str, int] = {}
    for rollout in rollouts:
        oldest = min(map(history.step_of, rollout.versions))
        found[rollout.engine] = min(oldest, found.get(rollout.engine, oldest))
    return found


def _copy_of(decoder: Decoder) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
