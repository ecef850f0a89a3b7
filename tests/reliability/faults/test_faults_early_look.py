"""A slot that an engine looks at while it is written turns out to be another's, or to be something else than its
`.progress` says: the engine serves the weights of a committed version, by every bit, or refuses, and never others.

The engine is the plugin as it is, on host memory in the place of a GPU (`support.host_gpu`): it follows in its own
thread, by inotify, real files on tmpfs.
"""

import gc
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from weakref import ref

import pytest

from refitd_plugin import trainer_follower
from refitd_plugin.source import VersionPlace, VersionSource
from support.following import FollowingEngine, Outcome, published, root_in_memory
from support.mini_sglang import tiny_weights
from support.provable import damage
from support.slot_trainer import SlotTrainer

TENSORS = sorted(tiny_weights(0))
GARBAGE = b"\x3c"  # in bfloat16 a small number: only fingerprints tell


@pytest.fixture
def root() -> Iterator[Path]:
    with root_in_memory() as root:
        yield root


class Story:
    """An engine that serves step 3, and a trainer that writes step 4 into the files of step 1."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, *, stage: bool) -> None:
        self.engine = FollowingEngine(root, patch, stage=stage)
        self.first, self.second, _ = [self._served(published(root, step)) for step in (1, 2, 3)]
        self.wanted = published(root.parent / "elsewhere", 4)
        self.shards: list[str] | None = None

    @cached_property
    def trainer(self) -> SlotTrainer:
        """It begins when a test asks for it: the engine looks at what it says at once."""
        return SlotTrainer(self.first, self.wanted, shards=self.shards)

    def _served(self, source: VersionSource) -> VersionSource:
        assert self.engine.take(source.place.folder) is Outcome.SERVED
        return source

    def say(self, trainer: SlotTrainer, *names: str) -> None:
        """Say that shards are there, and wait until the engine has looked at them."""
        for name in names:
            trainer.progress.reached(name, trainer.sizes[name])
        self.engine.await_look(trainer.folder, sum(trainer.sizes[name] for name in names))

    def write(self, trainer: SlotTrainer, *names: str, data: bytes | None = None) -> None:
        """Write shards whole: what is wanted, or one byte again and again behind the header."""
        for name in names:
            begin = 0 if data is None else self.first.structure.headers[name].data_start
            size = trainer.sizes[name]
            trainer.write(name, begin, size, None if data is None else data * (size - begin))

    def looked_at(self) -> Path:
        """The folder of step 4, all of whose shards the engine has looked at before the commit."""
        self.write(self.trainer, *self.trainer.names)
        self.say(self.trainer, *self.trainer.names)
        return self.trainer.commit(4).place.folder

    def taken_over(self) -> SlotTrainer:
        """Another trainer that has the files from now on, in a folder of its own."""
        folder = self.trainer.folder
        place = VersionPlace(self.first.place.root, str(folder.relative_to(self.first.place.root)))
        return SlotTrainer(replace(self.first, place=place), self.wanted, number=1)


def said_before_it_is_written(story: Story) -> SlotTrainer:
    story.say(story.trainer, *story.trainer.names)
    story.write(story.trainer, *story.trainer.names)
    return story.trainer


def more_than_there_is(story: Story) -> SlotTrainer:
    first, *others = story.trainer.names
    story.write(story.trainer, first)
    for name in story.trainer.names:
        story.trainer.progress.reached(name, 2**60)
    story.engine.await_look(story.trainer.folder, sum(story.trainer.sizes.values()))
    story.write(story.trainer, *others)
    return story.trainer


def of_other_shards_than_there_are(story: Story) -> SlotTrainer:
    """As from a publisher that cuts shards otherwise: its numbers stand for other files."""
    story.shards = ["one"]
    story.trainer.progress.reached("one", 2**40)
    first, *others = story.trainer.names
    story.engine.await_look(story.trainer.folder, story.trainer.sizes[first])
    story.write(story.trainer, first, *others)
    return story.trainer


def written_again_after_it_was_said(story: Story) -> SlotTrainer:
    story.write(story.trainer, *story.trainer.names, data=GARBAGE)
    story.say(story.trainer, *story.trainer.names)
    story.write(story.trainer, *story.trainer.names)
    return story.trainer


def taken_over_by_another_trainer(story: Story) -> SlotTrainer:
    first, *_ = story.trainer.names
    story.write(story.trainer, first, data=GARBAGE)
    story.say(story.trainer, first)
    other = story.taken_over()
    other.write_all()
    return other


def taken_over_while_the_first_one_writes_on(story: Story) -> SlotTrainer:
    """The first has the files open, and what it still says is read: the engine has opened that file. It writes last
    what the other one wants, by chance.
    """
    first, *others = story.trainer.names
    story.write(story.trainer, first, data=GARBAGE)
    story.say(story.trainer, first)
    other = story.taken_over()
    story.trainer.folder = other.folder
    other.write_all()
    story.write(story.trainer, *others, data=GARBAGE)
    story.say(story.trainer, *story.trainer.names)
    story.write(story.trainer, *others)
    return other


RIGHT = (
    said_before_it_is_written,
    more_than_there_is,
    of_other_shards_than_there_are,
    written_again_after_it_was_said,
    taken_over_by_another_trainer,
    taken_over_while_the_first_one_writes_on,
)


@pytest.mark.parametrize("stage", [True, False], ids=["copied", "read"])
@pytest.mark.parametrize("writes", RIGHT, ids=lambda writes: writes.__name__)
def test_what_is_right_when_it_is_committed_is_served_whatever_was_seen_of_it_before(
    root: Path, monkeypatch: pytest.MonkeyPatch, writes: Callable[[Story], SlotTrainer], stage: bool
) -> None:
    story = Story(root, monkeypatch, stage=stage)
    version = writes(story).commit(4).place.folder
    assert story.engine.take(version) is Outcome.SERVED, story.engine.reason
    assert (story.engine.held(4), story.engine.ahead) == (4, 0)  # nothing that was seen before counts


@pytest.mark.parametrize("stage", [True, False], ids=["copied", "read"])
@pytest.mark.parametrize("when", ["before the commit", "before the proof", "before the load"])
@pytest.mark.parametrize("name", TENSORS)
def test_a_byte_that_changes_after_the_look_is_never_served(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, when: str, stage: bool
) -> None:
    """The version's file is wrong then. An engine that has copied the right one serves that; one that has read it
    finds out after its load, and puts back what it had.
    """
    story = Story(root, monkeypatch, stage=stage)
    trainer = story.trainer
    story.write(trainer, *trainer.names)
    story.say(trainer, *trainer.names)
    if when == "before the commit":
        damage(replace(story.first, place=replace(story.first.place, path=f"run/{trainer.folder.name}")), name)
    source = trainer.commit(4)
    if when == "before the proof":
        damage(source, name)
    assert story.engine.prepare(source.place.folder), story.engine.reason
    assert story.engine.ahead == sum(trainer.sizes.values())
    if when == "before the load":
        damage(source, name)
    outcome = story.engine.load(source.place.folder)
    if when == "before the load":  # its files are not what they were
        assert (outcome, story.engine.held(4)) == (Outcome.REFUSED, 3)
    else:
        assert (outcome, story.engine.held(4)) == ((Outcome.SERVED, 4) if stage else (Outcome.RESTORED, 3))


@pytest.mark.parametrize("has_plan", [True, False], ids=["by its plan", "whose plan is gone"])
@pytest.mark.parametrize("stage", [True, False], ids=["copied", "read"])
@pytest.mark.parametrize("name", TENSORS)
def test_what_a_loader_computes_is_of_bytes_that_were_proved(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, stage: bool, has_plan: bool
) -> None:
    """A model that pads, transposes and computes loads some of its tensors from the file, whatever lies on the GPU."""
    engine = FollowingEngine(root, monkeypatch, stage=stage, plain=False, follows=False)
    first, *_ = sources = [published(root, step) for step in (1, 2, 3)]
    assert [engine.take(source.place.folder) for source in sources] == [Outcome.SERVED] * 3
    trainer = SlotTrainer(first, published(root.parent / "elsewhere", 4))
    trainer.write_all()
    engine.look(trainer.folder)
    if not has_plan:
        engine.rank.engine.loading.plan = None
    source = trainer.commit(4)
    damage(source, name)
    outcome = engine.take(source.place.folder)
    assert (outcome, engine.held(4)) == (Outcome.UNPROVED, 3)


def test_what_was_copied_ahead_is_not_loaded_where_the_load_would_go_another_way(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is gone, as after a load that failed: the loader reads the file. The second time all of it was read."""
    story = Story(root, monkeypatch, stage=True)
    version = story.looked_at()
    assert story.engine.prepare(version)
    story.engine.rank.engine.loading.plan = None
    assert (story.engine.load(version), story.engine.held(4)) == (Outcome.REFUSED, 3)
    assert "try again" in story.engine.reason
    assert (story.engine.take(version), story.engine.held(4), story.engine.ahead) == (Outcome.SERVED, 4, 0)


