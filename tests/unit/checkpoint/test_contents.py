"""Reading the bytes: digests, values that are not finite, and files that fail while they are read."""

import os
from collections.abc import Callable
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from refitd_client.checkpoint.finite import NonFinite, Search
from refitd_client.checkpoint.header import Header, read_header
from refitd_client.checkpoint.opening import ChangedError, Folder
from refitd_client.contract.manifest import joined
from refitd_client.fingerprint.host import bits_of, fingerprint, width_of
from refitd_client.validation import contents
from refitd_client.validation.contents import Contents, read_contents
from support.rawfiles import Spec, bf16, safetensors


def read(root: Path, *, threads: int = 2, stop: Event | None = None, fingerprinted: bool = False) -> Contents:
    with Folder(root, "v") as folder:
        files = folder.list()
        headers: dict[str, Header] = {}
        for name, file in files.items():
            if name.endswith(".safetensors"):
                with folder.open(name, file) as fd:
                    headers[name] = read_header(fd, file.size)
        return read_contents(folder, files, headers, threads=threads, stop=stop, fingerprinted=fingerprinted)


def write(root: Path, **files: bytes) -> None:
    (root / "v").mkdir()
    for name, data in files.items():
        (root / "v" / f"{name}.safetensors").write_bytes(data)


def values(dtype: str, patterns: np.ndarray) -> Spec:
    return dtype, patterns.shape, patterns.tobytes()


def test_files_that_are_no_weights_are_only_hashed(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "v" / "config.json").write_bytes(b"\xff" * 100)
    (tmp_path / "v" / "empty").touch()
    found = read(tmp_path)
    assert found.digests["config.json"] == f"xxh3:{xxhash.xxh3_128_hexdigest(bytes([255]) * 100)}"
    assert found.digests["empty"] == f"xxh3:{xxhash.xxh3_128_hexdigest(b'')}"


BAD = {
    "BF16": ("<u2", [0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFFFF], [0x0000, 0x8000, 0x7F7F, 0xFF7F]),
    "F16": ("<u2", [0x7C00, 0xFC00, 0x7E00, 0xFFFF], [0x8000, 0x7BFF, 0xFBFF]),
    "F32": ("<u4", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF], [0x80000000, 0x7F7FFFFF, 0xFF7FFFFF]),
    "F64": ("<u8", [0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, 2**64 - 1], [1 << 63, (0x7FF << 52) - 1]),
    "F8_E5M2": ("u1", [0x7C, 0xFC, 0x7F, 0xFF], [0x7B, 0xFB, 0x80]),
    "F8_E4M3": ("u1", [0x7F, 0xFF], [0x7E, 0xFE, 0x80]),
    "F8_E8M0": ("u1", [0xFF], [0xFE, 0x80, 0x7F]),
    "F8_E4M3FNUZ": ("u1", [0x80], [0x7F, 0xFF, 0x00]),
    "F8_E5M2FNUZ": ("u1", [0x80], [0x7F, 0xFF, 0x00]),
    "I16": ("<u2", [], [0x7F80, 0xFFFF]),
    "F4": ("u1", [], [0xFF, 0x80]),
}


@pytest.mark.parametrize("dtype", sorted(BAD))
def test_every_pattern_that_is_not_finite_is_found_and_no_other(tmp_path: Path, dtype: str) -> None:
    kind, bad, good = BAD[dtype]
    array = np.array([*good, *good], kind)
    for pattern in bad:
        (tmp_path / "v").mkdir(exist_ok=True)
        worse = np.concatenate([array, np.array([pattern], kind)])
        (tmp_path / "v" / "a.safetensors").write_bytes(safetensors({"w": values(dtype, worse)}))
        assert read(tmp_path).non_finite == (NonFinite("a.safetensors", "w", len(array), 1),)
    (tmp_path / "v").mkdir(exist_ok=True)
    shape = (2 * len(array),) if dtype == "F4" else array.shape
    (tmp_path / "v" / "a.safetensors").write_bytes(safetensors({"w": (dtype, shape, array.tobytes())}))
    assert read(tmp_path).non_finite == ()


def test_a_complex_element_counts_from_its_first_half(tmp_path: Path) -> None:
    array = np.array([1, 2, complex(0, np.inf)], np.complex64)
    write(tmp_path, a=safetensors({"w": values("C64", array)}))
    assert read(tmp_path).non_finite == (NonFinite("a.safetensors", "w", 2, 1),)


@pytest.mark.parametrize("block", [2**24, 96, 7])
def test_values_across_a_border_of_chunks_or_blocks_are_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(contents, "CHUNK_BYTES", 64)
    monkeypatch.setattr(contents, "BLOCK", block)
    odd = ("U8", (1,), b"\0")  # so that what follows is not aligned
    for place in range(100):
        array = np.zeros(100, "<u4")
        array[place] = 0xFFC00000
        (tmp_path / "v").mkdir(exist_ok=True)
        data = safetensors({"odd": odd, "w": values("F32", array), "tail": ("F8_E4M3", (9,), b"\0" * 9)})
        (tmp_path / "v" / "a.safetensors").write_bytes(data)
        found = read(tmp_path)
        assert found.non_finite == (NonFinite("a.safetensors", "w", place, 1),)
        blocks = [data[at : at + block] for at in range(0, len(data), block)]
        assert found.digests["a.safetensors"] == joined([xxhash.xxh3_128_digest(each) for each in blocks])


