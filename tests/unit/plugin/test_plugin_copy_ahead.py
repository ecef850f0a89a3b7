"""A version is copied while its trainer writes it, and counts only by the manifest that it is committed with."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings

from refitd_client.files.plain_file import open_folder
from refitd_plugin import trainer_follower
from refitd_plugin.proving import VersionProver
from refitd_plugin.source import VersionSource
from support.provable import damage, published, weights
from support.slot_trainer import (
    STEPS,
    AheadReader,
    NoRenames,
    SlotTrainer,
    bytes_at,
    bytes_of,
    killed_in_mid_write,
    scribble,
)

SECONDS = 20.0


class Stand:
    """A rank that has proved a version of a run, and the version that the trainer writes next."""

    def __init__(self, root: Path, *, follows: bool = True) -> None:
        (root / ".refitd").mkdir(exist_ok=True)
        self.reader = AheadReader()
        if not follows:
            self.reader.ahead._renames = NoRenames()
        self.prover = VersionProver(self.reader, 0, 1)
        self.old = published(root, 1, weights(1))
        self.wanted = published(root / "elsewhere", 2, weights(2))
        assert self.prover.prove(self.old)[0].fault == ""
        self.reader.moved.clear()
        self.reader.copied.clear()

    def await_copy(self) -> None:
        """Wait until something was copied since the last version was proved."""
        assert self.reader.copied.wait(SECONDS)
        self.reader.copied.clear()

    def check(self, source: VersionSource) -> int:
        """Prove what was committed. What would be loaded is the file, byte by byte. Returns the bytes copied ahead."""
        proof, staged = self.prover.prove(source)
        assert (proof.fault, proof.staged) == ("", True)
        assert staged is not None
        for name, content in bytes_of(source.place.folder, source.structure.headers).items():
            assert bytes_at(staged[name].address, len(content)) == content
        self.reader.copied.clear()
        return proof.ahead


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path)


def test_what_is_written_is_copied_before_the_version_has_its_name(stand: Stand) -> None:
    trainer = SlotTrainer(stand.old, stand.wanted)
    copied = 0
    for name in trainer.names:
        trainer.write(name, 0, trainer.sizes[name])
        trainer.progress.reached(name, trainer.sizes[name])
        stand.await_copy()
        copied += trainer.sizes[name]
    assert stand.check(trainer.commit(2)) == copied == sum(trainer.sizes.values())


def test_the_next_version_is_followed_as_well(stand: Stand) -> None:
    trainer = SlotTrainer(stand.old, stand.wanted)
    trainer.write_all()
    stand.await_copy()
    second = trainer.commit(2)
    assert stand.check(second) > 0
    third = published(stand.wanted.place.root, 3, weights(3))
    trainer = SlotTrainer(second, third)
    trainer.write_all()
    stand.await_copy()
    assert stand.check(trainer.commit(3)) > 0


def test_a_copy_that_was_taken_half_way_is_finished_there_and_the_next_one_followed(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = SlotTrainer(stand.old, stand.wanted)
    first = trainer.names[0]
    trainer.write(first, 0, trainer.sizes[first])
    trainer.progress.reached(first, trainer.sizes[first])
    stand.await_copy()
    for name in trainer.names[1:]:
        trainer.write(name, 0, trainer.sizes[name])
    second = trainer.commit(2)
    assert stand.check(second) == trainer.sizes[first]
    third = published(stand.wanted.place.root, 3, weights(3))
    trainer = SlotTrainer(second, third)
    trainer.write_all()
    stand.await_copy()  # by the same thread, which has left the one before
    assert stand.check(trainer.commit(3)) > 0
    assert not caplog.records


def test_a_copy_that_gives_way_to_another_version_is_not_gone_on_with(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = SlotTrainer(stand.old, stand.wanted)
    trainer.write(trainer.names[0], 0, trainer.sizes[trainer.names[0]])
    trainer.progress.reached(trainer.names[0], trainer.sizes[trainer.names[0]])
    stand.await_copy()
    other = published(stand.old.place.root, 5, weights(5))
    assert stand.check(other) == 0
    trainer.write_all()
    trainer = SlotTrainer(other, published(stand.wanted.place.root, 6, weights(6)), number=1)
    trainer.write_all()
    stand.await_copy()  # by the same thread, which has left the one before
    assert stand.check(trainer.commit(6)) > 0
    assert not caplog.records


def test_a_version_in_new_files_is_copied_when_it_has_come(stand: Stand) -> None:
    source = published(stand.old.place.root, 2, weights(2))
    assert stand.check(source) == 0


def test_the_files_of_what_is_served_from_memory_are_not_copied(tmp_path: Path) -> None:
    stand = Stand(tmp_path, follows=False)
    stand.reader.wants_files = False
    trainer = SlotTrainer(stand.old, stand.wanted)
    trainer.write_all()
    folder = open_folder(trainer.folder)
    stand.reader.ahead.follow(folder)
    os.close(folder)
    assert stand.reader.moved == []


def test_files_of_another_size_are_not_followed(tmp_path: Path) -> None:
    stand = Stand(tmp_path, follows=False)
    trainer = SlotTrainer(stand.old, stand.wanted)
    name = trainer.names[0]
    os.truncate(trainer.folder / name, trainer.sizes[name] + 8)
    trainer.progress.reached(name, trainer.sizes[name])
    folder = open_folder(trainer.folder)
    stand.reader.ahead.follow(folder)
    os.close(folder)
    assert stand.reader.moved == []


@given(STEPS)
@settings(max_examples=60, deadline=None)
def test_whatever_was_copied_ahead_what_is_proved_is_what_the_manifest_says(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    """Blocks are written wrong and right and wrong again, and copied at any time, also before they were written."""
    stand = Stand(tmp_path_factory.mktemp("root"), follows=False)
    trainer = SlotTrainer(stand.old, stand.wanted)
    folder = open_folder(trainer.folder)
    copy = stand.reader.ahead._started(folder)
    os.close(folder)
    assert copy is not None
    scribble(trainer, copy, steps)
    del copy
    trainer.write_all()
    stand.check(trainer.commit(2))


def test_damage_is_found_though_the_right_bytes_were_copied_ahead(stand: Stand) -> None:
    """The manifest is of other bytes than those that were written: the trainer's own fault."""
    trainer = SlotTrainer(stand.old, stand.wanted)
    name = trainer.names[0]
    trainer.write_all()
    stand.await_copy()
    trainer.write(name, trainer.sizes[name] - 4, trainer.sizes[name], b"\x01\x02\x03\x04")
    stand.reader.ahead._drop()  # as after a restart of the engine
    proof, staged = stand.prover.prove(trainer.commit(2))
    assert "has another fingerprint" in proof.fault
    assert staged is None


