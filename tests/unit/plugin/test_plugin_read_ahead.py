"""A version is read while its trainer writes it, and what was found counts only by the manifest of what has come."""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd_client.checkpoint.finite import rule_of
from refitd_client.contract.naming import STAGING_PROGRESS
from refitd_client.contract.plugin import TensorProof
from refitd_client.files.plain_file import open_folder
from refitd_client.fingerprint.tensors import Scan, ScanInput, scan
from refitd_client.validation.validate import Options
from refitd_plugin import trainer_follower
from refitd_plugin.proving import Reading, VersionProver, layout_of
from refitd_plugin.read_ahead import ScanBatch, TensorsAhead, batches_of
from refitd_plugin.source import _TORCH, SourceRefusedError, VersionPlace, VersionSource
from refitd_plugin.trainer_follower import FileLayout, Files, Layout, TrainerFollower
from refitd_plugin.update_source import FullVersion
from support.provable import published, weights
from support.slot_trainer import STEPS, MappedFiles, NoRenames, SlotTrainer, bytes_at, killed_in_mid_write, scribble

SECONDS = 20.0
LEAST = 50_000  # bytes of a batch: several in each file


class MemoryScan:
    """Reads tensors in mapped files when it begins, as a GPU would. Stands for `AddressScan`: there is no GPU here."""

    def __init__(self, address: int, file: FileLayout, names: Sequence[str], read: Event) -> None:
        self._address, self._file, self._names, self._read = address, file, names, read

    def begin(self) -> Callable[[], list[Scan]]:
        found = scan(self._input(name) for name in self._names)
        self._read.set()
        return lambda: found

    def _input(self, name: str) -> ScanInput:
        spec = self._file.tensors[name]
        size, dtype = spec.end - spec.start, getattr(torch, _TORCH[spec.dtype])
        data = bytearray(bytes_at(self._address + self._file.begin + spec.start, size))
        tensor = torch.frombuffer(data, dtype=dtype) if size else torch.empty(0, dtype=dtype)
        return ScanInput(tensor.reshape(spec.shape), rule_of(spec.dtype), is_view=True)


class AheadReader:
    """Reads what is written as it comes. The class is a `TensorReader`."""

    def __init__(self) -> None:
        self.files, self.read_something, self.whole = MappedFiles(), Event(), 0
        self.is_updated = False
        self.follower = TrainerFollower(
            self.files.known, self.start, nullcontext, lambda: True, lambda: self.is_updated
        )

    def start(self, files: Files, layout: Layout) -> TensorsAhead:
        batches = {name: self._batches(files[name].address, file) for name, file in layout.items()}
        return TensorsAhead(files=files, layout=layout, batches=batches)

    def _batches(self, address: int, file: FileLayout) -> list[ScanBatch]:
        found: list[ScanBatch] = []
        for names in batches_of([(name, spec.end - spec.start) for name, spec in file.tensors.items()], LEAST):
            reads = cast("Any", MemoryScan(address, file, names, self.read_something))
            found.append(ScanBatch(names, file.begin + max(file.tensors[name].end for name in names), reads))
        return found

    def read(self, source: VersionSource, names: Sequence[str]) -> Reading | None:
        files: dict[str, Any] = {}
        for name in source.structure.headers:
            with (source.place.folder / name).open("rb") as file:
                files[name] = self.files.of(file.fileno())
        found, ahead = self.follower.finished(source.place, files, layout_of(source, names))
        assert isinstance(found, TensorsAhead)
        self.whole += not ahead
        scans = found.scans()
        return Reading([scans[name] for name in names], ahead=ahead)


class Stand:
    """A rank that has proved a version of a run, and the version that the trainer writes next."""

    def __init__(self, root: Path, *, follows: bool = True) -> None:
        (root / ".refitd").mkdir(exist_ok=True)
        self.reader = AheadReader()
        if not follows:
            self.reader.follower._renames = cast("Any", NoRenames())
        self.prover = VersionProver(self.reader, 0, 1)
        self.old = published(root, 1, weights(1))
        self.wanted = published(root / "elsewhere", 2, weights(2))
        assert self.prover.prove(self.old)[0].fault == ""
        self.reader.read_something.clear()
        self.reader.whole = 0


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path)


def test_what_is_written_is_read_before_the_version_has_its_name(stand: Stand) -> None:
    trainer = SlotTrainer(stand.old, stand.wanted)
    trainer.write_all()
    assert stand.reader.read_something.wait(SECONDS)
    proof, staged = stand.prover.prove(trainer.commit(2))
    assert (proof.fault, proof.staged, staged) == ("", False, None)
    assert proof.ahead > 0
    assert stand.reader.whole == 0


