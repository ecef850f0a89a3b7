"""Copies on a real disk: what is in one is the version that its note says, or it has no note."""

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from refitd.catalog.files import Unreadable
from refitd.materialize import disk, files, writing
from refitd.materialize.disk import DiskCopies
from refitd.materialize.files import MisfitError, NoRoomError, SourceChangedError
from refitd.policy.materialize import WriteCopy
from refitd.reclaim import slots, trash
from refitd.root.handle import Identity, root_at
from refitd.root.outcome import Discarded
from refitd.root.threads import RootHangsError, RootThreads
from refitd.state.copy import Copy
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order
from refitd_client.fingerprint import to_text
from refitd_client.validation.examine import signature
from support.checkpoints import Tensors
from support.deltas import Trainer, chain, in_folder, record_of, same, training


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    with training(tmp_path) as trainer:
        yield trainer


def ordered(source: Copy | VersionRecord, deltas: list[VersionRecord], into: Copy | None = None) -> WriteCopy:
    return WriteCopy(target=deltas[-1], source=source, deltas=tuple(deltas), into=into)


async def test_a_copy_is_the_full_version_with_all_deltas_and_is_found_again(tmp_path: Path, trainer: Trainer) -> None:
    """More deltas than are applied in one pass."""
    versions = chain(trainer, tmp_path, 2 + writing.DELTAS_AT_ONCE)
    copies = DiskCopies(tmp_path)
    copy = await copies.write(ordered(versions[0], versions[1:]))
    assert (copy.holds, copy.digest) == (versions[-1].id, versions[-1].digest)
    assert same(in_folder(tmp_path / copy.path), trainer.weights)
    assert await copies.survey() == [copy]
    assert await copies.signature(copy) == copy.signature
    assert not (tmp_path / copy.path / "refit.json").exists()
    assert (tmp_path / copy.path / "model.safetensors.index.json").exists()


async def test_a_copy_is_patched_in_place_and_looks_like_another_afterwards(tmp_path: Path, trainer: Trainer) -> None:
    versions, copies = chain(trainer, tmp_path, 4), DiskCopies(tmp_path)
    first = await copies.write(ordered(versions[0], versions[1:2]))
    inodes = sorted(path.stat().st_ino for path in (tmp_path / first.path).iterdir())
    second = await copies.write(ordered(first, versions[2:], into=first))
    assert same(in_folder(tmp_path / second.path), trainer.history[4])
    assert (second.path, second.holds) == (first.path, versions[-1].id)
    assert second.signature != first.signature
    assert sorted(path.stat().st_ino for path in (tmp_path / first.path).iterdir()) == inodes


async def test_a_copy_is_made_from_another_that_is_read_meanwhile(tmp_path: Path, trainer: Trainer) -> None:
    versions, copies = chain(trainer, tmp_path, 3), DiskCopies(tmp_path)
    read = await copies.write(ordered(versions[0], versions[1:2]))
    made = await copies.write(ordered(read, versions[2:]))
    assert same(in_folder(tmp_path / read.path), trainer.history[2])
    assert same(in_folder(tmp_path / made.path), trainer.history[3])


async def test_deltas_that_do_not_lead_there_leave_no_copy_that_anyone_believes(
    tmp_path: Path, trainer: Trainer
) -> None:
    """The delta on the version between is left out."""
    versions, copies = chain(trainer, tmp_path, 4), DiskCopies(tmp_path)
    copy = await copies.write(ordered(versions[0], versions[1:2]))
    with pytest.raises(MisfitError, match=r"in run~v000004 tensor .* was to have fingerprint"):
        await copies.write(ordered(copy, versions[3:], into=copy))
    assert [found.holds for found in await copies.survey()] == [None]


