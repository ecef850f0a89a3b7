"""A publisher writes into the files of an old version: the right ones, all of them, and nobody else's."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refitd_client import InvalidWeightsError, PublishOptions, StorageError, WeightPublisher
from refitd_client.checkpoint import header
from refitd_client.contract.naming import slots_path
from refitd_client.files import durable
from support import durable_effects, published
from support.inside import in_process


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """On a disk recycled files are written by calls, in memory they are mapped."""
    if request.param == "disk":
        yield tmp_path / "root"
        return
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="refitd-slots-", dir="/dev/shm"))
    yield folder / "root"
    shutil.rmtree(folder)


@pytest.fixture
def publisher(root: Path) -> Iterator[WeightPublisher]:
    with WeightPublisher(root, "run", options=PublishOptions(max_shard_bytes=256)) as opened:
        yield opened


def test_what_a_failed_publication_leaves_is_said_with_what_to_do_where_it_cannot_be_removed(
    publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(durable, "remove_folder", refuse)
    monkeypatch.setattr(durable, "sync_folder", refuse)
    with pytest.raises(StorageError):
        publisher.publish({"a": np.ones(4, np.float32)}, step=1)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "could not be removed ([Errno 13] Permission denied): it is no version, nothing reads it" in told
    assert "Delete it, or the run's next publisher or the service of this root does" in told


def inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in published.shards(folder)}


def slots_in(root: Path) -> list[str]:
    return os.listdir(root / slots_path("run"))


def expect(folder: Path, step: int) -> None:
    published.check(folder)
    got = published.tensors(folder)
    assert all(np.array_equal(got[name], value) for name, value in durable_effects.weights(step).items())


def test_a_version_lies_in_the_files_of_the_slot(root: Path, publisher: WeightPublisher) -> None:
    slot = durable_effects.make_slot(root)
    before, times = inodes(slot), {path.stat().st_mtime_ns for path in published.shards(slot)}
    path = publisher.publish(durable_effects.weights(3), step=3).path
    assert inodes(path) == before
    assert slots_in(root) == []
    expect(path, 3)
    assert not times & {file.stat().st_mtime_ns for file in published.shards(path)}, "times tell of changes"


def test_a_slot_that_comes_round_again_is_written_again(root: Path, publisher: WeightPublisher) -> None:
    """Its mapping is kept, and stays on its file whatever its name."""
    slot = durable_effects.make_slot(root)
    before = inodes(slot)
    for step in range(1, 5):
        path = publisher.publish(durable_effects.weights(step), step=step).path
        assert inodes(path) == before
        expect(path, step)
        for file in path.iterdir():
            if file.suffix != ".safetensors":
                file.unlink()
        path.rename(slot)


def test_without_a_slot_of_the_same_layout_files_are_new(root: Path, publisher: WeightPublisher) -> None:
    """The model's inventory has changed: another shape, of as many bytes."""
    slot = durable_effects.make_slot(root)
    other = {"a": np.ones((4, 8), np.float32), "b": np.ones((16, 4), np.float32)}
    path = publisher.publish(other, step=1).path
    published.check(path)
    assert slots_in(root) == [slot.name]


def test_a_slot_with_a_second_hard_link_is_not_written(root: Path, publisher: WeightPublisher, tmp_path: Path) -> None:
    """Whoever has the other name would see another version in it."""
    slot = durable_effects.make_slot(root)
    shard = published.shards(slot)[0]
    elsewhere = root.parent / "mine.safetensors"
    os.link(shard, elsewhere)
    content = elsewhere.read_bytes()
    path = publisher.publish(durable_effects.weights(2), step=2).path
    expect(path, 2)
    assert elsewhere.read_bytes() == content
    assert slots_in(root) == [], "it is thrown away"


def _keep_a_manifest(slot: Path) -> None:
    (slot / "refit.json").write_text("{}")


