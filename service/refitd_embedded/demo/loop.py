"""The run itself, step by step, as a generator of rows.

    publish the weights of this step → wait until they are served → ask the engines for rollouts → hold what they say
    against the version that they claim → mark the answers → take a gradient step

Without publishing the first two are left out, and everything else is the same.
"""

import random
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import torch

from refitd_client import Publication, ServiceUnreachableError, WaitTimeoutError, WeightPublisher
from refitd_embedded.demo import disk
from refitd_embedded.demo.agreement import History, largest_difference, served_by
from refitd_embedded.demo.processes import Stack
from refitd_embedded.demo.report import Counts, Row
from refitd_embedded.demo.rollouts import Engines, Question, Rollout
from refitd_embedded.demo.task import problems
from refitd_embedded.demo.trainer import Batch, Trainer, advantages

PROBLEMS = 64
GROUP = 8
SERVED_SECONDS = 60.0
CHECK_SECONDS = 5.0


@dataclass(slots=True)
class Releases:
    """What was published, and how many of these were proved to be served. Without a publisher nothing is.

    `check` is called now and then while a version is waited for, and may raise what ends the waiting.
    """

    publisher: WeightPublisher | None
    check: Callable[[], None]
    published: list[Publication] = field(default_factory=list[Publication])
    served: int = 0

    def release(self, trainer: Trainer) -> tuple[float, float] | None:
        """Publish the trainer's weights and wait until engines serve them: milliseconds of both."""
        if self.publisher is None:
            return None
        began = time.perf_counter()
        publication = self.publisher.publish(trainer.policy, step=trainer.step)
        self.published.append(publication)
        safe = time.perf_counter()
        self._wait(publication)
        self.served += 1
        return (safe - began) * 1e3, (time.perf_counter() - safe) * 1e3

    def _wait(self, publication: Publication) -> None:
        ends = time.monotonic() + SERVED_SECONDS
        while True:
            left = max(0.0, ends - time.monotonic())
            try:
                publication.wait(min(left, CHECK_SECONDS))
            except (WaitTimeoutError, ServiceUnreachableError):
                self.check()
                if left <= CHECK_SECONDS:
                    raise
            else:
                return

    def counts(self) -> Counts:
        """So far. A version whose folder is gone has been collected."""
        collected = sum(not publication.path.exists() for publication in self.published)
        return Counts(published=len(self.published), served=self.served, collected=collected)


def rows(
    trainer: Trainer, stack: Stack, engines: Engines, releases: Releases, *, steps: int, seed: int
) -> Generator[Row]:
    """Take `steps` gradient steps; a row before each and one after the last.

    Raises:
        RefitError: a version could not be published, or was not served.
        RolloutError: an engine gives no answers.
        DisagreementError: an engine does not serve what it claims.
    """
    history, source = History(trainer.policy), random.Random(seed)  # noqa: S311 - a task, no secret
    while True:
        history.remember(trainer.step, trainer.policy)
        times = releases.release(trainer) or (None, None)
        rollouts = engines.answer(questions(source))
        marks = [rollout.problem.marks(rollout.answer) for rollout in rollouts]
        yield Row(
            step=trainer.step,
            reward=sum(map(sum, marks)) / sum(map(len, marks)),
            served_by=served_by(history, rollouts),
            difference=largest_difference(history, rollouts),
            disk_bytes=disk.held(stack.root),
            publish_ms=times[0],
            refit_ms=times[1],
        )
        if trainer.step == steps:
            return
        trainer.learn(batch(rollouts, marks))


def questions(source: random.Random) -> list[Question]:
    """A group of questions for each of a step's problems, each with a seed of its own."""
    return [Question(problem, source.getrandbits(62)) for problem in problems(source, PROBLEMS) for _ in range(GROUP)]


def batch(rollouts: Sequence[Rollout], marks: Sequence[Sequence[float]]) -> Batch:
    """Rollouts and their marks as the trainer takes them."""
    grouped = torch.tensor(marks).view(-1, GROUP, len(marks[0]))
    return Batch(
        tokens=torch.tensor([rollout.tokens for rollout in rollouts]),
        sampled=torch.tensor([rollout.logprobs for rollout in rollouts]),
        advantages=advantages(grouped).flatten(0, 1),
    )