def test_an_engine_that_loads_has_the_bus_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_follower, "_SILENT_SECONDS", 0.05)
    stand = Stand(tmp_path, follows=False)
    trainer = SlotTrainer(stand.old, stand.wanted)
    trainer.write_all()
    stand.reader.is_updated = True
    folder = open_folder(trainer.folder)
    stand.reader.follower.follow(folder)  # until the trainer is silent
    assert not stand.reader.read_something.is_set()
    stand.reader.is_updated = False
    stand.reader.follower.follow(folder)
    os.close(folder)
    assert stand.reader.read_something.is_set()


def test_a_tensor_that_was_read_before_it_was_right_is_read_again(stand: Stand) -> None:
    trainer = SlotTrainer(stand.old, stand.wanted)
    for name in trainer.names:
        trainer.progress.reached(name, trainer.sizes[name])  # and nothing is written yet
    assert stand.reader.read_something.wait(SECONDS)
    for name in trainer.names:
        trainer.write(name, 0, trainer.sizes[name])
    proof, _ = stand.prover.prove(trainer.commit(2))
    assert (proof.fault, proof.ahead) == ("", 0)
    assert stand.reader.whole == 1


@given(STEPS)
@settings(max_examples=40, deadline=None)
def test_whatever_was_read_ahead_a_version_that_is_right_is_proved(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    """Blocks are written wrong and right and wrong again, and read at any time, also before they were written."""
    stand = Stand(tmp_path_factory.mktemp("root"), follows=False)
    trainer = SlotTrainer(stand.old, stand.wanted)
    folder = open_folder(trainer.folder)
    ahead = stand.reader.follower._started(folder)
    os.close(folder)
    assert ahead is not None
    scribble(trainer, ahead, steps)
    trainer.write_all()
    assert stand.prover.prove(trainer.commit(2))[0].fault == ""


@pytest.mark.parametrize("blocks", range(1, 6))
def test_nothing_that_was_read_of_a_trainer_that_is_killed_counts_for_the_next_writer_of_its_slot(
    tmp_path: Path, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed when it has written its first, second, … block; the next trainer takes the very same slot."""
    monkeypatch.setattr(trainer_follower, "_SILENT_SECONDS", 0.05)
    stand = Stand(tmp_path)
    with killed_in_mid_write(stand.old, blocks):
        assert stand.reader.read_something.wait(SECONDS)
    dead = stand.old.place.folder.parent / ".incoming-dead"
    (dead / STAGING_PROGRESS).unlink()
    taken = replace(stand.old, place=VersionPlace(stand.old.place.root, f"run/{dead.name}"))
    trainer = SlotTrainer(taken, stand.wanted)
    trainer.write_all()
    assert stand.prover.prove(trainer.commit(3))[0].fault == ""


def test_a_version_of_another_layout_is_read_when_it_has_come(stand: Stand) -> None:
    other = dict(list(weights(3).items())[1:])
    proof, _ = stand.prover.prove(published(stand.old.place.root, 2, other))
    assert (proof.fault, proof.ahead) == ("", 0)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("from_buffer", [False, True])
@pytest.mark.parametrize("planned", [False, True])
def test_what_was_seen_ahead_is_refused_where_the_load_is_of_other_bytes_and_not_held_against_the_manifest(
    staged: bool, checked: bool, from_buffer: bool, planned: bool
) -> None:
    """As where its load plan is gone: the file may have changed since, and nothing would see it."""
    loading = SimpleNamespace(
        checks_all=lambda _: checked, moves_all=lambda _: from_buffer, has=lambda plan: plan == "plan"
    )
    structure = SimpleNamespace(signature="")
    source = SimpleNamespace(
        place=SimpleNamespace(folder=Path("v1")), nbytes=1, label="run~v000001", digest="", structure=structure
    )
    version = FullVersion(cast("Any", source), Options(), cast("Any", loading))
    version.readied = cast("Any", SimpleNamespace(plan="plan" if planned else "another"))
    version.proof = TensorProof(tensors=1, digest="", fault="", staged=staged, ahead=0)
    version.fit(None, {})
    version.proof = TensorProof(tensors=1, digest="", fault="", staged=staged, ahead=5)
    is_good = checked or (staged and from_buffer and planned)
    with nullcontext() if is_good else pytest.raises(SourceRefusedError, match="read while it was written"):
        version.fit(None, {})


@given(st.lists(st.integers(0, 200)), st.integers(1, 300))
def test_batches_have_all_tensors_in_order_and_are_no_smaller_than_asked_but_for_the_last(
    sizes: list[int], least: int
) -> None:
    named = [(str(number), size) for number, size in enumerate(sizes)]
    found = batches_of(named, least)
    assert [name for batch in found for name in batch] == [name for name, _ in named]
    for batch in found[:-1]:
        taken = [sizes[int(name)] for name in batch]
        assert sum(taken) >= least > sum(taken[:-1])
