"""A checkpoint copied and written with deltas piece by piece: its bytes."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from refitd_client.contract import manifest
from refitd_client.contract.manifest import digest_of_pieces, joined
from refitd_client.delta import Change, Delta, DeltaFile, encode, index_type
from refitd_client.files.plain_file import open_folder
from refitd_client.fingerprint import bits_of, fingerprint
from refitd_client.validation.contents import ReadingStoppedError
from refitd_inside.materialize import writing
from refitd_inside.materialize.writing import apply_delta

BLOCK = 96  # bytes
PIECE = 64
TYPES = {"U8": 1, "BF16": 2, "F32": 4, "I64": 8}
Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have many pieces then, and pieces end elsewhere than blocks."""
    monkeypatch.setattr(manifest, "BLOCK", BLOCK)
    monkeypatch.setattr(writing, "PIECE", PIECE)


def arrays(chance: np.random.Generator) -> Arrays:
    """The bits of some tensors, of all widths."""
    widths = [*TYPES.values()] * 3
    return {
        f"t{number}": chance.integers(0, 256, int(chance.integers(1, 90)) * width, np.uint8).view(f"<u{width}")
        for number, width in enumerate(widths)
    }


def shard_of(tensors: Arrays, padding: int) -> bytes:
    """A safetensors file whose data begins `padding` bytes after where it could."""
    place, rows = 0, dict[str, Any]()
    names = {width: dtype for dtype, width in TYPES.items()}
    for name, bits in tensors.items():
        rows[name] = {"dtype": names[bits.itemsize], "shape": [len(bits)], "data_offsets": [place, place + bits.nbytes]}
        place += bits.nbytes
    text = json.dumps(rows).encode()
    text += b" " * (-len(text) % 8 + padding)
    return len(text).to_bytes(8, "little") + text + b"".join(bits.tobytes() for bits in tensors.values())


def changed(before: Arrays, chance: np.random.Generator, share: float) -> tuple[Arrays, Delta]:
    """Some elements of some tensors, and the delta that says which."""
    names, after, changes = {width: dtype for dtype, width in TYPES.items()}, dict(before), dict[str, Change]()
    for name, bits in before.items():
        at = np.flatnonzero(chance.random(len(bits)) < share)
        if not len(at) or chance.random() < 0.3:
            continue
        after[name] = bits.copy()
        after[name][at] = chance.integers(0, 2**8, len(at)).astype(bits.dtype)
        changes[name] = Change(
            dtype=names[bits.itemsize],
            shape=(len(bits),),
            indices=at.astype(index_type(len(bits))),
            values=after[name][at],
            base=fingerprint(bits),
            result=fingerprint(after[name]),
        )
    return after, Delta(base="run~v000001", version="run~v000002", changes=changes)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def folder(path: Path, opened: ExitStack) -> int:
    path.mkdir(exist_ok=True)
    handle = open_folder(path)
    opened.callback(os.close, handle)
    return handle


def delta_file(path: Path, delta: Delta, opened: ExitStack) -> DeltaFile:
    path.write_bytes(encode(delta).to_bytes())
    return DeltaFile(opened.enter_context(path.open("rb")).fileno())


def digest(data: bytes) -> str:
    return joined([digest_of_pieces([data[begin : begin + BLOCK]]) for begin in range(0, max(1, len(data)), BLOCK)])


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_a_shard_written_in_pieces_is_the_one_that_its_deltas_lead_to(
    tmp_path: Path, opened: ExitStack, seed: int, padding: int
) -> None:
    """With the padding elements lie across the ends of blocks."""
    chance = np.random.default_rng(seed)
    first = arrays(chance)
    second, one = changed(first, chance, 0.5)
    third, other = changed(second, chance, 0.1)
    before, after = shard_of(first, padding), shard_of(third, padding)
    source, target = folder(tmp_path / "source", opened), folder(tmp_path / "target", opened)
    (tmp_path / "source/model.safetensors").write_bytes(before)
    headers = writing._copied(source, target, {"model.safetensors": digest(before)}, Event())
    assert (tmp_path / "target/model.safetensors").read_bytes() == before
    for name, delta in (("one", one), ("other", other)):
        apply_delta(target, headers, delta_file(tmp_path / name, delta, opened), Event())
    assert (tmp_path / "target/model.safetensors").read_bytes() == after


def test_only_pieces_with_changes_are_written(
    tmp_path: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"a": np.zeros(1000, np.uint16)}
    after = first["a"].copy()
    after[[3, 700]] = 1
    change = Change(
        dtype="BF16",
        shape=(1000,),
        indices=np.array([3, 700], np.uint32),
        values=np.array([1, 1], np.uint16),
        base=fingerprint(first["a"]),
        result=fingerprint(after),
    )
    delta = Delta(base="run~v000001", version="run~v000002", changes={"a": change})
    source, target = folder(tmp_path / "source", opened), folder(tmp_path / "target", opened)
    (tmp_path / "source/model.safetensors").write_bytes(shard_of(first, 0))
    headers = writing._copied(source, target, {}, Event())
    places, real = list[int](), writing.write_at

    def noted(fd: int, data: memoryview, offset: int) -> None:
        places.append(offset)
        real(fd, data, offset)

    monkeypatch.setattr(writing, "write_at", noted)
    apply_delta(target, headers, delta_file(tmp_path / "delta", delta, opened), Event())
    begin = len(shard_of(first, 0)) - 2000
    assert sorted(places) == [begin + 2 * index // PIECE * PIECE for index in (3, 700)]
    assert bits_of(np.frombuffer((tmp_path / "target/model.safetensors").read_bytes()[begin:], np.uint8), 2).sum() == 2


def test_files_that_hold_no_tensors_are_copied_also_without_a_byte(tmp_path: Path, opened: ExitStack) -> None:
    source, target = folder(tmp_path / "source", opened), folder(tmp_path / "target", opened)
    shard = shard_of({"a": np.zeros(1, np.uint16)}, 0)
    (tmp_path / "source/model.safetensors").write_bytes(shard)
    (tmp_path / "source/config.json").write_bytes(b"x" * (3 * BLOCK + 1))
    (tmp_path / "source/tokenizer.json").touch()
    writing._copied(source, target, {}, Event())
    assert {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()} == {
        "model.safetensors": shard,
        "config.json": b"x" * (3 * BLOCK + 1),
        "tokenizer.json": b"",
    }


def test_writing_stops_between_two_pieces(tmp_path: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = folder(tmp_path / "source", opened), folder(tmp_path / "target", opened)
    (tmp_path / "source/model.safetensors").write_bytes(shard_of({"a": np.zeros(1000, np.uint16)}, 0))
    stop, real, offsets = Event(), writing.write_at, list[int]()

    def last(fd: int, data: memoryview, offset: int) -> None:
        real(fd, data, offset)
        offsets.append(offset)
        stop.set()

    monkeypatch.setattr(writing, "write_at", last)
    with pytest.raises(ReadingStoppedError):
        writing._copied(source, target, {}, stop)
    assert offsets == [0]
