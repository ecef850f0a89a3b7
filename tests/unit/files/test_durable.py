"""The effects on the file system do what their names say."""

import os
from pathlib import Path

import pytest

from refitd_client.files import durable


def test_a_record_is_the_old_one_or_the_new_one_and_leaves_no_scratch(tmp_path: Path) -> None:
    record, scratch = tmp_path / "record", tmp_path / "scratch"
    durable.replace_file(record, b"one", by=scratch)
    durable.replace_file(record, b"two", by=scratch)
    assert record.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["record"]


def test_a_new_file_never_goes_through_what_is_there(tmp_path: Path) -> None:
    """Neither an old file nor a link that somebody planted."""
    victim = tmp_path / "victim"
    (tmp_path / "link").symlink_to(victim)
    (tmp_path / "old").write_text("old")
    for name in ("link", "old"):
        with pytest.raises(FileExistsError):
            durable.create(tmp_path / name)
    assert not victim.exists()


def test_a_write_that_the_kernel_takes_in_parts_is_written_whole() -> None:
    data = bytes(range(256)) * 1024
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    got = bytearray()
    real = os.write

    def write_what_fits(fd: int, view: memoryview) -> int:
        try:
            return real(fd, view)
        except BlockingIOError:
            got.extend(os.read(reader, 2**16))
            return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", write_what_fits)
        durable.write(writer, data)
    os.close(writer)
    while part := os.read(reader, 2**16):
        got.extend(part)
    os.close(reader)
    assert bytes(got) == data


def test_removing_a_folder_never_follows_a_link(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("kept")
    doomed = tmp_path / "doomed"
    doomed.mkdir()
    (doomed / "file").write_text("doomed")
    (doomed / "link").symlink_to(kept)
    durable.remove_folder(doomed)
    assert not doomed.exists()
    assert (kept / "file").read_text() == "kept"


def test_folders_that_another_process_makes_first_are_used(tmp_path: Path) -> None:
    durable.make_folders(tmp_path / "a" / "b")
    durable.make_folders(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_what_is_made_is_as_open_as_the_umask_leaves_it(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        durable.make_folder(tmp_path / "folder")
        durable.write_file(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
