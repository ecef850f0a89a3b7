"""A file that is read whole comes with its bytes and its digest, whoever reads and digests which part of it."""

from pathlib import Path
from threading import Barrier, Event, Lock

import numpy as np
import pytest
from numpy.typing import NDArray

from refitd_client.contract.manifest import digest_of_block, joined
from refitd_client.validation import contents as whole_file
from refitd_client.validation.contents import ReadingStoppedError, read_whole

BLOCK = 1000


@pytest.fixture(autouse=True)
def lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_file, "BLOCK", BLOCK)
    monkeypatch.setattr(whole_file, "_PIECE", 300)
    monkeypatch.setattr(whole_file, "lanes_for", lambda jobs: min(jobs, 8))


def file_of(folder: Path, size: int) -> tuple[Path, NDArray[np.uint8]]:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    (folder / "file").write_bytes(data)
    return folder / "file", data


def digest_of(data: NDArray[np.uint8]) -> str:
    return joined([digest_of_block(data[at : at + BLOCK]) for at in range(0, max(1, len(data)), BLOCK)])


@pytest.mark.parametrize("size", [0, 1, 299, 300, 301, 999, 1000, 1001, 1300, 2000, 2001, 12_345])
def test_it_comes_whole_and_with_its_digest(tmp_path: Path, size: int) -> None:
    path, data = file_of(tmp_path, size)
    found = np.empty(size, np.uint8)
    with path.open("rb") as file:
        assert read_whole(file.fileno(), found) == digest_of(data)
    assert np.array_equal(found, data)


def test_a_block_is_digested_once_and_when_all_of_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its pieces come all at once, each to a thread of its own."""
    path, data = file_of(tmp_path, 2 * BLOCK)
    together, turn, digested = Barrier(8), Lock(), list[bytes]()
    fill = whole_file.fill

    def at_once(fd: int, piece: memoryview, offset: int) -> None:
        together.wait(30)
        fill(fd, piece, offset)

    def noted(block: NDArray[np.uint8]) -> bytes:
        with turn:
            digested.append(block.tobytes())
        return digest_of_block(block)

    monkeypatch.setattr(whole_file, "fill", at_once)
    monkeypatch.setattr(whole_file, "digest_of_block", noted)
    with path.open("rb") as file:
        assert read_whole(file.fileno(), np.zeros(len(data), np.uint8)) == digest_of(data)
    assert sorted(digested) == sorted([data[:BLOCK].tobytes(), data[BLOCK:].tobytes()])


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    path, data = file_of(tmp_path, 3 * BLOCK)
    with path.open("rb") as file, pytest.raises(OSError, match=r"the file ended at byte 3000"):
        read_whole(file.fileno(), np.empty(len(data) + 1, np.uint8))


def test_whoever_has_to_stop_reads_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = file_of(tmp_path, 50 * BLOCK)
    stop, fill, read = Event(), whole_file.fill, list[int]()

    def stopped(fd: int, piece: memoryview, offset: int) -> None:
        stop.set()
        read.append(offset)
        fill(fd, piece, offset)

    monkeypatch.setattr(whole_file, "fill", stopped)
    with path.open("rb") as file, pytest.raises(ReadingStoppedError):
        read_whole(file.fileno(), np.empty(len(data), np.uint8), stop=stop)
    assert len(read) <= 8, "what was begun, by each of the threads"