def test_a_thread_reads_all_its_blocks_into_the_same_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "CHUNK_BYTES", 64)
    monkeypatch.setattr(contents, "BLOCK", 100)
    made: list[int] = []
    real = np.empty

    def empty(size: int, dtype: type[np.uint8]) -> np.ndarray:
        made.append(size)
        return real(size, dtype)

    write(tmp_path, a=safetensors({"w": bf16(5000)}), b=safetensors({"w": bf16(3000)}))
    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", empty)
        read(tmp_path, threads=2)
    assert made in ([64], [64, 64])


MIXED: dict[str, Spec] = {
    "odd": ("U8", (1,), b"\1"),  # so that what follows is not aligned
    "halves": bf16(3, 40_001, value=0x3C01),
    "empty": bf16(0, 4),
    "bytes": ("F8_E4M3", (70_003,), bytes(number % 120 for number in range(70_003))),
    "long": values("I64", np.arange(20_001, dtype="<i8")),
    "complex": values("C64", np.arange(9_001, dtype="<c8")),
    "nibbles": ("F4", (20_002,), bytes(number % 251 for number in range(10_001))),
    "last": values("F32", np.arange(33_333, dtype="<f4")),
}


@pytest.mark.parametrize("block", [2**24, 50_001])
def test_the_pass_that_digests_fingerprints_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Wherever blocks and chunks cut the tensors; and it finds the same digests and values as without."""
    monkeypatch.setattr(contents, "CHUNK_BYTES", 2**16)
    monkeypatch.setattr(contents, "BLOCK", block)
    array = np.zeros(9_000, "<u2")
    array[[8_200, 17]] = 0x7F80
    write(tmp_path, a=safetensors(MIXED), b=safetensors({"bad": values("BF16", array)}))
    found, without = read(tmp_path, fingerprinted=True), read(tmp_path)
    assert (found.digests, found.non_finite) == (without.digests, without.non_finite)
    assert found.non_finite == (NonFinite("b.safetensors", "bad", 17, 2),)
    tensors = MIXED | {"bad": values("BF16", array)}
    assert found.fingerprints == {
        name: fingerprint(bits_of(np.frombuffer(data, np.uint8), width_of(dtype)))
        for name, (dtype, _, data) in tensors.items()
        if name != "complex"  # that type has none
    }
    assert without.fingerprints == {}


@given(st.integers(0, 200), st.integers(0, 7))
def test_boundaries_cut_no_value_and_lose_none(position: int, odd: int) -> None:
    data = safetensors({"odd": ("U8", (odd,), bytes(odd)), "w": ("F64", (5,), bytes(40)), "i": ("I8", (3,), b"123")})
    start = len(data) - 43
    with memfd(data) as fd:
        search = Search("f", read_header(fd, len(data)))
    boundary = search.boundary(position)
    assert position - 8 < boundary <= position
    if start < position < start + 40:
        assert (boundary - start) % 8 == 0


class memfd:  # noqa: N801 (reads as a function)
    """A descriptor of some bytes."""

    def __init__(self, data: bytes) -> None:
        self.fd = os.memfd_create("test")
        os.write(self.fd, data)

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def test_a_file_that_becomes_shorter_is_an_io_error_and_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, a=safetensors({"w": bf16(2000)}))
    monkeypatch.setattr(contents, "CHUNK_BYTES", 512)
    on_read(monkeypatch, 2, lambda: os.truncate(tmp_path / "v" / "a.safetensors", 600))
    with pytest.raises(OSError, match="ended at byte 600"):
        read(tmp_path)


def test_an_io_error_is_raised_and_ends_the_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, a=safetensors({"w": bf16(2000)}), b=safetensors({"w": bf16(1000)}))

    def fail() -> None:
        raise OSError(5, "Input/output error")

    calls = on_read(monkeypatch, 1, fail)
    with pytest.raises(OSError, match="Input/output error"):
        read(tmp_path, threads=1)
    assert len(calls) == 1


def test_a_file_that_is_written_to_while_it_is_read_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, a=safetensors({"w": bf16(10)}))
    path = tmp_path / "v" / "a.safetensors"
    on_read(monkeypatch, 1, lambda: os.utime(path, ns=(1, 1)))
    with pytest.raises(ChangedError, match=r"a\.safetensors changed"):
        read(tmp_path)


def on_read(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> list[int]:
    """Do something right before the nth chunk is read."""
    calls: list[int] = []
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == number:
            act()
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return calls