async def test_damage_in_a_copy_is_found_when_the_next_delta_is_written_into_it(
    tmp_path: Path, trainer: Trainer
) -> None:
    """Also where nothing was to change, and where the files look as they did."""
    versions, copies = chain(trainer, tmp_path, 3), DiskCopies(tmp_path)
    copy = await copies.write(ordered(versions[0], versions[1:2]))
    shard = next((tmp_path / copy.path).glob("*.safetensors"))
    weights: Tensors = load_file(shard)
    last = max(weights)
    weights[last] = weights[last] + np.float32(1)
    save_file(weights, shard, metadata={"format": "pt"})
    damaged = replace(copy, signature=str(await copies.signature(copy)))
    for into in (None, damaged):
        with pytest.raises(MisfitError, match=f"{shard.name} is not what it was when it was checked"):
            await copies.write(ordered(damaged, versions[2:], into=into))
    assert [found.holds for found in await copies.survey()] == [None]


async def test_damage_in_a_full_version_since_it_was_checked_is_not_copied(tmp_path: Path, trainer: Trainer) -> None:
    versions, copies = chain(trainer, tmp_path, 2), DiskCopies(tmp_path)
    shard = next((tmp_path / versions[0].path).glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    damaged = replace(versions[0], signature=signature(tmp_path, versions[0].path))
    with pytest.raises(MisfitError, match=f"{shard.name} is not what it was when it was checked"):
        await copies.write(ordered(damaged, versions[1:]))
    assert await copies.survey() == []


async def test_a_copy_of_an_earlier_refitd_is_read_once_and_patched(tmp_path: Path, trainer: Trainer) -> None:
    """Its note has neither digests nor fingerprints, so those come from its bytes; the note has both afterwards."""
    versions, copies = chain(trainer, tmp_path, 3), DiskCopies(tmp_path)
    copy = await copies.write(ordered(versions[0], versions[1:2]))
    note = tmp_path / f"{copy.path}.json"
    first = json.loads(note.read_bytes())
    note.write_text(json.dumps({key: said for key, said in first.items() if key not in {"digests", "fingerprints"}}))
    patched = await copies.write(ordered(copy, versions[2:], into=copy))
    assert same(in_folder(tmp_path / patched.path), trainer.weights)
    now = json.loads(note.read_bytes())
    assert now["digests"].keys() == first["digests"].keys()
    with root_at(tmp_path / patched.path) as folder:
        read = files.fingerprints_of(files.source_in(folder), threading.Event())
    assert now["fingerprints"] == {name: to_text(value) for name, value in read.items()}


async def test_a_delta_since_an_older_base_is_written_into_a_copy_of_a_version_between(
    tmp_path: Path, trainer: Trainer
) -> None:
    """What its elements were at the base says nothing of the copy: the copy's own fingerprints count."""
    versions, copies = chain(trainer, tmp_path, 3), DiskCopies(tmp_path)
    trainer.base = lambda: versions[1].id
    since = record_of(tmp_path, trainer.publish())
    assert since.base == versions[1].id
    copy = await copies.write(ordered(versions[0], versions[1:]))
    patched = await copies.write(ordered(copy, [since], into=copy))
    assert same(in_folder(tmp_path / patched.path), trainer.weights)


async def test_a_version_whose_files_have_changed_is_not_copied(tmp_path: Path, trainer: Trainer) -> None:
    """Nor one whose delta has."""
    versions, copies = chain(trainer, tmp_path, 3), DiskCopies(tmp_path)
    copy = await copies.write(ordered(versions[0], versions[1:2]))
    os.utime(tmp_path / versions[2].path / "weights.refit-delta")
    os.utime(next((tmp_path / versions[0].path).glob("*.safetensors")))
    with pytest.raises(SourceChangedError, match=r"run~v000003 are not those that were checked"):
        await copies.write(ordered(copy, versions[2:], into=copy))
    with pytest.raises(SourceChangedError, match=r"files in run/v000001"):
        await copies.write(ordered(versions[0], versions[1:2]))
    assert [found.holds for found in await copies.survey()] == [versions[1].id]


async def test_where_there_is_no_room_nothing_is_left_and_it_says_what_to_do(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, copies = chain(trainer, tmp_path, 2), DiskCopies(tmp_path)
    monkeypatch.setattr(files, "SPARE_BYTES", 2**60)
    with pytest.raises(NoRoomError, match=r"bytes more, and .* are free: make room, or name another folder"):
        await copies.write(ordered(versions[0], versions[1:]))
    assert await copies.survey() == []
    assert not [path for path in (tmp_path / ".refitd").rglob("*") if path.is_file()]


async def test_a_copy_without_its_note_or_changed_since_is_worth_nothing(tmp_path: Path, trainer: Trainer) -> None:
    versions, copies = chain(trainer, tmp_path, 2), DiskCopies(tmp_path)
    copy = await copies.write(ordered(versions[0], versions[1:]))
    note = tmp_path / f"{copy.path}.json"
    said = note.read_bytes()
    for bad in (b"", said.replace(b'"run":"run"', b'"run":"other"'), b"[" * 10_000):
        note.write_bytes(bad)
        assert [found.holds for found in await copies.survey()] == [None]
    note.write_bytes(said)
    assert [found.order for found in await copies.survey()] == [Order(1, 2)]
    os.utime(next((tmp_path / copy.path).glob("*.safetensors")))
    assert [found.holds for found in await copies.survey()] == [None]


async def test_a_file_with_a_second_name_or_a_link_is_replaced_and_not_written_into(
    tmp_path: Path, trainer: Trainer
) -> None:
    versions, copies = chain(trainer, tmp_path, 2), DiskCopies(tmp_path)
    copy = await copies.write(ordered(versions[0], versions[1:]))
    shard = next((tmp_path / copy.path).glob("*.safetensors"))
    os.link(shard, tmp_path / "elsewhere")
    outside = tmp_path / "outside"
    outside.write_text("not refitd's")
    (tmp_path / copy.path / "config.json").symlink_to(outside)
    before = (tmp_path / "elsewhere").stat().st_mtime_ns
    await copies.write(ordered(versions[0], versions[1:], into=copy))
    assert (tmp_path / "elsewhere").stat().st_mtime_ns == before
    assert outside.read_text() == "not refitd's"
    assert same(in_folder(tmp_path / copy.path), trainer.weights)


async def test_copies_lie_in_a_folder_of_their_own_where_one_is_named(tmp_path: Path, trainer: Trainer) -> None:
    """Two roots may share it. A copy is deleted with its note and whatever is left of it."""
    versions = chain(trainer, tmp_path, 2)
    mine, other = DiskCopies(tmp_path, tmp_path / "own"), DiskCopies(tmp_path / "other", tmp_path / "own")
    copy = await mine.write(ordered(versions[0], versions[1:]))
    assert copy.path.startswith(str(tmp_path / "own"))
    assert same(in_folder(copy.path), trainer.weights)
    assert (await mine.survey(), await other.survey()) == ([copy], [])
    await mine.discard(copy)
    assert await mine.survey() == []
    assert not [path for path in (tmp_path / "own").rglob("*") if path.is_file()]


async def test_while_copies_are_written_there_are_threads_for_whoever_looks(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines are paused while somebody looks whether their files are still those that were checked."""
    versions, looks = chain(trainer, tmp_path, 2), RootThreads(most=1)
    copies = DiskCopies(tmp_path, threads=looks)
    copy = await copies.write(ordered(versions[0], versions[1:]))
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> Copy:
        begun.set()
        go_on.wait()
        return copy

    monkeypatch.setattr(disk, "write_copy", slow)
    writing_one = asyncio.create_task(copies.write(ordered(versions[0], versions[1:])))
    await asyncio.to_thread(begun.wait)
    try:
        assert await looks.run("looking at versions", lambda: 7, within=5) == 7
        assert await copies.signature(copy) == copy.signature
    finally:
        go_on.set()
    assert await writing_one == copy


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


async def test_a_stray_file_where_copies_lie_is_said_and_stops_nothing(tmp_path: Path, trainer: Trainer) -> None:
    versions, copies = chain(trainer, tmp_path, 2), DiskCopies(tmp_path)
    copy = await copies.write(ordered(versions[0], versions[1:]))
    (tmp_path / ".refitd/copies/a-note-to-myself").write_text("buy milk")
    stray, found = await copies.survey()
    assert found == copy
    assert (stray.path, stray.fault) == (".refitd/copies/a-note-to-myself", "is not deleted: Not a directory")
