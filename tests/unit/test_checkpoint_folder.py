"""A checkpoint's folder, taken as data."""

import os
from pathlib import Path

import pytest

from refitd.areal.checkpoint_folder import CheckpointRefusedError, place_of, plain_files_of


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


def test_a_link_is_refused_wherever_it_leads(folder: Path, tmp_path: Path) -> None:
    (folder / "notes.txt").symlink_to("model.safetensors")
    with (
        pytest.raises(CheckpointRefusedError, match=r"notes\.txt.* symbolic link"),
        plain_files_of(folder, tmp_path / "root"),
    ):
        pass


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
        place_of(Path(path), Path("/root"))
