"""What a trainer's files may do besides being read is not carried into files that the service makes.

A set-user-ID program in a version's folder, copied with its mode by a service that is root, makes its runner root.
"""

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from refitd.policy.materialize import MakeCopy
from refitd.reclaim import slots
from refitd.reclaim.trash import discard
from refitd.root.handle import identity_of, root_at
from refitd.root.ownership import mark_root
from refitd.root.scan import Discarded, Refused
from refitd.state.journal.recovery import write_note
from refitd_client import WeightPublisher
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.states import Kind, VersionState
from refitd_inside.materialize.disk import DiskCopies
from support.checkpoints import tensors, write_model
from support.deltas import chain, record_of, training
from support.servers import RefitdServer

PROGRAM = b"#!/bin/sh\n"


def armed(folder: Path) -> list[str]:
    """Put a program into a version's folder, and make programs of its files; what may be copied all the same."""
    (folder / "tool").write_bytes(PROGRAM)
    (folder / "run.sh").write_bytes(PROGRAM)
    if not (folder / "refit.json").exists():
        (folder / "config.json").write_text("{}")
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o6755)
            with suppress(OSError):  # not every file system has them
                os.setxattr(path, "user.of-the-trainer", b"x")
    return sorted(path.name for path in folder.iterdir() if path.suffix in {".safetensors", ".json"})


def check(folder: Path, *names: str) -> None:
    """See that files are there, these alone, and that none is more than data."""
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    for path in folder.iterdir():
        status = path.lstat()
        assert stat.S_ISREG(status.st_mode)
        assert stat.S_IMODE(status.st_mode) & ~0o664 == 0, oct(status.st_mode)
        assert (status.st_uid, os.listxattr(path)) == (os.geteuid(), [])


@pytest.fixture(params=[0o022, 0o002, 0o000], ids=oct)
def umask(request: pytest.FixtureRequest) -> object:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
async def test_a_copy_holds_weights_and_what_engines_read_and_nothing_of_their_modes(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        full, *deltas = chain(trainer, tmp_path, 3)
        names = armed(tmp_path / full.path)
        names.remove("refit.json")
        full = record_of(tmp_path, _at(tmp_path / full.path))
        copies = DiskCopies(tmp_path)
        copy = await copies.write(MakeCopy(source=full, deltas=(deltas[0],)))
        check(tmp_path / copy.path, *names)


@pytest.mark.usefixtures("umask")
def test_what_is_published_from_a_folder_has_nothing_of_its_modes(tmp_path: Path) -> None:
    with training(tmp_path / "elsewhere") as trainer:
        full = chain(trainer, tmp_path / "elsewhere", 1)[0]
    source = tmp_path / "elsewhere" / full.path
    names = armed(source)
    (tmp_path / "root").mkdir()
    with WeightPublisher(tmp_path / "root", "run") as publisher:
        done = publisher.publish(source, step=1)
    found = sorted(path.name for path in done.path.iterdir())
    assert found == names
    for path in done.path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & ~0o666 == 0
        assert os.listxattr(path) == []


@pytest.mark.usefixtures("umask")
def test_files_that_may_be_run_are_not_given_out_to_be_written_again(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        full = chain(trainer, tmp_path, 1)[0]
    next((tmp_path / full.path).glob("*.safetensors")).chmod(0o4755)
    with root_at(tmp_path) as root:
        status = (tmp_path / full.path).stat()
        gone = discard(root, full.path, identity_of(status))
        assert isinstance(gone, Discarded)
        refused = slots.hand_back(root, gone, "run")
    assert isinstance(refused, Refused)
    assert "has mode 4755, which no file of weights has" in refused.reason


@pytest.mark.usefixtures("umask")
def test_users_outside_the_group_cannot_take_a_run_s_lock(tmp_path: Path) -> None:
    """Who can open the file can lock it, also without the right to write."""
    lock = tmp_path / "run" / ".publisher.lock"
    for _ in range(2):
        with WeightPublisher(tmp_path, "run") as publisher:
            publisher.publish(tensors(1), step=1)
            assert stat.S_IMODE(lock.stat().st_mode) & 0o007 == 0
            assert stat.S_IMODE(lock.stat().st_mode) & 0o600 == 0o600
        shutil.rmtree(tmp_path / "run" / "v000001")
        (tmp_path / "run" / ".publisher.json").unlink()
        lock.chmod(0o644)  # as an earlier refitd made it


@pytest.mark.usefixtures("umask")
def test_users_outside_the_service_cannot_write_to_what_says_which_root_it_is(tmp_path: Path) -> None:
    own = tmp_path / SERVICE_FOLDER
    own.mkdir()
    assert mark_root(tmp_path, None, has_versions=False, mounts="") is not None
    write_note(tmp_path, str(tmp_path / "state"))
    for path in own.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0, path.name


def _at(path: Path) -> object:
    class At:
        pass

    At.path = path  # type: ignore[attr-defined]
    return At


@pytest.mark.e2e
@pytest.mark.skipif(os.geteuid() != 0, reason="the service is to be root")
def test_a_service_that_is_root_makes_no_program_of_root_s_and_says_that_it_need_not_be_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with training(root) as trainer:
        full = trainer.publish()
        armed(full.path)
        base = write_model(tmp_path / "base", trainer.weights)
        refitd = RefitdServer(tmp_path, root, [], "--base-model", str(base))
        with refitd, _client(refitd) as client:
            found = client.wait(full.version_id, "sealed", timeout=60).version
            assert found.state is VersionState.SEALED, found.reason
            trainer.base = lambda: full.version_id
            delta = trainer.publish()
            for event in client.events("0"):
                if event.subject == delta.version_id and event.text.startswith("can be loaded from"):
                    break
            assert client.version(delta.version_id).kind is Kind.DELTA
        assert "refitd runs as root and need not" in refitd.tail()
    made = [path for path in (root / SERVICE_FOLDER / "copies").rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in made)
    for path in made:
        assert path.name != "tool"
        assert stat.S_IMODE(path.stat().st_mode) & ~0o664 == 0


def _client(refitd: RefitdServer) -> object:
    from refitd_client import RefitClient

    return RefitClient(refitd.url)
