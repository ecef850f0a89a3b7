"""Copies on a real disk: what is proved of a copy is there, and nothing is left of one that failed."""

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from refitd.catalog.files import Unreadable
from refitd.policy.materialize import Copy, MakeCopy
from refitd.reclaim import slots, trash
from refitd.root.handle import Identity, RootHangsError, RootThreads, root_at
from refitd.root.scan import Discarded
from refitd.state.version import VersionRecord
from refitd_client.validation.examine import signature
from refitd_inside.materialize import disk, writing
from refitd_inside.materialize.disk import DiskCopies
from refitd_inside.materialize.writing import CopyError, MisfitError, SourceChangedError
from support.checkpoints import Tensors
from support.deltas import Trainer, chain, in_folder, record_of, same, training


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    with training(tmp_path) as trainer:
        yield trainer


def ordered(source: Copy | VersionRecord, deltas: list[VersionRecord]) -> MakeCopy:
    return MakeCopy(source=source, deltas=tuple(deltas))


async def test_a_copy_is_the_full_version_with_all_deltas_and_the_next_service_finds_a_folder_of_unknown_contents(
    tmp_path: Path, trainer: Trainer
) -> None:
    versions = chain(trainer, tmp_path, 6)
    copies = DiskCopies(tmp_path)
    copy = await copies.write(ordered(versions[0], versions[1:]))
    assert (copy.holds, copy.digest) == (versions[-1].id, versions[-1].digest)
    assert same(in_folder(tmp_path / copy.path), trainer.weights)
    assert await copies.signature(copy) == copy.signature
    assert await copies.survey() == [replace(copy.doubted(), digests={})]
    assert not (tmp_path / copy.path / "refit.json").exists(), "it is of one version only"
    assert (tmp_path / copy.path / "model.safetensors.index.json").exists()


