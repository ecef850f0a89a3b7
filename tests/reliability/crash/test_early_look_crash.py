"""kill -9 of a trainer at every effect of a publication that an engine looks at meanwhile, and of the service between
that look and the load: what the engine serves is a committed version, by every bit.

Trainers are processes with the SDK as it is. The engine has the plugin as it is, and goes on through all of it; it
follows in a thread of its own, real files on tmpfs. Host memory is in the place of both GPUs (`support.host_gpu`).
"""

import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import stopping_trainer
from mini_stage import PluggedMiniStage
from nursery import PATIENCE, Newborn, Nursery

from refitd_client.contract.naming import STAGING_LOCK, STAGING_PROGRESS
from refitd_client.write.progress import read_progress
from support import points
from support.following import FollowingEngine, Looker, Outcome, PlainModel, root_in_memory
from support.forked import Forked
from support.handed_back import hand_back
from support.host_gpu import HostGpu
from support.mini_vllm import MiniVllm, mini_vllm

SHARDS = 3


@pytest.fixture
def root() -> Iterator[Path]:
    with root_in_memory() as root:
        yield root


@dataclass
class Trainers:
    """Trainers that come one after the other, each with the next step. An engine looks at what they write."""

    root: Path
    process: Forked
    looker: Looker
    step: int = 0
    looks: int = 0

    @property
    def run(self) -> Path:
        return self.root / "run"

    def killed(self, at: int, *, follows: bool = True) -> str | None:
        """Have one killed when it stands at an effect, and the engine has looked at all that it says is there. Returns
        the effect; None where it came through. Where the engine `follows`, it has looked at all before the commit.
        """
        self.step += 1
        self.process.stdin.write(f"{self.step} {at}\n".encode())
        pid = int(self._hear("born")[1])
        while (heard := self._hear("waits", "stopped", "done")) == ("waits", ""):
            if follows:
                self._await_look()
            self.process.stdin.write(b"\n")
        word, effect = heard
        if word == "stopped":
            self._await_look()
            os.kill(pid, signal.SIGKILL)
        _, status = self._hear("ended")
        assert int(status) == (-signal.SIGKILL if word == "stopped" else 0)
        return effect or None

    def publish(self, *, follows: bool = False) -> Path:
        """Have one publish."""
        assert self.killed(0, follows=follows) is None
        return self.run / f"v{self.step:06d}"

    def _hear(self, *words: str) -> tuple[str, str]:
        said = self.process.stdout.readline().decode()
        word, _, more = said.strip().partition(" ")
        assert word in words, said
        return word, more

    def _await_look(self) -> None:
        """Wait until the engine has looked at all that is said to be there."""
        for folder in self.run.glob(".incoming-*"):
            if (folder / STAGING_PROGRESS).exists():
                with (folder / STAGING_PROGRESS).open("rb") as file:
                    said = sum(read_progress(file.fileno(), SHARDS))
                self.looker.await_look(folder, said)
                self.looks += said > 0


@dataclass
class Job:
    """An engine that a version is taken to as by a service, and trainers. What is not served any more is a slot."""

    engine: FollowingEngine
    trainers: Trainers
    served: int = 0
    seen: Counter[str] = field(default_factory=Counter[str])

    @property
    def root(self) -> Path:
        return self.trainers.root

    @property
    def run(self) -> Path:
        return self.trainers.run

    def take(self, version: Path) -> None:
        """Have the engine serve a version, and hand back the one before."""
        step = int(version.name[1:])
        assert self.engine.take(version) is Outcome.SERVED, self.engine.reason
        assert self.engine.held(self.trainers.step) == step
        self.seen["ahead"] += self.engine.ahead > 0
        if self.served:
            hand_back(self.root, self.run / f"v{self.served:06d}")
        self.served = step

    def clear(self, *, is_slot: bool) -> None:
        """What a dead trainer has left becomes a slot again, or stays where it is, with another slot beside it."""
        for folder in self.run.glob(".incoming-*"):
            files = list(folder.glob("*.safetensors"))
            is_whole = len(files) == SHARDS and all(path.stat().st_size > 200 for path in files)
            if is_slot and is_whole:
                (folder / STAGING_LOCK).unlink(missing_ok=True)
                hand_back(self.root, folder)
                self.seen["the same files"] += 1
            elif not is_slot and is_whole:
                folder.rename(self.root / "dead" / f"{self.trainers.step}")
            else:
                shutil.rmtree(folder)


