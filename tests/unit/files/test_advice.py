"""A root that cannot be written: a publisher and a service say what to do."""

import errno
import os
from pathlib import Path

import pytest

from refitd.root.ownership import StartRefusedError, owned, state_owned
from refitd_client import StorageError, WeightPublisher
from refitd_client.files.plain_file import with_advice

CANNOT = [
    (errno.EROFS, "its file system is mounted read-only: mount it to be written, or name another folder"),
    (errno.EACCES, "this user may not write there: give the folder to a group that trainer and service share"),
    (errno.EPERM, r"and take away what locks it \(chattr -i\)"),
]


@pytest.mark.parametrize(("number", "todo"), CANNOT)
def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, todo: str
) -> None:
    def fail(path: object, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "mkdir", fail)
    with pytest.raises(StorageError, match=rf"run a/b cannot be published into .*\[Errno {number}\] .*; .*{todo}"):
        WeightPublisher(tmp_path, "a/b")
    with pytest.raises(StartRefusedError, match=rf"its folder in the root: \[Errno {number}\] .*; .*{todo}"):
        owned(tmp_path).__enter__()
    with pytest.raises(StartRefusedError, match=rf"its state folder: \[Errno {number}\] .*; .*{todo}"):
        state_owned(tmp_path / "state").__enter__()


@pytest.mark.parametrize("root", ["file", "file/below"])
def test_a_root_that_is_a_file_is_said_to_be_none(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="a file lies where the folder, or one above it, should be: name a folder"):
        WeightPublisher(tmp_path / root, "run")


def test_an_error_that_nothing_is_known_of_stands_as_it_is() -> None:
    assert with_advice(OSError(errno.EIO, "Input/output error", "/x")) == "[Errno 5] Input/output error: '/x'"
