"""File systems that vanish under a running service and come back: nothing is deleted, and nothing counts as lost."""

import shutil
from pathlib import Path

from faults.room import room
from faults.stand import Subject, id_of, standing, until
from refitd_client.contract.states import VersionState
from refitd_doctor.journal import still
from support.jobs import RUN, served_by

KEEP_ONE = ("--keep-last", "1")


def test_a_vanished_mount_of_the_root_deletes_and_loses_nothing_and_is_picked_up_when_it_is_back(
    engine: Subject, tmp_path: Path
) -> None:
    with room() as where:
        disk = where.tmpfs(tmp_path / "disk", "size=64m")
        root = where.bind(disk, tmp_path / "root")
        kept = where.seen(disk)
        with standing(tmp_path, engine, *KEEP_ONE, root=root, seen=where.seen(root), first=where.enter) as stand:
            stand.serve(engine.model(1), 1)
            stand.client.pin(id_of(1))
            stand.serve(engine.model(2), 2)
            before = sorted(path.relative_to(kept) for path in kept.rglob("*.safetensors"))
            where.unmount(root)
            until(lambda: stand.get("/readyz").status_code == 503)
            assert "unmounted" in stand.get("/readyz").json()["detail"]
            stand.client.unpin(id_of(1))
            assert all(line.keep for line in stand.client.reclaim().items)
            assert [stand.state_of(step) for step in (1, 2)] == [VersionState.SEALED] * 2
            assert engine.serves(2)
            assert sorted(path.relative_to(kept) for path in kept.rglob("*.safetensors")) == before
            where.bind(disk, root)
            until(lambda: stand.get("/readyz").status_code == 200)
            stand.serve(engine.model(3), 3)
            assert engine.serves(3)
            assert not [event for event in stand.events if "lost" in event.text]


def test_a_vanished_mount_at_the_start_deletes_nothing_and_is_picked_up_when_it_is_back(
    engine: Subject, tmp_path: Path
) -> None:
    """The mount point itself is an ordinary, empty folder, in which a trainer publishes as on a new root."""
    with room() as where:
        disk = where.tmpfs(tmp_path / "disk", "size=64m")
        root = where.bind(disk, tmp_path / "root")
        kept = where.seen(disk)
        with standing(tmp_path, engine, *KEEP_ONE, root=root, seen=where.seen(root), first=where.enter) as stand:
            stand.serve(engine.model(1), 1)
            before = sorted(path.relative_to(kept) for path in kept.rglob("*.safetensors"))
            stand.refitd.stop()
            where.unmount(root)
            stand.refitd.start()
            ready = stand.get("/readyz")
            assert ready.status_code == 503
            assert all(word in ready.json()["detail"] for word in ("unmounted", ".refitd/id"))
            shutil.copytree(engine.model(2), stand.root / RUN / "v000002")
            refused = stand.ask("POST", "/v1/versions", {"run": RUN, "step": 2})
            assert (refused.status_code, refused.json()["type"]) == (503, "urn:refitd:problem:not-ready")
            assert all(line.keep for line in stand.client.reclaim().items)
            assert [version.state for version in stand.client.versions().items] == [VersionState.SEALED]
            assert engine.serves(1)
            where.bind(disk, root)
            until(lambda: stand.get("/readyz").status_code == 200)
            stand.client.reclaim()
            assert sorted(path.relative_to(kept) for path in kept.rglob("*.safetensors")) == before
            stand.serve(engine.model(2), 2)
            assert engine.serves(2)
            assert not [event for event in stand.events if "lost" in event.text]
            assert is_owned(stand.root, stand.refitd.pid)


def test_a_root_in_memory_that_a_reboot_has_emptied_is_begun_anew(engine: Subject, tmp_path: Path) -> None:
    """It is mounted, where it was before, and there is nothing in it: that is how it is, and nobody has to be asked."""
    with room() as where:
        root = where.tmpfs(tmp_path / "root", "size=64m")
        with standing(tmp_path, engine, root=root, seen=where.seen(root), first=where.enter) as stand:
            stand.serve(engine.model(1), 1)
            stand.refitd.stop()
            where.unmount(root)
            where.tmpfs(root, "size=64m")
            stand.refitd.start()
            until(lambda: stand.get("/readyz").status_code == 200)
            until(lambda: stand.state_of(1) is VersionState.LOST)
            assert engine.serves(1)
            stand.serve(engine.model(2), 2)
            assert engine.serves(2)


def is_owned(root: Path, by: int) -> bool:
    """Whether a process holds the root's lock."""
    with still(root) as holder:
        return holder == f"pid {by}"


def test_a_vanished_mount_of_the_state_folder_forgets_no_notice_that_was_answered_2xx(
    engine: Subject, tmp_path: Path
) -> None:
    with room() as where:
        disk = where.tmpfs(tmp_path / "disk", "size=64m")
        state = where.bind(disk, tmp_path / "state")
        with standing(tmp_path, engine, state=state, first=where.enter) as stand:
            stand.serve(engine.model(1), 1)
            where.unmount(state)
            answered = [1]
            for step in (2, 3):
                stand.publish(engine.model(step), step)
                if stand.ask("POST", "/v1/versions", {"run": "exp/trial", "step": step}).is_success:
                    answered.append(step)
            assert served_by(engine.server).answer in engine.answers
            where.bind(disk, state)
            stand.refitd.kill()
            stand.refitd.start()
            stand.is_served(3)
            assert engine.serves(3)
            assert {version.step for version in stand.client.versions().items} >= set(answered)
            assert stand.folders()[-1] == "v000003"