async def test_a_file_that_can_be_a_reflink_is_written_only_where_it_changes(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems of CI have no reflinks: here the call copies."""
    versions, copies = chain(trainer, tmp_path, 2), DiskCopies(tmp_path)
    cloned, written = list[int](), list[int]()

    def clone(source: int, target: int) -> bool:
        cloned.append(target)
        return os.sendfile(target, source, 0, size := os.fstat(source).st_size) == size

    def write(fd: int, data: bytes | memoryview, offset: int) -> None:
        written.append(len(data))
        write_at(fd, data, offset)

    write_at = writing.write_at
    monkeypatch.setattr(writing, "clone", clone)
    monkeypatch.setattr(writing, "write_at", write)
    copy = await copies.write(ordered(versions[0], versions[1:]))
    assert same(in_folder(tmp_path / copy.path), trainer.weights)
    assert same(in_folder(tmp_path / versions[0].path), trainer.history[1])
    assert len(cloned) == 2, "the index as well"
    changed = [name for name, bits in trainer.weights.items() if (bits != trainer.history[1][name]).any()]
    assert sorted(written) == sorted(trainer.weights[name].nbytes for name in changed)


async def test_deltas_that_do_not_lead_there_leave_no_copy(tmp_path: Path, trainer: Trainer) -> None:
    """The delta on the version between is left out."""
    versions, copies = chain(trainer, tmp_path, 4), DiskCopies(tmp_path)
    copy = await copies.write(ordered(versions[0], versions[1:2]))
    with pytest.raises(MisfitError, match=r"in run~v000004 tensor .* was to have fingerprint"):
        await copies.write(ordered(copy, versions[3:]))
    assert [path.name for path in (tmp_path / copy.path).parent.iterdir()] == [copy.name]


async def test_damage_in_a_copy_is_found_when_the_next_is_made_from_it(tmp_path: Path, trainer: Trainer) -> None:
    """Also where nothing was to change, and where the files look as they did."""
    versions, copies = chain(trainer, tmp_path, 3), DiskCopies(tmp_path)
    copy = await copies.write(ordered(versions[0], versions[1:2]))
    shard = next((tmp_path / copy.path).glob("*.safetensors"))
    weights: Tensors = load_file(shard)
    last = max(weights)
    weights[last] = weights[last] + np.float32(1)
    save_file(weights, shard, metadata={"format": "pt"})
    damaged = replace(copy, signature=str(await copies.signature(copy)))
    with pytest.raises(SourceChangedError, match=f"{shard.name} is not what it was when it was checked"):
        await copies.write(ordered(damaged, versions[2:]))


async def test_damage_in_a_full_version_since_it_was_checked_is_not_copied(tmp_path: Path, trainer: Trainer) -> None:
    versions, copies = chain(trainer, tmp_path, 2), DiskCopies(tmp_path)
    shard = next((tmp_path / versions[0].path).glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    damaged = versions[0].having(signature=signature(tmp_path, versions[0].path))
    with pytest.raises(SourceChangedError, match=f"{shard.name} is not what it was when it was checked"):
        await copies.write(ordered(damaged, versions[1:]))
    assert await copies.survey() == []


async def test_a_delta_since_an_older_base_is_applied_to_a_copy_of_a_version_between(
    tmp_path: Path, trainer: Trainer
) -> None:
    """What its elements were at the base says nothing of the copy: the copy's own fingerprints count."""
    versions, copies = chain(trainer, tmp_path, 3), DiskCopies(tmp_path)
    trainer.base = lambda: versions[1].id
    since = record_of(tmp_path, trainer.publish())
    assert since.base == versions[1].id
    copy = await copies.write(ordered(versions[0], versions[1:]))
    made = await copies.write(ordered(copy, [since]))
    assert same(in_folder(tmp_path / made.path), trainer.weights)


async def test_a_version_whose_files_have_changed_is_not_copied(tmp_path: Path, trainer: Trainer) -> None:
    """Nor one whose delta has."""
    versions, copies = chain(trainer, tmp_path, 3), DiskCopies(tmp_path)
    copy = await copies.write(ordered(versions[0], versions[1:2]))
    os.utime(tmp_path / versions[2].path / "weights.refit-delta")
    os.utime(next((tmp_path / versions[0].path).glob("*.safetensors")))
    with pytest.raises(CopyError, match=r"run~v000003 are not those that were checked") as found:
        await copies.write(ordered(copy, versions[2:]))
    assert not isinstance(found.value, SourceChangedError), "the copy is as it was"
    with pytest.raises(SourceChangedError, match=r"files in run/v000001"):
        await copies.write(ordered(versions[0], versions[1:2]))


async def test_where_there_is_no_room_nothing_is_left_and_it_says_what_to_do(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, copies = chain(trainer, tmp_path, 2), DiskCopies(tmp_path)
    monkeypatch.setattr(writing, "SPARE_BYTES", 2**60)
    with pytest.raises(CopyError, match=r"bytes, and .* are free: make room"):
        await copies.write(ordered(versions[0], versions[1:]))
    assert await copies.survey() == []
    assert not [path for path in (tmp_path / ".refitd").rglob("*") if path.is_file()]


async def test_what_a_kill_has_left_can_be_deleted_and_what_another_program_has_put_there_stays(
    tmp_path: Path, trainer: Trainer
) -> None:
    versions, copies = chain(trainer, tmp_path, 2), DiskCopies(tmp_path)
    copy = await copies.write(ordered(versions[0], versions[1:]))
    next((tmp_path / copy.path).glob("*.safetensors")).write_bytes(b"half")
    run = (tmp_path / copy.path).parent
    (run / "a-note-to-myself").mkdir()
    (run.parent / "another").write_text("buy milk")
    stray, note, left = sorted(await copies.survey(), key=lambda found: found.order is not None)
    assert (stray.path, stray.fault) == (".refitd/copies/another", "is not deleted: Not a directory")
    assert (note.name, note.fault) == ("a-note-to-myself", "was not put there by this service: it is not deleted")
    assert (left.path, left.version, left.holds, left.fault) == (copy.path, versions[1].id, None, None)
    assert isinstance(await copies.discard(left), Discarded)
    assert [path.name for path in run.iterdir()] == ["a-note-to-myself"]


async def test_while_copies_are_written_there_are_threads_for_whoever_looks(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines are paused while somebody looks whether their files are still those that were checked."""
    versions, looks = chain(trainer, tmp_path, 2), RootThreads(most=1)
    copies = DiskCopies(tmp_path, threads=looks)
    copy = await copies.write(ordered(versions[0], versions[1:]))
    begun, go_on = threading.Event(), threading.Event()

    def slow(_root: object, _run: object, copy: Copy, *_: object) -> Copy:
        begun.set()
        go_on.wait()
        return copy.proved("digest", "signature", 7, {})

    monkeypatch.setattr(disk, "write_copy", slow)
    writing_one = asyncio.create_task(copies.write(ordered(versions[0], versions[1:])))
    await asyncio.to_thread(begun.wait)
    try:
        assert await looks.run("looking at versions", lambda: 7, within=5) == 7
        assert await copies.signature(copy) == copy.signature
    finally:
        go_on.set()
    assert (await writing_one).signature == "signature"


async def test_a_folder_of_copies_that_hangs_is_not_waited_for_while_an_engine_is_paused(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, copies = chain(trainer, tmp_path, 2), DiskCopies(tmp_path)
    copy = await copies.write(ordered(versions[0], versions[1:]))
    back = threading.Event()
    monkeypatch.setattr(disk, "root_at", lambda _: back.wait())
    monkeypatch.setattr(disk, "LOOK_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(disk, "LISTING_SECONDS", 0.05)
    try:
        found = await copies.signature(copy)
        assert isinstance(found, Unreadable)
        assert "does not answer" in found.reason
        with pytest.raises(RootHangsError):
            await copies.survey()
    finally:
        back.set()


async def test_a_copy_that_is_deleted_takes_nothing_else_out_of_the_trash(tmp_path: Path, trainer: Trainer) -> None:
    """What a sweep has just discarded lies there for a moment before its files are handed back."""
    versions, copies = chain(trainer, tmp_path, 2), DiskCopies(tmp_path)
    copy = await copies.write(ordered(versions[0], versions[1:]))
    with root_at(tmp_path) as root:
        folder = trash.examine(root, versions[0].path)
        assert isinstance(folder, Identity)
        discarded = trash.discard(root, versions[0].path, folder)
        assert isinstance(discarded, Discarded)
        assert isinstance(await copies.discard(copy), Discarded)
        assert isinstance(slots.hand_back(root, discarded, "run"), slots.Slot)
    assert not (tmp_path / copy.path).exists()
    assert list((tmp_path / ".refitd/trash").rglob("*.safetensors")) == [], "its room is wanted"