def test_a_block_that_was_copied_before_it_was_right_is_copied_again(stand: Stand) -> None:
    trainer = SlotTrainer(stand.old, stand.wanted)
    for name in trainer.names:
        trainer.progress.reached(name, trainer.sizes[name])  # and nothing is written yet
    stand.await_copy()
    for name in trainer.names:
        trainer.write(name, 0, trainer.sizes[name])
    assert stand.check(trainer.commit(2)) == 0


@pytest.mark.parametrize("blocks", range(1, 6))
def test_nothing_of_a_trainer_that_is_killed_is_in_the_next_version(
    tmp_path: Path, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed when it has written its first, second, … block; the next trainer takes another slot."""
    monkeypatch.setattr(trainer_follower, "_SILENT_SECONDS", 0.05)
    stand = Stand(tmp_path)
    other = published(tmp_path, 2, weights(4))
    assert stand.prover.prove(other)[0].fault == ""
    stand.reader.copied.clear()
    with killed_in_mid_write(stand.old, blocks):
        stand.await_copy()
    trainer = SlotTrainer(other, stand.wanted)
    trainer.write_all()
    stand.check(trainer.commit(3))


def test_a_trainer_that_falls_silent_gives_the_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_follower, "_SILENT_SECONDS", 0.05)
    stand = Stand(tmp_path, follows=False)
    trainer = SlotTrainer(stand.old, stand.wanted)
    trainer.progress.reached(trainer.names[0], 64)
    folder = open_folder(trainer.folder)
    stand.reader.ahead.follow(folder)
    os.close(folder)
    assert len(stand.reader.moved) == 1
    assert stand.reader.ahead._ahead is None


def test_a_publication_that_was_given_up_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with a value that is not finite: its trainer, which lives, has removed the folder."""
    monkeypatch.setattr(trainer_follower, "_SILENT_SECONDS", float("inf"))
    stand = Stand(tmp_path, follows=False)
    trainer = SlotTrainer(stand.old, stand.wanted)
    trainer.progress.reached(trainer.names[0], 64)
    stand.reader.move = lambda *_: shutil.rmtree(trainer.folder)
    folder = open_folder(trainer.folder)
    stand.reader.ahead.follow(folder)
    os.close(folder)
    assert not trainer.folder.exists()
    assert stand.reader.ahead._ahead is None


def test_a_slot_whose_trainer_says_nothing_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose tensors are in host memory."""
    stand = Stand(tmp_path, follows=False)
    monkeypatch.setattr(trainer_follower, "_FIRST_WORD_SECONDS", 0.05)
    trainer = SlotTrainer(stand.old, stand.wanted)
    trainer.progress.remove()
    folder = open_folder(trainer.folder)
    stand.reader.ahead.follow(folder)
    os.close(folder)
    assert stand.reader.moved == []


def test_a_kernel_without_room_for_a_watch_costs_the_early_copy_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise OSError(24, "inotify: Too many open files")

    monkeypatch.setattr(trainer_follower, "FolderRenames", refuse)
    stand = Stand(tmp_path)
    assert [record.message for record in caplog.records if "follows no version" in record.message]
    trainer = SlotTrainer(stand.old, stand.wanted)
    trainer.write_all()
    assert stand.check(trainer.commit(2)) == 0


def test_damage_after_the_commit_is_found_by_a_rank_that_reads_the_files(stand: Stand) -> None:
    trainer = SlotTrainer(stand.old, stand.wanted)
    trainer.write_all()
    source = trainer.commit(2)
    damage(source, "e")
    stand.reader.ahead._drop()
    assert "tensor e has another fingerprint" in stand.prover.prove(source)[0].fault
