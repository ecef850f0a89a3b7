"""Ranks that hold slices look at a version while it is written, each at its share of the tensors: what they serve then
is the version, by every bit, or what was served before, whichever rank looked at a byte and whichever has loaded it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd_client.contract.plugin import UpdateOutcome
from refitd_client.files.plain_file import open_folder
from refitd_client.validation.proof import share_of
from refitd_plugin.source import VersionSource
from support.following import root_in_memory
from support.following_ranks import FollowingRanks, published_slices
from support.provable import damage
from support.sliced_rank import SHAPES
from support.slot_trainer import SlotTrainer

GARBAGE = b"\x3c"  # in bfloat16 a small number: only fingerprints tell


@pytest.fixture
def root() -> Iterator[Path]:
    with root_in_memory() as root:
        yield root


class RanksStory:
    """Two ranks that serve step 3, and a trainer that writes step 4 into the files of step 1."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, *, stage: bool = False, follows: bool = True) -> None:
        self.ranks = FollowingRanks(root, patch, stage=stage, follows=follows)
        self.first, *_ = [self._served(published_slices(root, step)) for step in (1, 2, 3)]
        self.trainer = SlotTrainer(self.first, published_slices(root.parent / "elsewhere", 4))

    def _served(self, source: VersionSource) -> VersionSource:
        assert self.ranks.take(source.place.folder), self.ranks.reason
        return source

    @property
    def incoming(self) -> VersionSource:
        """What is written, before it has its name."""
        return replace(self.first, place=replace(self.first.place, path=f"run/{self.trainer.folder.name}"))

    def look(self, data: bytes | None = None) -> None:
        """Write all, or one byte again and again behind the headers, and wait until both ranks have looked at it."""
        trainer = self.trainer
        for name in trainer.names:
            begin = 0 if data is None else self.first.structure.headers[name].data_start
            size = trainer.sizes[name]
            trainer.write(name, begin, size, None if data is None else data * (size - begin))
            trainer.progress.reached(name, size)
        self.ranks.await_look(trainer.folder)


@pytest.mark.parametrize("stage", [False, True], ids=["read", "with a staging buffer"])
def test_each_rank_reads_its_share_before_the_version_has_its_name(
    root: Path, monkeypatch: pytest.MonkeyPatch, stage: bool
) -> None:
    """And none copies anything into a staging buffer: that is for the rank that holds the whole model."""
    story = RanksStory(root, monkeypatch, stage=stage)
    story.look()
    seen = [
        [name for batches in looker.follower._ahead.batches.values() for batch in batches for name in batch.names]
        for looker in story.ranks.lookers
    ]
    assert [sorted(names) for names in seen] == [
        sorted(share_of(story.first.structure.headers, rank, 2)) for rank in range(2)
    ]
    assert sorted(name for names in seen for name in names) == sorted(SHAPES)
    version = story.trainer.commit(4).place.folder
    assert story.ranks.take(version), story.ranks.reason
    assert all(ahead > 0 for ahead in story.ranks.ahead)
    assert story.ranks.holds(4)


