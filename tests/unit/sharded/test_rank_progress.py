"""How far each rank is with a slot that all write: all is there as far as the last of them is."""

import os
from pathlib import Path

import pytest

from refitd_client.contract.naming import STAGING_PROGRESS
from refitd_client.files.plain_file import NotPlainError, open_folder
from refitd_client.sharded.rank_slot import WriterProgress, begin_progress, open_progress, read_progress


@pytest.fixture
def folder(tmp_path: Path) -> int:
    return open_folder(tmp_path)


def test_all_is_there_as_far_as_the_rank_says_that_has_come_least_far(tmp_path: Path, folder: int) -> None:
    begin_progress(tmp_path, 2, 3)
    ranks = [WriterProgress(open_progress(folder), ["b", "a"], rank) for rank in range(3)]
    read = open_progress(folder)
    assert read_progress(read, 2) == (0, 0)
    ranks[0].reached("a", 9)
    ranks[0].reached("b", 5)
    ranks[1].reached("a", 7)
    ranks[2].reached("b", 8)
    assert read_progress(read, 2) == (0, 0)
    ranks[2].reached("a", 8)
    ranks[1].reached("b", 2**40)
    assert read_progress(read, 2) == (7, 5)


def test_a_block_that_is_told_late_takes_nothing_back(tmp_path: Path, folder: int) -> None:
    begin_progress(tmp_path, 1, 1)
    rank = WriterProgress(open_progress(folder), ["a"], 0)
    rank.reached("a", 32)
    rank.reached("a", 16)
    assert read_progress(open_progress(folder), 1) == (32,)


@pytest.mark.parametrize("kind", ["none", "link", "fifo"])
def test_only_a_plain_file_is_opened(tmp_path: Path, folder: int, kind: str) -> None:
    if kind == "link":
        (tmp_path / "secret").write_bytes(b"12345678")
        (tmp_path / STAGING_PROGRESS).symlink_to("secret")
    elif kind == "fifo":
        os.mkfifo(tmp_path / STAGING_PROGRESS)
    with pytest.raises(FileNotFoundError if kind == "none" else NotPlainError):
        open_progress(folder)
