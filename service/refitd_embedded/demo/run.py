"""The demo from its options to its exit status: everything is started, watched and stopped here. Step by step:

    publish the weights of this step → wait until they are served → ask the engines for rollouts → hold what they say
    against the version that they claim → mark the answers → take a gradient step

Without publishing the first two are left out, and everything else is the same.

In a run of its own processes that is long enough, the demo shows how failures end, once each:

    engine-b is killed and started again, on its first weights → rollouts come from the other engine → refitd brings it
    to the current step → rollouts come from both again

    a step is published with a NaN → refitd rejects it → engines go on serving the step before

    the finished run is rolled back → engines serve the last good step before
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
from contextlib import ExitStack, contextmanager, suppress
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
from refitd_embedded.demo.processes import PROCESS_LOOK_SECONDS, ProcessError, Stack, own_stack
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
from refitd_embedded.demo.table import DemoSummary, Display, Incident, StepRow, summarise
from refitd_embedded.weights import CheckpointError, load

BROKEN = "model.layers.0.mlp.up_proj.weight"
SHORTEST = 10
"""Steps of a run in which something is broken."""
BACK_SECONDS = 60.0
SERVED_SECONDS = 60.0
SERVED_LOOK_SECONDS = 5.0
LOOK_SECONDS = 0.1
PROBLEMS = 64
GROUP = 8
RUN = "demo"


class DemoRun:
    """One run. Without a publisher nothing is published. `workdir` is for the checkpoint with the NaN."""

    def __init__(
        self,
        options: DemoOptions,
        stack: Stack,
        workdir: Path,
        trainer: PolicyTrainer,
        publisher: WeightPublisher | None,
        engines: Engines,
        shown: Display,
    ) -> None:
        self._options, self._stack, self._workdir, self._trainer = options, stack, workdir, trainer
        self._publisher, self._engines, self._shown = publisher, engines, shown
        self._breaks = bool(stack.children) and publisher is not None and options.steps >= SHORTEST
        self._published: list[Publication] = []
        self._rejected = self._served = 0
        self._killed: tuple[int, float] | None = None  # the step, and the time
        self._incidents: list[Incident] = []

    def run(self, began: float) -> DemoSummary:
        """Take all steps; see `rows` for what it raises. `began`: on the monotonic clock."""
        seen = list[StepRow]()
        for row in self.rows():
            seen.append(row)
            self._shown.row(row)
        self._look_for_killed(BACK_SECONDS)
        if self._breaks:
            self._roll_back()
        counts = {"published": len(self._published), "served": self._served, "rejected": self._rejected}
        counts["collected"] = sum(not publication.path.exists() for publication in self._published)
        return summarise(
            seen,
            publishing=self._options.publish,
            versions=counts,
            incidents=self._incidents,
            seconds=time.monotonic() - began,
        )

    def rows(self) -> Generator[StepRow]:
        """Take gradient steps; a row before each and one after the last.

        Raises:
            RefitError: a version could not be published, or was not served.
            RolloutError: an engine gives no answers.
            DisagreementError: an engine does not serve what it claims.
            ProcessError: a child has died.
        """
        trainer, source = self._trainer, random.Random(self._options.seed)  # noqa: S311 - a task, no secret
        history = VersionCopies(trainer.policy)
        while True:
            publish_ms, refit_ms = self._release()
            generation = self._published[-1].generation if self._published else 1
            history.remember(version_label(Order(generation, trainer.step)), trainer.step, trainer.policy)
            rollouts = self._engines.answer(questions(source))
            marks = [rollout.problem.marks(rollout.answer) for rollout in rollouts]
            yield StepRow(
                step=trainer.step,
                reward=sum(map(sum, marks)) / sum(map(len, marks)),
                served_by=dict.fromkeys(url.rstrip("/") for url in self._stack.engines) | served_by(history, rollouts),
                difference=largest_difference(history, rollouts),
                disk_bytes=bytes_of(self._stack.root),
                publish_ms=publish_ms,
                refit_ms=refit_ms,
            )
            if trainer.step == self._options.steps:
                return
            trainer.learn(batch(rollouts, marks))

    def _release(self) -> tuple[float | None, float | None]:
        """Publish the trainer's weights and wait until engines serve them: milliseconds of both, as far as it came."""
        step, weights = self._trainer.step, self._trainer.policy
        if self._publisher is None:
            return None, None
        is_broken = self._breaks and step == int(self._options.steps * 0.7)
        if self._breaks and step == int(self._options.steps * 0.3):
            self._kill()
        began = time.perf_counter()
        publication = self._publisher.publish(self._broken() if is_broken else weights, step=step)
        self._published.append(publication)
        safe, served = time.perf_counter(), None
        try:
            self._wait(publication)
        except VersionRejectedError:
            if not is_broken:
                raise
            self._rejected += 1
        else:
            self._served += 1
            served = (time.perf_counter() - safe) * 1e3
        if is_broken:
            self._judge(publication)
        self._look_for_killed(0.0)
        return (safe - began) * 1e3, served

    def _wait(self, publication: Publication) -> None:
        ends = time.monotonic() + SERVED_SECONDS
        while True:
            left = max(0.0, ends - time.monotonic())
            try:
                publication.wait(min(left, SERVED_LOOK_SECONDS))
            except (WaitTimeoutError, ServiceUnreachableError):
                self._stack.check()
                if left <= SERVED_LOOK_SECONDS:
                    raise
            else:
                return

    def _kill(self) -> None:
        """Kill the last engine, and have it started again; it is asked for no rollouts until it is back."""
        victim = self._stack.children[len(self._stack.engines) - 1]
        self._killed = self._trainer.step, time.monotonic()
        self._engines.leave_out(self._stack.engines[-1])
        victim.kill_and_restart()
        self._shown.tell(self._trainer.step, f"{victim.name} is killed, and started again on its first weights.")

    def _look_for_killed(self, seconds: float) -> None:
        """Take the engine that was killed back where it serves a newer step; wait for that so long, if it is > 0."""
        if self._killed is None:
            return
        killed_at, since = self._killed
        name = self._stack.children[len(self._stack.engines) - 1].name
        steps = self._steps_in_sync(seconds, lambda steps: (steps[-1] or -1) > killed_at)
        is_back = (steps[-1] or -1) > killed_at
        if not is_back and not seconds:
            return
        self._killed = None
        ended = f"back on step {steps[-1]} after {time.monotonic() - since:.0f} s" if is_back else "not back"
        if is_back:
            self._engines.take_back(self._stack.engines[-1])
        self._end(Incident(step=killed_at, what=f"{name} was killed", ended=ended, as_promised=is_back))

    def _broken(self) -> Path:
        """A checkpoint with a NaN, written as a trainer without the SDK would: `publish` refuses such tensors."""
        diverged = copy.deepcopy(self._trainer.policy)
        with torch.no_grad():
            diverged.state_dict()[BROKEN][7, 11] = torch.nan
        self._shown.tell(self._trainer.step, "the trainer publishes a checkpoint with a NaN in it.")
        return policy.write(diverged, self._workdir / "diverged")

    def _judge(self, publication: Publication) -> None:
        with RefitClient(self._stack.service_url) as client:
            version = client.version(publication.version_id)
            loads = len(client.attempts(publication.version_id).items)
        ended = f"{version.state}, and {'no engine loaded it' if not loads else f'{loads} loads of it were tried'}"
        is_rejected = version.state is VersionState.REJECTED and not loads
        self._shown.tell(publication.step, f"{version.reason}.")
        self._end(Incident(step=publication.step, what="a NaN was published", ended=ended, as_promised=is_rejected))

    def _roll_back(self) -> None:
        """Have refitd bring the engines back to the last good version before the newest."""
        began = time.monotonic()
        with RefitClient(self._stack.service_url) as client:
            goal = client.rollback(RUN).step
        steps = self._steps_in_sync(BACK_SECONDS, lambda steps: set(steps) == {goal})
        is_back = set(steps) == {goal}
        ended = f"all engines serve step {goal} after {time.monotonic() - began:.1f} s" if is_back else "not served"
        self._end(Incident(step=self._trainer.step, what="a rollback was asked for", ended=ended, as_promised=is_back))

    def _steps_in_sync(self, seconds: float, holds: Callable[[list[int | None]], bool]) -> list[int | None]:
        """The step of each engine, None for one that is not in sync: at once, or when it `holds` within the seconds."""
        ends = time.monotonic() + seconds
        while True:
            self._stack.check()
            with RefitClient(self._stack.service_url) as client:
                served = {each.url.rstrip("/"): each for each in client.engines().items}
            found = [served[url.rstrip("/")] for url in self._stack.engines]
            steps = [engine.step if engine.state is EngineState.IN_SYNC else None for engine in found]
            if holds(steps) or time.monotonic() >= ends:
                return steps
            time.sleep(LOOK_SECONDS)

    def _end(self, incident: Incident) -> None:
        self._shown.tell(self._trainer.step, f"{incident.what}: {incident.ended}.")
        self._incidents.append(incident)


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


