"""The demo from its options to its exit status: everything is started, watched and stopped here.

`rows` is the run itself, step by step:

    publish the weights of this step → wait until they are served → ask the engines for rollouts → hold what they say
    against the version that they claim → mark the answers → take a gradient step

Without publishing the first two are left out, and everything else is the same.
"""

import copy
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from refitd_client import (
    Publication,
    PublishOptions,
    RefitError,
    ServiceUnreachableError,
    VersionRejectedError,
    WaitTimeoutError,
    WeightPublisher,
)
from refitd_client.contract.naming import Order, version_label
from refitd_client.contract.states import EngineState, VersionState
from refitd_client.http.client import RefitClient
from refitd_embedded.demo import DemoOptions, policy
from refitd_embedded.demo.policy import PolicyTrainer, TrainingBatch, advantages, problems
from refitd_embedded.demo.processes import PROCESS_LOOK_SECONDS, ProcessError, Stack, on_stderr, own_stack
from refitd_embedded.demo.rollouts import (
    DisagreementError,
    Engines,
    Question,
    Rollout,
    RolloutError,
    VersionCopies,
    largest_difference,
    served_by,
)
from refitd_embedded.demo.table import Counts, DemoSummary, Display, Incident, StepRow, display, summarise
from refitd_embedded.weights import CheckpointError, load

# What the demo breaks by itself, and how it ended: an engine is killed, and the trainer publishes a NaN.
#
#     engine-b is killed and started again, on the weights of the beginning → rollouts come from the other engine
#     → refitd brings it to the current step → rollouts come from both again
#
#     a step is published with a NaN → refitd rejects it → engines go on serving the step before
#
# Each is done to the demo's own processes, once in a run that is long enough to see how it ends.


BROKEN = "model.layers.0.mlp.up_proj.weight"
SHORTEST = 10
"""Steps of a run in which something is broken."""
BACK_SECONDS = 60.0
INCIDENT_LOOK_SECONDS = 0.1


@dataclass(slots=True)
class Incidents:
    """Breaks things at their steps; `seen` has how each ended.

    Attributes:
        stack: whose processes they are.
        workdir: the folder for the checkpoint with the NaN.
        engines: who answers; one that was killed is left out until it is back.
        shown: where it is told.
        steps: of the whole run.
        publishing: whether versions are published: else nothing is broken.
    """

    stack: Stack
    workdir: Path
    engines: Engines
    shown: Display
    steps: int
    publishing: bool
    seen: list[Incident] = field(default_factory=list[Incident])
    _killed: tuple[str, int, float] | None = None  # its name, the step, and the time

    def kill(self, step: int) -> None:
        """Kill the last engine if this is the step for it, and have it started again."""
        if len(self.stack.engines) > 1 and self._is_due(step, 0.3):
            victim = self.stack.children[len(self.stack.engines) - 1]
            self._killed = (victim.name, step, time.monotonic())
            self.engines.leave_out(self.stack.engines[-1])
            victim.kill_and_restart()
            told = f"{victim.name} is killed (SIGKILL), and started again on its first weights."
            self.shown.tell(step, told)

    def broken(self, trainer: PolicyTrainer) -> Path | None:
        """The checkpoint with a NaN to publish in the place of this step's policy; None if this is not the step for it.

        It is written as a trainer without the SDK would: `publish` refuses to publish such tensors.
        """
        if not self._is_due(trainer.step, 0.7):
            return None
        diverged = copy.deepcopy(trainer.policy)
        with torch.no_grad():
            diverged.state_dict()[BROKEN][7, 11] = torch.nan
        self.shown.tell(trainer.step, "the trainer publishes a checkpoint with a NaN in it.")
        return policy.write(diverged, self.workdir / "diverged")

    def _is_due(self, step: int, part: float) -> bool:
        is_own = bool(self.stack.children)
        return is_own and self.publishing and self.steps >= SHORTEST and step == int(self.steps * part)

    def judged(self, publication: Publication) -> None:
        """Note how the NaN ended."""
        with RefitClient(self.stack.service_url) as client:
            version = client.version(publication.version_id)
            loads = client.attempts(publication.version_id).items
        ended = f"{version.state}, " + (f"{len(loads)} loads of it were tried" if loads else "and no engine loaded it")
        self.shown.tell(publication.step, f"{ended}: {version.reason}.")
        is_rejected = version.state is VersionState.REJECTED and not loads
        self.seen.append(
            Incident(step=publication.step, what="a NaN was published", ended=ended, as_promised=is_rejected)
        )

    def look(self, step: int) -> None:
        """Note it if the engine that was killed is back on the trainer's step; it answers again from now on."""
        if self._killed is None:
            return
        _, killed_at, since = self._killed
        with RefitClient(self.stack.service_url) as client:
            url = self.stack.engines[-1]
            engine = next(each for each in client.engines().items if each.url.rstrip("/") == url.rstrip("/"))
        if engine.state is not EngineState.IN_SYNC or engine.step is None or engine.step <= killed_at:
            return
        self.engines.take_back(url)
        self._end_kill(step, f"back on step {engine.step} after {time.monotonic() - since:.0f} s", is_back=True)

    def settle(self, step: int) -> None:
        """Wait until the engine that was killed is back.

        Raises:
            ProcessError: it has died again.
        """
        ends = time.monotonic() + BACK_SECONDS
        while self._killed is not None and time.monotonic() < ends:
            self.stack.check()
            self.look(step)
            time.sleep(INCIDENT_LOOK_SECONDS)
        if self._killed is not None:
            self._end_kill(step, f"not back after {BACK_SECONDS:g} s", is_back=False)

    def _end_kill(self, step: int, ended: str, *, is_back: bool) -> None:
        if self._killed is not None:
            name, killed_at, _ = self._killed
            self._killed = None
            self.shown.tell(step, f"{name}, which was killed, is {ended}.")
            self.seen.append(Incident(step=killed_at, what=f"{name} was killed", ended=ended, as_promised=is_back))


