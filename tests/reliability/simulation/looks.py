"""An engine that looks at versions while they are written, and all that may come between: steps in any order.

The plugin is as it is, with the thread that follows. That thread goes on only when a step says so, to its next wait,
and its clock is virtual; a GPU does what was begun as far as a step says (`support.host_gpu`). So a case is the same
each time.
"""

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock, Semaphore, Thread
from types import SimpleNamespace

import pytest

from refitd_client.files.plain_file import open_folder
from refitd_plugin import trainer_follower
from refitd_plugin.source import VersionSource, mapped, place_of
from support.following import FollowingEngine, Outcome
from support.slot_trainer import SlotTrainer

MOST = 10  # versions of a case
BLOCK = 96  # bytes that a trainer writes at a time
RUN = "run"


class _OverError(BaseException):
    """Ends the thread."""


class Turns:
    """Has a thread go on to its next wait, and no further. `renames` are told to it there; `now` is its clock."""

    def __init__(self) -> None:
        self.now, self.renames = 0.0, list[Path]()
        self._go, self._waits = Semaphore(0), Semaphore(0)
        self._is_over = self._has_begun = False

    def thread(self, target: Callable[[], None], **_: object) -> Thread:
        """Stands for `threading.Thread`."""

        def run() -> None:
            with suppress(_OverError):
                target()

        self._thread = Thread(target=run)
        return self._thread

    def watch(self, folder: int) -> None:
        """Begin: stands for `FolderRenames`, as `wait` does."""
        if not self._has_begun:
            self._has_begun = True
            self._waits.acquire()  # until its thread waits for the first rename

    def wait(self) -> list[tuple[str, int]]:
        """In that thread."""
        self.rest()
        found = []
        while self.renames:
            with suppress(FileNotFoundError):
                path = self.renames.pop(0)
                found.append((path.name, open_folder(path)))
        return found

    def rest(self, _: float = 0.0) -> None:
        """In that thread: stands for `sleep` as well."""
        self._waits.release()
        self._go.acquire()
        if self._is_over:
            raise _OverError

    def step(self, seconds: float) -> None:
        """Have it go on."""
        self.now += seconds
        self._go.release()
        self._waits.acquire()

    def end(self) -> None:
        """End the thread."""
        self._is_over = True
        self._go.release()
        self._thread.join()