def bytes_of(folder: Path) -> int:
    """Bytes of disk that the files beneath take, hard links counted once. Files that vanish meanwhile do not count."""
    found: dict[tuple[int, int], int] = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                status = (Path(directory) / name).lstat()
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def run(options: DemoOptions) -> int:
    began = time.monotonic()
    # The engines sit beside the trainer, on the same few cores; and more threads would round differently.
    torch.set_num_threads(1)
    try:
        with ending_on_signals(), ExitStack() as started:
            summary = _run(options, started, began)
    except DisagreementError as problem:
        return _fail(str(problem), 1)
    except (RefitError, RolloutError, ProcessError, CheckpointError, OSError, ValueError) as problem:
        return _fail(str(problem), 2)
    except KeyboardInterrupt:
        return _fail("interrupted; everything is stopped", 130)
    return 0 if summary.as_promised else 1


def _run(options: DemoOptions, started: ExitStack, began: float) -> DemoSummary:
    workdir = options.workdir or Path(started.enter_context(tempfile.TemporaryDirectory(prefix="refitd-demo-")))
    workdir.mkdir(parents=True, exist_ok=True)
    workdir = workdir.absolute()
    model = options.model or policy.write(policy.fresh(options.seed), workdir / "base")
    trainer = PolicyTrainer(load(model))
    if options.service_url is None or options.root is None:
        stack = started.enter_context(own_stack(workdir, model.absolute()))
    else:
        stack = Stack(service_url=options.service_url, engines=options.engines, root=options.root)
    publisher = None
    with ExitStack() as running:
        if options.publish:
            chosen = PublishOptions(base_model=model)
            publisher = running.enter_context(WeightPublisher(stack.root, RUN, stack.service_url, options=chosen))
        engines, shown = running.enter_context(Engines(stack.engines, stack.check)), Display.of(options)
        try:
            summary = DemoRun(options, stack, workdir, trainer, publisher, engines, shown).run(began)
        except (RefitError, RolloutError):
            stack.check()  # a child that died is the better explanation
            raise
    shown.summary(summary)
    if options.stay:
        told = f"refitd demo: engines and service stay until Ctrl-C. The dashboard: {stack.service_url}"
        print(told, file=sys.stderr, flush=True)
        with suppress(KeyboardInterrupt):
            while True:
                stack.check()
                time.sleep(PROCESS_LOOK_SECONDS)
    return summary


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
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fail(message: str, status: int) -> int:
    print(f"refitd demo: {message}", file=sys.stderr)
    return status
