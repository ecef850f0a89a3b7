"""What publishers that were killed have left goes at once; what is being written stays, whoever looks."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from refitd.reclaim.incoming import discard_abandoned, survey
from refitd.root.handle import root_at
from refitd.root.scan import Discarded, Refused
from refitd_client import WeightPublisher
from refitd_client.files import plain_file

WEIGHTS = {"layer.weight": np.zeros((4, 4), dtype=np.float32)}

WRITES = """
import sys, time
import numpy as np
from refitd_client import WeightPublisher
from refitd_client.write import version_folder

def stop(*_):
    print("writing", flush=True)
    time.sleep(600)

version_folder.Staging.commit = stop
with WeightPublisher(sys.argv[1], sys.argv[2]) as publisher:
    publisher.publish({"layer.weight": np.zeros((4, 4), dtype=np.float32)}, step=1)
"""


@contextmanager
def writing(root: Path, run: str) -> Iterator["subprocess.Popen[str]"]:
    """A publisher that has written a version and not committed it."""
    command = [sys.executable, "-c", WRITES, str(root), run]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "writing\n"
            yield child
        finally:
            child.kill()


def left_in(root: Path, run: str) -> list[Path]:
    return sorted((root / run).glob(".incoming-*"))


def dead(root: Path, run: str) -> Path:
    """What a publisher leaves that was killed in the middle of a version."""
    with writing(root, run) as child:
        child.send_signal(signal.SIGKILL)
        child.wait()
    (left,) = left_in(root, run)
    return left


def test_the_next_publisher_of_a_run_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    dead(tmp_path, "run")
    with WeightPublisher(tmp_path, "run") as publisher:
        assert left_in(tmp_path, "run") == []
        publisher.publish(WEIGHTS, step=1)
    assert len(list((tmp_path / "run").glob("v*"))) == 1


def test_a_living_publisher_of_another_run_loses_nothing(tmp_path: Path) -> None:
    dead(tmp_path, "run")
    with writing(tmp_path, "other"):
        WeightPublisher(tmp_path, "run").close()
        with root_at(tmp_path) as root:
            (found,) = survey(root, ["run", "other"])
            assert not found.abandoned
            assert isinstance(discard_abandoned(root, found.path), Refused)
        assert len(left_in(tmp_path, "other")) == 1


def test_a_collector_takes_what_a_killed_publisher_left_at_once(tmp_path: Path) -> None:
    left = dead(tmp_path, "run")
    with root_at(tmp_path) as root:
        (found,) = survey(root, ["run"])
        assert found.abandoned
        assert found.reason.endswith("and its publisher is gone")
        assert discard_abandoned(root, found.path) == Discarded(found.path)
    assert not left.exists()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root is on a network file system that shows no locks of other hosts, and its publisher ran on another one."""
    monkeypatch.setattr(plain_file, "_file_system", lambda _: "nfs4")
    monkeypatch.setattr(plain_file, "_boot", lambda: "another kernel")


@pytest.mark.usefixtures("elsewhere")
def test_what_another_host_may_be_writing_stays_until_it_is_old(tmp_path: Path) -> None:
    left = dead(tmp_path, "run")
    WeightPublisher(tmp_path, "run").close()
    assert left.exists()
    with root_at(tmp_path) as root:
        (found,) = survey(root, ["run"])
        assert not found.abandoned
        for path in [*left.iterdir(), left]:
            os.utime(path, (1, 1))
        (found,) = survey(root, ["run"])
        assert found.abandoned


def test_what_a_pull_of_this_service_left_is_not_taken_for_dead(tmp_path: Path) -> None:
    """It goes on with it."""
    dead(tmp_path, "run").rename(left := tmp_path / "run" / f".incoming-v000001-{'a' * 32}")
    with root_at(tmp_path) as root:
        (found,) = survey(root, ["run"])
        assert not found.abandoned
    assert left.exists()


@pytest.mark.parametrize("name", [".incoming-mine", f".incoming-{'a' * 32}"])
def test_a_folder_that_no_publisher_has_made_is_let_alone(tmp_path: Path, name: str) -> None:
    mine = tmp_path / "run" / name
    mine.mkdir(parents=True)
    (mine / "precious").write_bytes(b"x")
    WeightPublisher(tmp_path, "run").close()
    assert (mine / "precious").exists()


def test_a_link_in_the_place_of_such_a_folder_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / ".lock").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f".incoming-{'a' * 32}").symlink_to(precious)
    WeightPublisher(tmp_path, "run").close()
    assert (precious / ".lock").exists()


def test_a_publisher_waits_for_a_look_at_its_lock_and_makes_another_folder_where_it_was_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the making of the lock's file and the lock, it looks like a dead publisher's."""
    real, taken = plain_file._is_taken, list[str]()

    def taken_away_first(fd: int) -> bool:
        name = str(Path(f"/proc/self/fd/{fd}").readlink())
        if ".incoming-" in name and not taken:
            with root_at(tmp_path) as root:
                (found,) = survey(root, ["run"])
                assert found.abandoned
                taken.append(found.path)
                assert discard_abandoned(root, found.path) == Discarded(found.path)
        return real(fd)

    monkeypatch.setattr(plain_file, "_is_taken", taken_away_first)
    with WeightPublisher(tmp_path, "run") as publisher:
        publisher.publish(WEIGHTS, step=1)
    assert len(taken) == 1
    assert (tmp_path / "run/v000001/refit.json").exists()