@pytest.fixture
def process(root: Path) -> Iterator[Forked]:
    """Where trainers are forked."""
    trainers = Forked(stopping_trainer.main, ["trainers", str(root)], dict(os.environ))
    with trainers.stdin, trainers.stdout:
        try:
            yield trainers
        finally:
            os.killpg(trainers.pid, signal.SIGKILL)  # where a test has failed, one stands at an effect
            trainers.wait()


@pytest.mark.points
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_slot", [True, False], ids=["into the same files", "into others"])
@pytest.mark.parametrize("stage", [True, False], ids=["copied", "read"])
def test_a_trainer_that_is_killed_at_any_effect_leaves_nothing_in_what_the_engine_serves(
    root: Path, process: Forked, monkeypatch: pytest.MonkeyPatch, stage: bool, is_slot: bool
) -> None:
    """What it has written was looked at by then. The next trainer publishes, into the files of the dead one or into
    others; a version that the dead one has committed is served as any other.
    """
    (root / "dead").mkdir()
    engine = FollowingEngine(root, monkeypatch, stage=stage)
    trainers = Trainers(root, process, engine)
    job = Job(engine, trainers)
    for _ in range(3):
        job.take(trainers.publish())
    died: list[str] = []
    for number in points.numbers():
        effect = trainers.killed(number)
        if (committed := trainers.run / f"v{trainers.step:06d}").exists():
            job.take(committed)
        if effect is None:
            break
        died.append(effect)
        job.clear(is_slot=is_slot)
        job.take(trainers.publish())
    print(f"died at {len(died)} effects: {', '.join(died)}; looked at {trainers.looks}; {dict(job.seen)}")
    assert len(died) >= 36 // points.STRIDE
    assert trainers.looks >= 18 // points.STRIDE
    assert job.seen["the same files"] >= (30 // points.STRIDE if is_slot else 0)


LOAD = PluggedMiniStage.update.load
POINTS = ["before plugin prepare", "heard plugin prepare", *(f"{when} {LOAD}" for when in ("before", "sent", "heard"))]


class LookStage(PluggedMiniStage):
    """Its versions are published by trainers of their own, and those that are not served any more are slots."""

    engine: MiniVllm

    def check(self, service: Newborn, looker: Looker, step: int) -> None:
        """It serves a step, by every bit, and says so."""
        self.step = step
        if not self.announce(service) or not self.is_served(service):
            raise AssertionError("the service is dead")
        assert (self.engine.label, self.engine.paused, looker.held(step)) == (str(step), False, step)


@pytest.mark.points
@pytest.mark.timeout(300)
@pytest.mark.parametrize("comes", ["the same version", "another version"])
@pytest.mark.parametrize("stage", [True, False], ids=["copied", "read"])
def test_a_service_that_dies_between_the_look_and_the_load_comes_back_to_an_engine_with_what_was_proved(
    root: Path,
    process: Forked,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stage: bool,
    comes: str,
) -> None:
    """It dies before and after the engine has prepared and proved what it has looked at, and around the load. Until it
    is back the engine holds the version of before or this one. Then it serves this one, or one that came meanwhile.
    """
    gpu = HostGpu(monkeypatch)
    caplog.set_level("INFO", logger="refitd_plugin")
    with ExitStack() as ends:
        http = ends.enter_context(httpx.Client(timeout=PATIENCE, trust_env=False))
        engine = ends.enter_context(mini_vllm(root.parent, root=root, kind=PlainModel, stage=stage))
        looker = Looker(engine.members[0], gpu)
        job, trainers = LookStage(root.parent, engine, [], [], http), Trainers(root, process, looker)
        nursery = ends.enter_context(Nursery(root.parent, job.settings))
        service = nursery.bring_up()
        for _ in range(3):
            trainers.publish()
            job.check(service, looker, trainers.step)
        nursery.stop(service)
        for point in (died := list(points.taken(POINTS))):
            served = trainers.step
            hand_back(root, trainers.run / f"v{served - 1:06d}")
            service = nursery.bring_up(die_on=point)
            job.check(service, looker, served)
            nursery.arm(service)
            trainers.publish(follows=True)
            job.step = trainers.step
            job.announce(service)
            nursery.bury()
            assert point in service.effects
            with engine.engine:  # a load that is under way ends first
                assert looker.held(trainers.step) in {served, trainers.step}
            if comes == "another version":
                trainers.publish()
            service = nursery.bring_up()
            job.check(service, looker, trainers.step)
            nursery.stop(service)
    looked = [each.message for each in caplog.records if "while it was written" in each.message]
    assert len(looked) >= len(died) // 2  # not where the service died before it asked, or was late on a busy machine