def _cut_off(slot: Path) -> None:
    os.truncate(published.shards(slot)[0], 10)


def _lead_astray(slot: Path) -> None:
    shard = published.shards(slot)[0]
    shard.rename(slot.parents[3] / "elsewhere")
    shard.symlink_to(slot.parents[3] / "elsewhere")


@pytest.mark.parametrize("spoil", [_keep_a_manifest, _cut_off, _lead_astray])
def test_a_slot_that_is_not_what_its_name_says_is_thrown_away(
    root: Path, publisher: WeightPublisher, spoil: Any
) -> None:
    slot = durable_effects.make_slot(root)
    spoil(slot)
    path = publisher.publish(durable_effects.weights(2), step=2).path
    expect(path, 2)
    assert slots_in(root) == []
    assert published.leftovers(root / "run") == []


def test_the_service_takes_the_slot_first(
    root: Path, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right before the publisher's rename: the version goes into new files."""
    slot = durable_effects.make_slot(root)
    before = inodes(slot)
    rename = durable.rename

    def slow(old: Path, new: Path) -> None:
        if old == slot and slot.exists():
            slot.rename(root / "trash")
        rename(old, new)

    monkeypatch.setattr(durable, "rename", slow)
    path = publisher.publish(durable_effects.weights(2), step=2).path
    expect(path, 2)
    assert not inodes(path) & before


def test_the_service_takes_the_slots_folder_away_when_its_last_slot_was_taken(
    root: Path, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after the publisher's rename: the folder is empty then."""
    slot = durable_effects.make_slot(root)
    before, rename = inodes(slot), durable.rename

    def slow(old: Path, new: Path) -> None:
        rename(old, new)
        if old == slot:
            slot.parent.rmdir()

    monkeypatch.setattr(durable, "rename", slow)
    path = publisher.publish(durable_effects.weights(2), step=2).path
    expect(path, 2)
    assert inodes(path) == before


def test_a_publication_that_fails_throws_its_slot_away(root: Path, publisher: WeightPublisher) -> None:
    durable_effects.make_slot(root)
    bad = durable_effects.weights(2)
    bad["b"][3, 3] = np.nan
    with pytest.raises(InvalidWeightsError, match="tensor b holds 1 value "):
        publisher.publish(bad, step=2)
    assert (slots_in(root), published.leftovers(root / "run")) == ([], [])
    expect(publisher.publish(durable_effects.weights(2), step=2).path, 2)


def test_a_slot_that_a_dead_publisher_had_locked_is_a_slot(root: Path, publisher: WeightPublisher) -> None:
    slot = durable_effects.make_slot(root)
    before = inodes(slot)
    (slot / ".lock").write_text("")
    path = publisher.publish(durable_effects.weights(2), step=2).path
    assert inodes(path) == before
    expect(path, 2)


def test_a_checkpoint_s_folder_goes_into_a_slot_as_well(root: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    for number, (name, tensor) in enumerate(durable_effects.weights(4).items(), start=1):
        head = header.encode([header.Entry(name=name, dtype="F32", shape=tensor.shape)])  # padded as the slot's are
        (saved / f"model-{number:05d}-of-00002.safetensors").write_bytes(head + tensor.tobytes())
    slot = durable_effects.make_slot(root)
    before = inodes(slot)
    with WeightPublisher(root, "run") as publisher:
        path = publisher.publish(saved, step=4).path
    expect(path, 4)
    assert inodes(path) == before


def test_mappings_of_files_that_have_gone_are_let_go(root: Path, publisher: WeightPublisher) -> None:
    """Else a trainer would keep the memory of every version that it has ever published."""
    import shutil

    for step in (1, 2, 3):
        durable_effects.make_slot(root)
        shutil.rmtree(publisher.publish(durable_effects.weights(step), step=step).path)
    publisher.publish(durable_effects.weights(4), step=4)
    assert in_process(publisher)._context.mappings._files == {}
