"""The rollouts of a training job: every engine is asked greedily all the time, whatever becomes of it."""

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from chaos.answers import Answer, Expected, Span
from chaos.book import AT_START, Published
from chaos.plan import VLLM
from chaos.reference import PROMPTS, route_and_body
from refitd_client.contract.naming import Order
from support.servers import API_KEY

THREADS = 2  # for each engine
PAUSE = (0.02, 0.10)  # seconds between two questions of a thread: two cores do all of this
LOST_PAUSE = 0.1
TIMEOUT = 300.0  # a question is held while its engine is paused; nobody gives up before the harness does


@dataclass(slots=True)
class Asked:
    """What came of the questions to one engine. `floor` is what it was last known to serve, `killed` when it was killed
    since.
    """

    name: str
    url: str
    floor: Order = AT_START.order
    killed: float | None = None
    answers: list[Answer] = field(default_factory=list[Answer])
    without_answer: Counter[str] = field(default_factory=Counter[str])


class Load:
    """Asks until stopped."""

    def __init__(self, urls: dict[str, str], seed: str) -> None:
        self.asked = {name: Asked(name, url) for name, url in urls.items()}
        self._answered = threading.Condition()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(asked, f"{seed} {asked.name} {number}"), daemon=True)
            for asked in self.asked.values()
            for number in range(THREADS)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask nothing new. Questions that are held stay behind."""
        self._stop.set()

    def answer_sent_after(self, name: str, moment: float, within: float) -> Answer | None:
        """An answer to a question that was sent after a moment; None if none comes."""
        asked = self.asked[name]

        def found() -> Answer | None:
            return next((answer for answer in reversed(asked.answers) if answer.sent > moment), None)

        with self._answered:
            return self._answered.wait_for(found, within)

    def is_answered_by(self, name: str, version: Published, expected: Expected, within: float) -> bool:
        """Whether an answer by this version comes to a question that was sent after the engine was killed."""
        asked = self.asked[name]

        def is_by(answer: Answer) -> bool:
            if answer.sent < (asked.killed or 0.0):
                return False
            if answer.spans:
                return answer.label == version.label
            return answer.tokens == expected(version.model, answer.prompt)

        with self._answered:
            return self._answered.wait_for(lambda: any(map(is_by, asked.answers)), within)

    def take(self) -> list[Answer]:
        """The answers since the last time."""
        taken: list[Answer] = []
        with self._answered:
            for asked in self.asked.values():
                taken += asked.answers
                asked.answers = []
        return taken

    def _ask(self, asked: Asked, seed: str) -> None:
        chance = random.Random(seed)
        with httpx.Client(base_url=asked.url, timeout=TIMEOUT, trust_env=False) as http:
            while not self._stop.is_set():
                prompt = chance.randrange(len(PROMPTS))
                result = ask(http, asked, prompt)
                with self._answered:
                    if isinstance(result, Answer):
                        asked.answers.append(result)
                    else:
                        asked.without_answer[result] += 1
                    self._answered.notify_all()
                self._stop.wait(chance.uniform(*PAUSE) if isinstance(result, Answer) else LOST_PAUSE)


def ask(http: httpx.Client, asked: Asked, prompt: int) -> Answer | str:
    """One question; the answer, or why there is none."""
    floor, sent = asked.floor, time.monotonic()
    headers = {"Authorization": f"Bearer {API_KEY}"}
    try:
        route, body = route_and_body(asked.name, PROMPTS[prompt])
        reply = http.post(route, json=body, headers=headers)
    except httpx.TransportError:
        return "connection lost"
    if reply.status_code != 200:
        return f"status {reply.status_code}"
    data = reply.json()
    if asked.name == VLLM:
        return read_unlabelled(data, asked.name, prompt, floor, sent)
    if data["meta_info"]["finish_reason"]["type"] != "length":
        return f"ended by {data['meta_info']['finish_reason']['type']}"
    return read(data, asked.name, prompt, floor, sent)


def read_unlabelled(data: dict[str, Any], engine: str, prompt: int, floor: Order, sent: float) -> Answer | str:
    """The answer in vLLM's reply, which does not say which weights gave it."""
    choice = data["choices"][0]
    if choice["finish_reason"] != "length":
        return f"ended by {choice['finish_reason']}"
    return Answer(
        engine=engine,
        prompt=prompt,
        tokens=tuple(choice["token_ids"]),
        label="",
        spans=(),
        retractions=0,
        floor=floor,
        sent=sent,
        received=time.monotonic(),
    )


def read(data: dict[str, Any], engine: str, prompt: int, floor: Order, sent: float) -> Answer:
    """The answer in SGLang's reply."""
    meta = data["meta_info"]
    return Answer(
        engine=engine,
        prompt=prompt,
        tokens=tuple(data["output_ids"]),
        label=meta["weight_version"],
        spans=tuple(Span(part["version"], part["start"], part["end"]) for part in meta["weight_versions"]),
        retractions=meta["num_retractions"],
        floor=floor,
        sent=sent,
        received=time.monotonic(),
    )