PROBLEMS = 64
GROUP = 8
SERVED_SECONDS = 60.0
SERVED_LOOK_SECONDS = 5.0
RUN = "demo"


@dataclass(slots=True)
class Releases:
    """Publishes versions, and counts those that were proved to be served. Without a publisher nothing is published.

    `check` is called now and then while a version is waited for, and may raise what ends the waiting.
    """

    publisher: WeightPublisher | None
    check: Callable[[], None]
    published: list[Publication] = field(default_factory=list[Publication])
    served: int = 0
    rejected: int = 0

    def release(self, trainer: PolicyTrainer, incidents: Incidents) -> tuple[float | None, float | None]:
        """Publish the trainer's weights and wait until engines serve them: milliseconds of both, as far as it came."""
        if self.publisher is None:
            return None, None
        broken = incidents.broken(trainer)
        incidents.kill(trainer.step)
        began = time.perf_counter()
        publication = self.publisher.publish(trainer.policy if broken is None else broken, step=trainer.step)
        self.published.append(publication)
        safe = time.perf_counter()
        served = None
        try:
            self._wait(publication)
        except VersionRejectedError:
            if broken is None:
                raise
            self.rejected += 1
        else:
            self.served += 1
            served = (time.perf_counter() - safe) * 1e3
        if broken is not None:
            incidents.judged(publication)
        incidents.look(trainer.step)
        return (safe - began) * 1e3, served

    def label(self, step: int) -> str:
        """What engines call the trainer's weights of `step`, which were published last."""
        return version_label(Order(self.published[-1].generation if self.published else 1, step))

    def _wait(self, publication: Publication) -> None:
        ends = time.monotonic() + SERVED_SECONDS
        while True:
            left = max(0.0, ends - time.monotonic())
            try:
                publication.wait(min(left, SERVED_LOOK_SECONDS))
            except (WaitTimeoutError, ServiceUnreachableError):
                self.check()
                if left <= SERVED_LOOK_SECONDS:
                    raise
            else:
                return

    def counts(self) -> Counts:
        """So far. A version whose folder is gone has been collected."""
        collected = sum(not publication.path.exists() for publication in self.published)
        return Counts(published=len(self.published), served=self.served, rejected=self.rejected, collected=collected)


def rows(
    trainer: PolicyTrainer, incidents: Incidents, releases: Releases, *, steps: int, seed: int
) -> Generator[StepRow]:
    """Take gradient steps; a row before each and one after the last.

    Raises:
        RefitError: a version could not be published, or was not served.
        RolloutError: an engine gives no answers.
        DisagreementError: an engine does not serve what it claims.
    """
    history, source = VersionCopies(trainer.policy), random.Random(seed)  # noqa: S311 - a task, no secret
    while True:
        times = releases.release(trainer, incidents)
        history.remember(releases.label(trainer.step), trainer.step, trainer.policy)
        rollouts = incidents.engines.answer(questions(source))
        marks = [rollout.problem.marks(rollout.answer) for rollout in rollouts]
        yield StepRow(
            step=trainer.step,
            reward=sum(map(sum, marks)) / sum(map(len, marks)),
            served_by=dict.fromkeys(url.rstrip("/") for url in incidents.stack.engines) | served_by(history, rollouts),
            difference=largest_difference(history, rollouts),
            disk_bytes=held(incidents.stack.root),
            publish_ms=times[0],
            refit_ms=times[1],
        )
        if trainer.step == steps:
            return
        trainer.learn(batch(rollouts, marks))


