"""Disks that are full or read-only, on small file systems of the test's own: intake stops, nothing is lost or deleted,
engines go on, and all of it is over by itself when there is room again."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from faults.room import Room, fill, room, use_up_names
from faults.stand import Stand, Subject, id_of, standing, until
from refitd_client import Progress, WeightPublisher
from refitd_client.contract.states import EngineState, VersionState
from refitd_client.errors import NoSpaceError, ServiceProblemError, StorageError
from support.jobs import RUN
from support.servers import ServerError

LARGE = "size=64m"


def small_root(where: Room, tmp_path: Path) -> tuple[Path, Path]:
    """A root on a file system of 2 MiB, and where it is seen from outside."""
    root = where.tmpfs(tmp_path / "small", "size=2m")
    return root, where.seen(root)


def refuses_for_space(stand: Stand, engine: Subject, step: int, *, fill_at_first: bool) -> None:
    """Publish a step on a disk that is full, or gets full when the first bytes are written."""

    def on_progress(_: Progress) -> None:
        if fill_at_first:
            fill(stand.root)

    with WeightPublisher(stand.root, RUN) as publisher, pytest.raises(NoSpaceError, match=r"full|free|space"):
        publisher.publish(engine.model(step), step=step, progress=on_progress)


def test_enospc_a_root_that_is_full_takes_no_version_leaves_nothing_behind_and_goes_on_when_there_is_room(
    engine: Subject, tmp_path: Path
) -> None:
    with room() as where:
        root, seen = small_root(where, tmp_path)
        with standing(tmp_path, engine, root=root, seen=seen, first=where.enter) as stand:
            stand.serve(engine.model(1), 1)
            filler = fill(seen)
            refuses_for_space(stand, engine, 2, fill_at_first=False)
            assert stand.folders() == ["v000001"]
            filler.unlink()
            refuses_for_space(stand, engine, 2, fill_at_first=True)
            assert stand.folders() == ["v000001"]
            assert stand.state_of(1) is VersionState.SEALED
            assert engine.serves(1)
            filler.unlink()
            stand.serve(engine.model(2), 2)
            assert engine.serves(2)


@pytest.mark.parametrize("used_up", ["bytes", "inodes"])
def test_enospc_a_root_that_is_full_is_given_room_by_collecting(used_up: str, engine: Subject, tmp_path: Path) -> None:
    """What the service writes in its own folder must not stand in the way of what makes room."""
    with room() as where:
        root, seen = where.tmpfs(tmp_path / "small", "size=2m,nr_inodes=200"), where.seen(tmp_path / "small")
        flags = ("--keep-last", "1")
        with standing(tmp_path, engine, *flags, root=root, seen=seen, first=where.enter) as stand:
            stand.serve(engine.model(1), 1)
            stand.client.pin(id_of(1))
            stand.serve(engine.model(2), 2)
            if used_up == "bytes":
                fill(seen)
            else:
                use_up_names(seen)
            stand.client.unpin(id_of(1))
            until(lambda: stand.folders() == ["v000002"], stand.refitd.tail())
            until(lambda: not any((seen / ".refitd" / "trash").rglob("*.safetensors")), "the trash was not emptied")


@pytest.mark.parametrize("how", ["full", "io_error"])
def test_a_state_folder_that_cannot_be_written_answers_507_and_goes_on_by_itself(
    how: str, engine: Subject, tmp_path: Path
) -> None:
    """ENOSPC on a tmpfs; then, as a disk with EIO refuses it, each write past a limit on the size of files."""
    with room() as where:
        state = where.tmpfs(tmp_path / "state", LARGE)
        flags = ("--keep-last", "1")
        with standing(tmp_path, engine, *flags, state=state, first=where.enter) as stand:
            stand.serve(engine.model(1), 1)
            filler = block(stand, where.seen(state), how)
            with WeightPublisher(stand.root, RUN) as publisher:
                publisher.publish(engine.model(2), step=2)
            with pytest.raises(ServiceProblemError) as refused:
                stand.announce(None, 2)
            assert (refused.value.problem.status, refused.value.problem.slug) == (507, "disk-full")
            assert "goes on by itself" in refused.value.problem.detail
            assert stand.ask("PUT", f"/v1/versions/{id_of(1)}/pin").status_code == 507
            assert stand.get("/readyz").status_code in {503, 507}
            assert engine.serves(1), "the engine was not left as it was"
            assert stand.folders() == ["v000001", "v000002"], "evidence was deleted"
            unblock(stand, filler)
            stand.is_served(2)
            assert engine.serves(2)
            until(lambda: stand.get("/readyz").status_code == 200)


def block(stand: Stand, state: Path, how: str) -> Path | None:
    """Let no file in the state folder grow."""
    if how == "full":
        return fill(state)
    stand.process.rlimit(psutil.RLIMIT_FSIZE, (0, psutil.RLIM_INFINITY))
    return None


def unblock(stand: Stand, filler: Path | None) -> None:
    """Let them grow again."""
    stand.process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
    if filler is not None:
        filler.unlink()


def test_erofs_a_root_that_becomes_read_only_serves_what_is_there_and_loses_nothing(
    engine: Subject, tmp_path: Path
) -> None:
    with room() as where:
        disk = where.tmpfs(tmp_path / "disk", LARGE)
        root = where.bind(disk, tmp_path / "root")
        seen = where.seen(root)
        flags = ("--keep-last", "1")
        with standing(tmp_path, engine, *flags, root=root, seen=seen, first=where.enter) as stand:
            stand.serve(engine.model(1), 1)
            stand.client.pin(id_of(1))
            stand.serve(engine.model(2), 2)
            where.unmount(root)
            where.bind(disk, root, "ro")
            with pytest.raises(StorageError, match="Read-only file system"), WeightPublisher(seen, RUN) as publisher:
                publisher.publish(engine.model(3), step=3)
            with WeightPublisher(where.seen(disk), RUN) as elsewhere:  # where the disk can be written, it arrives
                elsewhere.publish(engine.model(3), step=3)
            stand.is_served(3)
            assert engine.serves(3)
            stand.client.unpin(id_of(1))
            until(lambda: "nothing was reclaimed this time" in stand.refitd.log.read_text())
            assert stand.refused_to_reclaim() == (503, "not-ready")
            assert "Read-only" in stand.client.explain(id_of(1)).sentences[-1]
            assert stand.folders() == ["v000001", "v000002", "v000003"]
            assert stand.state_of(3) is VersionState.SEALED
            assert stand.engine_now.state is EngineState.IN_SYNC
            where.unmount(root)
            where.bind(disk, root)
            until(lambda: stand.folders() == ["v000003"], "what nobody needs was not collected when it could be")
            stand.serve(engine.model(4), 4)
            assert engine.serves(4)


@pytest.mark.parametrize("which", ["root", "state"])
@pytest.mark.parametrize("how", ["erofs", "enospc"])
def test_a_start_on_a_disk_that_cannot_be_written_is_refused_in_a_sentence(
    which: str, how: str, engine: Subject, tmp_path: Path
) -> None:
    with room() as where:
        disk = where.tmpfs(tmp_path / "disk", "size=64k")
        place = where.bind(disk, tmp_path / "place", "ro" if how == "erofs" else "rw")
        if how == "enospc":
            fill(where.seen(place))
        at: Any = {"root": place, "seen": where.seen(place)} if which == "root" else {"state": place}
        with pytest.raises(ServerError) as refused, standing(tmp_path, engine, first=where.enter, **at):
            pass
        told = str(refused.value)
        assert "refitd does not start" in told, told
        assert ("Read-only file system" if how == "erofs" else "No space left") in told or "full" in told, told
        assert "Traceback" not in told, told
