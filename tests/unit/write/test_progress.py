"""How far a publisher is with a slot: what is said grows, is read by others, and is no part of the version."""

import os
from pathlib import Path

import pytest

from refitd_client.contract.naming import STAGING_LOCK, STAGING_PROGRESS
from refitd_client.files.durable import Mappings
from refitd_client.files.plain_file import FileLock, NotPlainError, open_folder
from refitd_client.write.progress import WriteProgress, WriterProgress, open_progress, read_progress
from refitd_client.write.version_folder import Laps, Meter, Staging, staged


@pytest.fixture
def folder(tmp_path: Path) -> int:
    return open_folder(tmp_path)


def test_it_says_of_each_shard_in_the_order_of_names_how_far_it_is(tmp_path: Path, folder: int) -> None:
    progress = WriteProgress(tmp_path, ["b", "a"])
    read = open_progress(folder)
    assert read_progress(read, 2) == (0, 0)
    progress.reached("b", 2**40)
    progress.reached("a", 7)
    assert read_progress(read, 2) == (7, 2**40)
    os.close(read)
    progress.close()


def test_a_block_that_is_told_late_takes_nothing_back(tmp_path: Path, folder: int) -> None:
    progress = WriteProgress(tmp_path, ["a"])
    progress.reached("a", 32)
    progress.reached("a", 16)
    assert read_progress(open_progress(folder), 1) == (32,)
    progress.close()


def test_a_file_that_is_only_begun_says_nothing(tmp_path: Path, folder: int) -> None:
    (tmp_path / STAGING_PROGRESS).write_bytes(b"\x07")
    assert read_progress(open_progress(folder), 2) == (7, 0)


@pytest.mark.parametrize("kind", ["none", "link", "fifo"])
def test_only_a_plain_file_is_opened(tmp_path: Path, folder: int, kind: str) -> None:
    if kind == "link":
        (tmp_path / "secret").write_bytes(b"12345678")
        (tmp_path / STAGING_PROGRESS).symlink_to("secret")
    elif kind == "fifo":
        os.mkfifo(tmp_path / STAGING_PROGRESS)
    with pytest.raises(FileNotFoundError if kind == "none" else NotPlainError):
        open_progress(folder)


def test_a_version_that_is_committed_has_none_and_readers_still_have_the_last_word(tmp_path: Path) -> None:
    def take(path: Path) -> FileLock:
        path.mkdir()
        (path / "model.safetensors").write_bytes(bytes(16))
        return FileLock(path / STAGING_LOCK)

    with staged(tmp_path, Meter(16, None), Laps(), take=take, mappings=Mappings()) as staging:
        progress = staging.show_progress(["model.safetensors"])
        assert progress is not None
        read = open_progress(open_folder(staging.path))
        progress.reached("model.safetensors", 16)
        staging.commit(b"{}", "refit.json", tmp_path / "v000001")
    assert sorted(path.name for path in (tmp_path / "v000001").iterdir()) == ["model.safetensors", "refit.json"]
    assert read_progress(read, 1) == (16,)


def test_new_files_have_none(tmp_path: Path) -> None:
    staging = Staging(tmp_path, Meter(0, None), Laps(), Mappings())
    assert staging.show_progress(["model.safetensors"]) is None
    assert not (tmp_path / STAGING_PROGRESS).exists()


def test_where_several_write_all_is_there_as_far_as_the_last_of_them_is(tmp_path: Path, folder: int) -> None:
    progress = WriteProgress(tmp_path, ["b", "a"], writers=3)
    others = [WriterProgress(open_progress(folder, os.O_RDWR), ["a", "b"], writer) for writer in (1, 2)]
    read = open_progress(folder)
    progress.reached("a", 9)
    progress.reached("b", 5)
    others[0].reached("a", 7)
    others[1].reached("b", 8)
    assert read_progress(read, 2) == (0, 0)
    others[1].reached("a", 8)
    others[0].reached("b", 2**40)
    assert read_progress(read, 2) == (7, 5)
    progress.close()