class Looks:
    """One case: an engine that serves step 2, and what `wanted` trainers want to publish from then on."""

    def __init__(self, root: Path, wanted: Path, chance: random.Random, patch: pytest.MonkeyPatch) -> None:
        self.root, self._wanted, self._chance = root, wanted, chance
        self.turns, self.seen = Turns(), Counter[str]()
        patch.setattr(trainer_follower, "FolderRenames", lambda: self.turns)
        patch.setattr(trainer_follower, "threading", SimpleNamespace(Thread=self.turns.thread, Lock=Lock))
        patch.setattr(
            trainer_follower, "time", SimpleNamespace(sleep=self.turns.rest, monotonic=lambda: self.turns.now)
        )
        self.stage, self.plain, self._is_honest = chance.random() < 0.5, chance.random() < 0.7, chance.random() < 0.5
        self.engine = FollowingEngine(root, patch, stage=self.stage, plain=self.plain, is_late=chance.random() < 0.7)
        self.trainer: SlotTrainer | None = None
        self.step, self.served = 0, 0
        self.is_known = True  # what the engine holds: what is served
        self.there = dict[int, VersionSource]()
        self._prepared: int | None = None
        self._known = {1, 2}  # their files are registered with the GPU
        for _ in range(2):
            self.step += 1
            self._appear(self.step)
            assert self.engine.take(self._folder(self.step)) is Outcome.SERVED
            self.served = self.step

    def _appear(self, step: int) -> None:
        shutil.copytree(self._wanted / RUN / f"v{step:06d}", self._folder(step))
        self.there[step] = mapped(place_of(str(self._folder(step)), self.root))

    def _folder(self, step: int) -> Path:
        return self.root / RUN / f"v{step:06d}"

    def draw(self) -> Callable[["Looks"], None]:
        """A step that can be taken now."""
        steps: dict[Callable[[Looks], None], int] = {
            Looks.follower_goes_on: 10,
            Looks.bus_moves: 4,
            Looks.time_passes: 1,
            Looks.byte_is_flipped: 1,
            Looks.version_is_prepared: 8 if self.trainer is None else 1,
        }
        if self.step < MOST - 1:  # the last one is for the end
            steps[Looks.slot_is_taken] = 12 if self.trainer is None else 1
            if self.trainer is None:
                steps[Looks.slot_is_followed] = 6
        if self.trainer is not None:
            steps |= {Looks.block_is_written: 4, Looks.progress_is_said: 4}
            steps |= {Looks.all_is_written: 5, Looks.version_is_committed: 2}
        if self._prepared is not None:
            steps |= {Looks.version_is_loaded: 12, Looks.plan_is_lost: 1, Looks.byte_is_flipped: 8}
        (step,) = self._chance.choices(list(steps), list(steps.values()))
        return step

    def slot_is_taken(self) -> None:
        """By a trainer, of the oldest version that is not served; or by another of what the one before writes into.
        Where there is no slot, a version comes in new files.
        """
        self.step += 1
        if (old := self._slot()) is None:
            self._appear(self.step)
            return
        want = mapped(place_of(str(self._wanted / RUN / f"v{self.step:06d}"), self._wanted))
        self.trainer = SlotTrainer(old, want, number=self.step)
        self.turns.renames.append(self.trainer.folder)
        self.seen["slots"] += 1
        if self._chance.random() < 0.8:
            self.follower_goes_on()

    def slot_is_followed(self) -> None:
        """A trainer writes all of it, and a GPU reads what is said before the commit."""
        self.slot_is_taken()
        if self.trainer is None:
            return
        self.all_is_written()
        for _ in range(8):
            self.follower_goes_on()
            self.bus_moves()
        self.version_is_committed()
        self.version_is_prepared()

    def _slot(self) -> VersionSource | None:
        """What is written into: of a trainer that is dead, where there is one and its folder was not taken away."""
        dead, self.trainer = self.trainer, None
        if dead is not None and self._chance.random() < 0.7:
            self.seen["taken over"] += 1
            old = self.there[self.served]
            return replace(old, place=replace(old.place, path=str(dead.folder.relative_to(self.root))))
        if dead is not None:
            shutil.rmtree(dead.folder)
        free = [step for step in self.there if step in self._known and step not in {self.served, self._prepared}]
        return self.there.pop(min(free)) if free else None

    def block_is_written(self) -> None:
        """The right bytes, or others that are written over before the commit."""
        name, begin, end = self._block()
        is_right = self._is_honest or self._chance.random() < 0.5
        self.writing.write(name, begin, end, None if is_right else self._chance.randbytes(end - begin))
        self.seen["blocks"] += 1

    def progress_is_said(self) -> None:
        """Whether it is so or not."""
        if self._is_honest:
            return
        name, _, end = self._block()
        self.writing.progress.reached(name, self._chance.choice([end, self.writing.sizes[name], 2**50]))
        self.seen["words"] += 1

    def _block(self) -> tuple[str, int, int]:
        name = self._chance.choice(self.writing.names)
        size = self.writing.sizes[name]
        begin = self._chance.randrange(0, size, BLOCK)
        return name, begin, min(begin + BLOCK, size)

    @property
    def writing(self) -> SlotTrainer:
        """The trainer that writes."""
        assert self.trainer is not None
        return self.trainer

    def all_is_written(self) -> None:
        """And said, as a trainer does that nothing happens to."""
        self.writing.write_all(block=self._chance.choice([BLOCK, 1000]))
        if self._chance.random() < 0.7:
            self.follower_goes_on()

    def version_is_committed(self) -> None:
        """With what is right, but for a byte in some cases: a trainer that breaks its word."""
        trainer = self.writing
        for name in trainer.names:
            trainer.write(name, 0, trainer.sizes[name])
        self.trainer = None
        if self._chance.random() < 0.2:
            self._flip(trainer.folder)
        self.there[self.step] = trainer.commit(self.step)
        self.seen["committed"] += 1

    def byte_is_flipped(self) -> None:
        """In a version that is there and not served, without a trace but the byte. After a proof of a version that was
        not looked at early, a loader that computes loads it: that is no matter of early looks.
        """
        step = self._drawn()
        if step != self.served and (self.plain or step != self._prepared):
            self._flip(self._folder(step))
            self.seen["flipped"] += 1

    def _flip(self, folder: Path) -> None:
        name = self._chance.choice(sorted(path.name for path in folder.glob("*.safetensors")))
        tensors = self.there[next(iter(self.there))].structure.headers[name].data_start
        with (folder / name).open("r+b") as file:
            status = os.fstat(file.fileno())
            place = self._chance.randrange(tensors, status.st_size)
            byte = os.pread(file.fileno(), 1, place)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1]), place)
            os.utime(file.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))

    def follower_goes_on(self) -> None:
        """By so many waits."""
        for _ in range(self._chance.randint(1, 8)):
            self.turns.step(0.002)

    def time_passes(self) -> None:
        """So that a trainer that says nothing is taken for dead."""
        self.turns.step(self._chance.choice([0.3, 6.0, 11.0]))

    def bus_moves(self) -> None:
        """What was begun is done in part."""
        self.engine.gpu.work(self._chance.randint(1, 3))

    def version_is_prepared(self) -> None:
        """One that is there, most often the newest. What is refused is really not what its manifest says."""
        step = self._drawn()
        self._known.add(step)
        ahead = self.engine.follower._ahead
        self.seen["looked"] += ahead is not None and ahead.begun > 0
        self._prepared = step if self.engine.prepare(self._folder(step)) else None
        if self._prepared is None:
            assert self._differs(step), self.engine.reason
            self.seen["unproved"] += 1
        else:
            self.seen["ahead"] += self.engine.ahead > 0

    def version_is_loaded(self) -> None:
        """The one that was prepared: no service has another loaded."""
        step, self._prepared = self._prepared, None
        assert step is not None
        outcome = self.engine.load(self._folder(step))
        self.seen[outcome.value] += 1
        if outcome is Outcome.SERVED:
            self.served, self.is_known = step, True
        elif outcome is Outcome.UNKNOWN:  # both are damaged: the one before since it was copied to the GPU
            assert self._differs(step), self.engine.reason
            assert not self.is_known or self._differs(self.served), self.engine.reason
            self.is_known = False
        else:
            is_asked_again = outcome is Outcome.REFUSED and "try again" in self.engine.reason
            assert self._differs(step) or is_asked_again, self.engine.reason

    def plan_is_lost(self) -> None:
        """As after a load that failed."""
        self.engine.rank.engine.loading.plan = None

    def _drawn(self) -> int:
        there = sorted(self.there)
        return self._chance.choice([there[-1], there[-1], *there])

    def _differs(self, step: int) -> bool:
        good = (self._wanted / RUN / f"v{step:06d}").glob("*.safetensors")
        return any(path.read_bytes() != (self._folder(step) / path.name).read_bytes() for path in good)

    def hold(self) -> None:
        """The promise: what is served is the version that was loaded last, by every bit."""
        held = self.engine.held(MOST)
        assert held == self.served or not self.is_known, f"it holds {held}, and not {self.served}"

    def heal(self) -> None:
        """Nothing else happens: the next version is good, and served; where a plan was lost, at the second try."""
        self.slot_is_taken()
        if self.trainer is not None:
            self.all_is_written()
            self.there[self.step] = self.trainer.commit(self.step)
        folder = self._folder(self.step)
        if self.engine.take(folder) is Outcome.REFUSED and "try again" in self.engine.reason:
            self.engine.take(folder)
        self.served, self.is_known = self.step, True
        self.hold()
