"""What a dead publisher left behind is found; what a living one writes is let alone."""

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from refitd.reclaim import incoming
from refitd.reclaim.incoming import discard_abandoned, survey
from refitd.reclaim.trash import empty
from refitd.root.handle import root_at
from refitd.root.scan import Discarded, Gone, Incoming, Refused
from refitd_client.files import plain_file

HOUR = 3600.0
PATH = "exp/trial/.incoming-a1"


@pytest.fixture(autouse=True)
def other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root is on a file system of several hosts: a free lock proves nothing by itself, and ages count."""
    monkeypatch.setattr(plain_file, "_file_system", lambda _: "nfs4")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An incoming folder with a lock that nobody holds, last written two hours ago."""
    folder = tmp_path / PATH
    (folder / "inner").mkdir(parents=True)
    for name in (".lock", "model.safetensors", "inner/optimizer"):
        (folder / name).write_bytes(b"x" * 10)
    make_old(folder, 2 * HOUR)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    with root_at(tmp_path) as handle:
        yield handle


def make_old(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (then, then), follow_symlinks=False)


def the_one(root: int) -> Incoming:
    (found,) = survey(root, ["exp/trial"])
    return found


def test_old_and_unlocked_is_abandoned(folder: Path, root: int) -> None:
    found = the_one(root)
    assert (found.path, found.abandoned, found.bytes) == (PATH, True, 30)
    assert found.reason == "abandoned: last written 2 h ago, and its lock is free"
    assert discard_abandoned(root, PATH) == Discarded(PATH)
    assert not folder.exists()
    assert empty(root).folders == 1


def test_young_is_not_abandoned(folder: Path, root: int) -> None:
    make_old(folder, HOUR / 2)
    found = the_one(root)
    assert not found.abandoned
    assert found.reason == "last written 30 min ago: it may be abandoned after 1 h"


@pytest.mark.parametrize("name", ["model.safetensors", "inner/optimizer", "inner"])
def test_the_newest_time_inside_counts(folder: Path, root: int, name: str) -> None:
    os.utime(folder / name)
    assert not the_one(root).abandoned
    assert isinstance(discard_abandoned(root, PATH), Refused)
    assert folder.exists()


def test_a_living_publisher_is_let_alone_however_slow_it_is(folder: Path, root: int) -> None:
    make_old(folder, 1000 * HOUR)
    with (folder / ".lock").open("w") as lock:
        os.utime(folder / ".lock", (0, 0))
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = the_one(root)
        assert (found.abandoned, found.reason) == (False, "its publisher is alive: it holds the lock")
        assert discard_abandoned(root, PATH) == Refused(PATH, found.reason)
    assert folder.exists()


def test_no_publisher_comes_back_while_the_folder_is_discarded(
    folder: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []
    real = incoming.discard

    def discard_beside_a_publisher(*arguments: object) -> object:
        with (folder / ".lock").open("r+") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        refused.append(True)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(incoming, "discard", discard_beside_a_publisher)
    assert discard_abandoned(root, PATH) == Discarded(PATH)
    assert refused == [True]


@pytest.mark.parametrize(("hours", "expected"), [(2.0, False), (23.9, False), (24.1, True)])
def test_without_a_lock_it_must_be_very_old(folder: Path, root: int, hours: float, expected: bool) -> None:
    (folder / ".lock").unlink()
    make_old(folder, hours * HOUR)
    assert the_one(root).abandoned is expected
    assert isinstance(discard_abandoned(root, PATH), Discarded if expected else Refused)


def test_a_fifo_for_a_lock_does_not_stop_the_sweep(folder: Path, root: int) -> None:
    (folder / ".lock").unlink()
    os.mkfifo(folder / ".lock")
    make_old(folder, 2 * HOUR)
    assert the_one(root).path == PATH


def test_a_link_for_a_lock_is_not_followed(folder: Path, root: int, tmp_path: Path) -> None:
    (folder / ".lock").unlink()
    (folder / ".lock").symlink_to(tmp_path / "precious")
    make_old(folder, 1000 * HOUR)
    assert not the_one(root).abandoned
    assert not (tmp_path / "precious").exists()


def test_age_comes_from_the_clock_of_the_file_system(folder: Path, root: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(folder)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert not the_one(root).abandoned, "the wall clock of the machine is a century ahead"


def test_links_in_place_of_incoming_folders_and_runs_are_not_followed(folder: Path, root: int, tmp_path: Path) -> None:
    (tmp_path / "exp" / "trial" / ".incoming-b").symlink_to(folder)
    (tmp_path / "linked").symlink_to(tmp_path / "exp")
    found = {item.path: item for item in survey(root, ["exp/trial", "linked/trial", "../exp", "none"])}
    assert found.keys() == {PATH, "exp/trial/.incoming-b", "linked/trial"}
    assert not found["exp/trial/.incoming-b"].abandoned
    assert not found["linked/trial"].abandoned
    assert isinstance(discard_abandoned(root, "exp/trial/.incoming-b"), Refused)
    assert isinstance(discard_abandoned(root, "linked/trial/.incoming-a1"), Refused)
    assert folder.exists()


def test_only_incoming_folders_are_discarded_this_way(root: int, tmp_path: Path) -> None:
    (tmp_path / "exp" / "v000001").mkdir(parents=True)
    make_old(tmp_path / "exp" / "v000001", 1000 * HOUR)
    for path in ("exp/v000001", ".incoming-x/../exp", "../.incoming-x"):
        assert isinstance(discard_abandoned(root, path), Refused)
    assert survey(root, ["exp"]) == []


def test_one_that_was_published_meanwhile_is_gone(root: int) -> None:
    assert discard_abandoned(root, PATH) == Gone(PATH)


def test_a_folder_that_is_nested_too_deep_is_reported(folder: Path, root: int) -> None:
    (folder / "/".join("d" * (incoming.MAX_DEPTH + 1))).mkdir(parents=True)
    make_old(folder, 1000 * HOUR)
    found = the_one(root)
    assert not found.abandoned
    assert "nested deeper" in found.reason
