"""A checkpoint's folder, taken as data."""

import errno
import os
import re
from pathlib import Path

import pytest

from refitd_client.checkpoint.opening import FileStat, Folder
from refitd_front.versions import CheckpointRefusedError, plain_files_of, root_of, unreadable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "root/exp/weight_update_v1"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "optimizer").mkdir()
    (tmp_path / "secret").write_text("a token")
    return folder


def test_plain_files_are_shown_under_their_names_and_folders_are_not(folder: Path, tmp_path: Path) -> None:
    with plain_files_of(folder, tmp_path / "root") as view:
        assert {path.name: path.read_bytes() for path in view.iterdir()} == {"model.safetensors": b"weights"}
        assert view.stat().st_mode & 0o777 == 0o700
    assert not view.exists()
    assert (folder / "model.safetensors").exists()


def test_what_is_put_in_a_files_place_afterwards_is_not_read(folder: Path, tmp_path: Path) -> None:
    with plain_files_of(folder, tmp_path / "root") as view:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(tmp_path / "secret")
        assert (view / "model.safetensors").read_bytes() == b"weights"


def test_no_descriptor_stays_open(folder: Path, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with plain_files_of(folder, tmp_path / "root"):
        pass
    (folder / "notes.txt").symlink_to("model.safetensors")
    for place in (folder, folder / "missing"):
        with pytest.raises((CheckpointRefusedError, FileNotFoundError)), plain_files_of(place, tmp_path / "root"):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("path", ["/elsewhere", "/root/../etc", "/root", "/root/a/../b", "/rooted/a"])
def test_a_folder_is_taken_from_beneath_the_root_alone(path: str) -> None:
    with pytest.raises(CheckpointRefusedError, match="--checkpoints"):
        root_of(Path(path), [Path("/root")])


def test_what_cannot_be_read_is_named_with_the_user_who_cannot_and_what_to_do(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Folder.open

    def denied(self: Folder, name: str, expected: FileStat) -> object:
        if name == "model.safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return opened(self, name, expected)

    monkeypatch.setattr(Folder, "open", denied)
    shard = re.escape(str(folder / "model.safetensors"))
    with (
        pytest.raises(
            CheckpointRefusedError, match=f"{shard} cannot be read: Permission .*user id {os.geteuid()}.*chmod"
        ),
        plain_files_of(folder, tmp_path / "root"),
    ):
        pass


def test_the_folder_above_that_is_closed_is_the_one_that_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: path != folder.parent)
    error = PermissionError(errno.EACCES, "Permission denied", str(folder))
    assert str(unreadable(folder, error)).startswith(f"{folder.parent} cannot be read")
    assert str(unreadable(folder, OSError(errno.EIO, "I/O error"))) == f"{folder} cannot be read: I/O error"