def test_what_was_wrong_when_it_was_read_is_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = RanksStory(root, monkeypatch)
    story.look(GARBAGE)
    for name in story.trainer.names:
        story.trainer.write(name, 0, story.trainer.sizes[name])
    assert story.ranks.take(story.trainer.commit(4).place.folder), story.ranks.reason
    assert story.ranks.ahead == [0, 0]
    assert story.ranks.holds(4)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_byte_that_changes_after_the_look_is_never_served_whichever_rank_looked_at_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Only the rank in whose share it is has looked at it, and others load it."""
    story = RanksStory(root, monkeypatch)
    story.look()
    damage(story.incoming, name)
    version = story.trainer.commit(4).place.folder
    assert story.ranks.prepare(version), story.ranks.reason
    answers = story.ranks.load(version)
    assert {each.outcome for each in answers} == {UpdateOutcome.RESTORED}
    assert all(f"tensor {name} ha" in each.reason for each in answers), answers[0].reason
    assert story.ranks.holds(3)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_damaged", [True, False])
def test_nothing_that_was_looked_at_early_is_served_where_one_rank_cannot_say_what_it_has(
    root: Path, monkeypatch: pytest.MonkeyPatch, rank: int, is_damaged: bool
) -> None:
    """Its load goes through the loader since, and no fingerprint of its slices is taken."""
    story = RanksStory(root, monkeypatch)
    story.look()
    if is_damaged:
        damage(story.incoming, "down")
    version = story.trainer.commit(4).place.folder
    assert story.ranks.prepare(version), story.ranks.reason
    story.ranks.engine.members[rank].engine._prepared.proof = None  # as if it had looked at nothing early
    story.ranks.engine.members[rank].engine.loading.plan.loader_only = "a test says so"
    answers = story.ranks.load(version)
    assert {each.outcome for each in answers} == {UpdateOutcome.RESTORED}
    assert all("not every rank's load of it could be checked: try again" in each.reason for each in answers)
    assert story.ranks.holds(3)


def test_a_rank_whose_plan_is_gone_has_the_version_read_again_and_none_is_followed_until_all_have_loaded(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = RanksStory(root, monkeypatch)
    story.look()
    version = story.trainer.commit(4).place.folder
    assert story.ranks.prepare(version), story.ranks.reason
    story.ranks.engine.members[1].engine.loading.plan = None
    answers = story.ranks.load(version)
    assert {each.outcome for each in answers} == {UpdateOutcome.REFUSED}
    assert all("this load would not be checked: try again" in each.reason for each in answers)
    assert story.ranks.holds(3)
    assert story.ranks.take(version), story.ranks.reason
    assert story.ranks.ahead == [0, 0]
    assert story.ranks.holds(4)


STEPS = st.lists(
    st.tuples(st.sampled_from(["right", "wrong", "look"]), st.integers(0, 8), st.integers(0, 1)), max_size=30
)


@given(STEPS, st.none() | st.tuples(st.sampled_from(sorted(SHAPES)), st.booleans()), st.sets(st.integers(0, 1)))
@settings(max_examples=30, deadline=None)
def test_whatever_ranks_looked_at_and_whenever_they_serve_what_was_committed_or_what_they_had(
    steps: list[tuple[str, int, int]], damaged: tuple[str, bool] | None, looking: set[int]
) -> None:
    """Files are written wrong and right and wrong again, and either rank looks at any time, also before. A version of
    which a byte has changed, before its name or after that, is not served; one that is right is.
    """
    with root_in_memory() as root, pytest.MonkeyPatch.context() as patch:
        story = RanksStory(root, patch, follows=False)
        trainer, lookers = story.trainer, story.ranks.lookers
        with closing_folder(trainer.folder) as folder:
            aheads = [looker.follower._started(folder) for looker in lookers]
        for what, at, rank in steps:
            name = trainer.names[at % len(trainer.names)]
            begin, size = story.first.structure.headers[name].data_start, trainer.sizes[name]
            match what:
                case "right":
                    trainer.write(name, 0, size)
                case "wrong":
                    trainer.write(name, begin, size, bytes([at + 1]) * (size - begin))
                case _:
                    aheads[rank].advance(name, size)
        for name in trainer.names:
            trainer.write(name, 0, trainer.sizes[name])
            for rank in looking:
                aheads[rank].advance(name, trainer.sizes[name])
        if damaged is not None and damaged[1]:
            damage(story.incoming, damaged[0])
        source = trainer.commit(4)
        if damaged is not None and not damaged[1]:
            damage(source, damaged[0])
        is_served = story.ranks.take(source.place.folder)
        assert is_served == (damaged is None), story.ranks.reason
        assert story.ranks.holds(4 if is_served else 3)


@contextmanager
def closing_folder(path: Path) -> Iterator[int]:
    """A folder, open for as long as the context lasts."""
    folder = open_folder(path)
    try:
        yield folder
    finally:
        os.close(folder)