def questions(source: random.Random) -> list[Question]:
    """A group of questions for each of a step's problems, each with a seed of its own."""
    return [Question(problem, source.getrandbits(62)) for problem in problems(source, PROBLEMS) for _ in range(GROUP)]


def batch(rollouts: Sequence[Rollout], marks: Sequence[Sequence[float]]) -> TrainingBatch:
    grouped = torch.tensor(marks).view(-1, GROUP, len(marks[0]))
    return TrainingBatch(
        tokens=torch.tensor([rollout.tokens for rollout in rollouts]),
        sampled=torch.tensor([rollout.logprobs for rollout in rollouts]),
        advantages=advantages(grouped).flatten(0, 1),
    )


def held(folder: Path) -> int:
    """Bytes of disk that the files beneath take, hard links counted once. What is deleted meanwhile does not count."""
    found: dict[tuple[int, int], int] = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                status = (Path(directory) / name).lstat()
            except FileNotFoundError:
                continue
            found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def run(options: DemoOptions) -> int:
    began = time.monotonic()
    # The engines sit beside the trainer, on the same few cores; and more threads would round differently.
    torch.set_num_threads(1)
    try:
        with ending_on_signals(), _workdir(options) as workdir:
            summary = _run(options, workdir, began)
    except DisagreementError as problem:
        return _fail(str(problem), 1)
    except (RefitError, RolloutError, ProcessError, CheckpointError, OSError, ValueError) as problem:
        return _fail(str(problem), 2)
    except KeyboardInterrupt:
        return _fail("interrupted; everything is stopped", 130)
    return 0 if summary.as_promised else 1


def _run(options: DemoOptions, workdir: Path, began: float) -> DemoSummary:
    with on_stderr("model") as ready:
        model = options.model or policy.write(policy.fresh(options.seed), workdir / "base")
        trainer = PolicyTrainer(load(model))
        ready(f"{sum(tensor.numel() for tensor in trainer.policy.parameters()):,} weights")
    with _stack(options, workdir, model) as stack, display(options, stack.service_url) as shown:
        publishing = (
            WeightPublisher(stack.root, RUN, stack.service_url, options=PublishOptions(base_model=model))
            if options.publish
            else None
        )
        with (
            publishing or nullcontext() as publisher,
            Engines(stack.engines, stack.check) as engines,
        ):
            releases, seen = Releases(publisher, stack.check), list[StepRow]()
            incidents = Incidents(stack, workdir, engines, shown, options.steps, options.publish)
            try:
                for row in rows(trainer, incidents, releases, steps=options.steps, seed=options.seed):
                    seen.append(row)
                    shown.row(row)
                incidents.settle(trainer.step)
            except (RefitError, RolloutError):
                stack.check()  # a child that died is the better explanation
                raise
        summary = summarise(
            seen,
            publishing=options.publish,
            versions=releases.counts(),
            incidents=incidents.seen,
            seconds=time.monotonic() - began,
        )
        shown.summary(summary)
        if options.stay:
            _stay(stack)
    return summary


def _stay(stack: Stack) -> None:
    """Leave everything as it is until Ctrl-C, for a look at the dashboard and a try of the commands."""
    told = f"refitd demo: engines and service stay until Ctrl-C. The dashboard: {stack.service_url}"
    print(told, file=sys.stderr, flush=True)
    with suppress(KeyboardInterrupt):
        while True:
            stack.check()
            time.sleep(PROCESS_LOOK_SECONDS)


@contextmanager
def _workdir(options: DemoOptions) -> Generator[Path]:
    if options.workdir is not None:
        options.workdir.mkdir(parents=True, exist_ok=True)
        yield options.workdir.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="refitd-demo-") as folder:
        yield Path(folder)


@contextmanager
def _stack(options: DemoOptions, workdir: Path, model: Path) -> Generator[Stack]:
    if options.service_url is None or options.root is None:
        with own_stack(workdir, model.absolute(), progress=on_stderr) as stack:
            yield stack
    else:
        yield Stack(service_url=options.service_url, engines=options.engines, root=options.root)


@contextmanager
def ending_on_signals() -> Generator[None]:
    """Have SIGTERM, and SIGHUP of a terminal that is closed, unwind the run as Ctrl-C does: children are stopped.

    A signal that is ignored stays so: `nohup` means that the run outlives its terminal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number in (number for number, handler in before.items() if handler is not signal.SIG_IGN):
            signal.signal(number, _end)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _fail(message: str, status: int) -> int:
    print(f"refitd demo: {message}", file=sys.stderr)
    return status
