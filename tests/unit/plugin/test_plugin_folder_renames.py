"""What the kernel tells of renames: folders that got a name in the one folder that is watched, and nothing else."""

import os
from pathlib import Path

from refitd_client.files.plain_file import open_folder
from refitd_plugin.folder_renames import FolderRenames


def watched(renames: FolderRenames, folder: Path) -> None:
    fd = open_folder(folder)
    renames.watch(fd)
    os.close(fd)


def told(renames: FolderRenames) -> list[str]:
    """The names of the next event, or events."""
    found = renames.wait()
    for name, folder in found:
        assert os.fstat(folder).st_nlink > 0, name
        os.close(folder)
    return [name for name, _ in found]


def moved(folder: Path, name: str) -> None:
    (folder.parent / "made").mkdir()
    (folder.parent / "made").rename(folder / name)


def test_only_folders_that_were_renamed_into_the_watched_one_are_told(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    renames = FolderRenames()
    watched(renames, run)
    (run / "made-here").mkdir()
    (run / "file").write_bytes(b"")
    (run / "file").rename(run / "renamed-file")
    moved(other, "elsewhere")
    moved(run, ".incoming-1")
    found = told(renames)
    while not found:  # events may come one by one
        found = told(renames)
    assert found == [".incoming-1"]


def test_another_folder_is_watched_in_the_place_of_the_one_before(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    renames = FolderRenames()
    watched(renames, run)
    watched(renames, other)
    watched(renames, other)  # again, as for each version
    moved(run, "before")
    moved(other, "now")
    found = told(renames)
    while not found:
        found = told(renames)
    assert found == ["now"]


def test_a_folder_that_has_another_name_again_is_left_out(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    renames = FolderRenames()
    watched(renames, run)
    moved(run, "first")
    (run / "first").rename(tmp_path / "away")
    moved(run, "second")
    found = told(renames)
    while "second" not in found:
        found += told(renames)
    assert found == ["second"]
