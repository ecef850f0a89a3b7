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
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import stopping_trainer

from refitd_client.contract.naming import STAGING_LOCK, STAGING_PROGRESS
from refitd_client.write.progress import read_progress
from support import points
from support.following import FollowingEngine, Outcome, root_in_memory
from support.forked import Forked
from support.handed_back import hand_back

SHARDS = 3


@pytest.fixture
def root() -> Iterator[Path]:
    with root_in_memory() as root:
        yield root


@dataclass
class Job:
    """An engine, and trainers that come one after the other. A version that is not served any more is a slot again."""

    root: Path
    engine: FollowingEngine
    trainers: Forked
    step: int = 0
    served: int = 0
    seen: Counter[str] = field(default_factory=Counter[str])

    @property
    def run(self) -> Path:
        return self.root / "run"

    def killed(self, at: int) -> str | None:
        """Have a trainer of the next step killed when it stands at an effect, and the engine has looked at all that it
        says is there. Returns the effect; None where it came through.
        """
        self.step += 1
        self.trainers.stdin.write(f"{self.step} {at}\n".encode())
        pid, (word, effect) = int(self._hear("born")[1]), self._hear("begun", "stopped", "done")
        if word == "begun":
            if at:
                self._await_look()
            self.trainers.stdin.write(b"\n")
            word, effect = self._hear("stopped", "done")
        if word == "stopped":
            self._await_look()
            os.kill(pid, signal.SIGKILL)
        _, status = self._hear("ended")
        assert int(status) == (-signal.SIGKILL if word == "stopped" else 0)
        return effect or None

    def _hear(self, *words: str) -> tuple[str, str]:
        said = self.trainers.stdout.readline().decode()
        word, _, more = said.strip().partition(" ")
        assert word in words, said
        return word, more

    def _await_look(self) -> None:
        """Wait until the engine has looked at all that is said to be there."""
        for folder in self.run.glob(".incoming-*"):
            if (folder / STAGING_PROGRESS).exists():
                with (folder / STAGING_PROGRESS).open("rb") as file:
                    said = sum(read_progress(file.fileno(), SHARDS))
                self.engine.await_look(folder, said)
                self.seen["looked at"] += said > 0

    def publish(self) -> Path:
        """Have a trainer publish the next step."""
        assert self.killed(0) is None
        return self.run / f"v{self.step:06d}"

    def take(self, version: Path) -> None:
        """Have the engine serve a version, and hand back the one before."""
        step = int(version.name[1:])
        assert self.engine.take(version) is Outcome.SERVED, self.engine.reason
        assert self.engine.held(self.step) == step
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
                folder.rename(self.root / "dead" / f"{self.step}")
            else:
                shutil.rmtree(folder)


@pytest.fixture
def trainers(root: Path) -> Iterator[Forked]:
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
    root: Path, trainers: Forked, monkeypatch: pytest.MonkeyPatch, stage: bool, is_slot: bool
) -> None:
    """What it has written was looked at by then. The next trainer publishes, into the files of the dead one or into
    others; a version that the dead one has committed is served as any other.
    """
    (root / "dead").mkdir()
    job = Job(root, FollowingEngine(root, monkeypatch, stage=stage), trainers)
    for _ in range(3):
        job.take(job.publish())
    died: list[str] = []
    for number in points.numbers():
        effect = job.killed(number)
        if (committed := job.run / f"v{job.step:06d}").exists():
            job.take(committed)
        if effect is None:
            break
        died.append(effect)
        job.clear(is_slot=is_slot)
        job.take(job.publish())
    print(f"died at {len(died)} effects: {', '.join(died)}; {dict(job.seen)}")
    assert len(died) >= 36 // points.STRIDE
    assert job.seen["looked at"] >= (18 if is_slot else 9) // points.STRIDE