def test_a_version_that_is_to_be_loaded_is_not_overwritten_by_the_next_one_that_is_looked_at(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of a version has the GPU's buffer until the engine has loaded it: the next one is read where it is."""
    story = Story(root, monkeypatch, stage=True)
    version = story.looked_at()
    assert story.engine.prepare(version), story.engine.reason
    following = SlotTrainer(story.second, published(root.parent / "elsewhere", 5), number=1)
    story.write(following, *following.names, data=GARBAGE)
    story.say(following, *following.names)
    assert story.engine.load(version) is Outcome.SERVED, story.engine.reason
    assert story.engine.held(5) == 4


@pytest.mark.parametrize("stage", [True, False], ids=["copied", "read"])
def test_what_a_gpu_may_still_read_stays_mapped_though_its_version_was_given_up(
    root: Path, monkeypatch: pytest.MonkeyPatch, stage: bool
) -> None:
    """The trainer has removed its folder, and another version is prepared, before the GPU has read what was begun."""
    engine = FollowingEngine(root, monkeypatch, stage=stage, is_late=True, follows=False)
    first, *_ = sources = [published(root, step) for step in (1, 2, 3)]
    assert [engine.take(source.place.folder) for source in sources] == [Outcome.SERVED] * 3
    trainer = SlotTrainer(first, published(root.parent / "elsewhere", 4))
    trainer.write_all()
    engine.look(trainer.folder)
    files = [ref(file) for file in engine.follower._ahead.files.values()]
    shutil.rmtree(trainer.folder)
    del first, sources, trainer

    def check() -> None:
        assert all(file() is not None for file in files)

    engine.gpu.before_all(check)
    assert engine.take(published(root, 5).place.folder) is Outcome.SERVED
    gc.collect()
    assert not any(file() is not None for file in files), "and no longer"


@pytest.mark.parametrize("stage", [True, False], ids=["copied", "read"])
@pytest.mark.parametrize("comes", ["another", "none", "none, and the trainer is gone"])
def test_a_version_that_was_looked_at_and_never_comes_is_in_no_other(
    root: Path, monkeypatch: pytest.MonkeyPatch, comes: str, stage: bool
) -> None:
    """The service dies before it has it prepared, or knows of another by then; the next one is followed as ever."""
    monkeypatch.setattr(trainer_follower, "_SILENT_SECONDS", 0.2)
    story = Story(root, monkeypatch, stage=stage)
    trainer = story.trainer
    story.write(trainer, *trainer.names, data=GARBAGE)
    story.say(trainer, *trainer.names)
    if comes == "another":
        other = published(root, 5)
        assert (story.engine.take(other.place.folder), story.engine.held(5)) == (Outcome.SERVED, 5)
    elif comes == "none":
        story.write(trainer, *trainer.names)
        trainer.commit(4)  # no service has it prepared
    second = replace(story.first, place=replace(story.first.place, path="run/v000002"))
    wanted = published(root.parent / "elsewhere", 6)
    trainer = SlotTrainer(second, wanted, number=7)
    story.write(trainer, *trainer.names)
    story.say(trainer, *trainer.names)
    version = trainer.commit(6).place.folder
    assert (story.engine.take(version), story.engine.held(6)) == (Outcome.SERVED, 6)
    assert story.engine.ahead == sum(trainer.sizes.values())
