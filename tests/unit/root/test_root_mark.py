"""A root whose file system is not mounted is told from one that is empty, also at a start."""

import shutil
from pathlib import Path

import pytest

from refitd.catalog.files import DiskFiles, RootAwayError, Unreadable
from refitd.root.ownership import Mount, RootGuard, RootMark, RootRefusedError, adopt, mark_root, owned, recognise
from refitd.root.scan import Listing, ListingFailed
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_doctor.journal import still
from support.checkpoints import publish, tensors
from support.services import serving

KNOWN = RootMark(name="known", mount="/weights")
DISK, MEMORY, BENEATH = Mount("/weights", "ext4"), Mount("/weights", "tmpfs"), Mount("/", "tmpfs")
MOUNTS = "tmpfs / tmpfs rw 0 0\n"


def marked(root: Path) -> RootMark:
    mark = mark_root(root, None, has_versions=False, mounts=MOUNTS)
    assert mark is not None
    return mark


def exchange(root: Path) -> None:
    """Another folder lies in the place of the root from now on."""
    root.rename(root.with_name("away"))
    (root / SERVICE_FOLDER).mkdir(parents=True)


def put_back(root: Path) -> None:
    shutil.rmtree(root)
    root.with_name("away").rename(root)


@pytest.mark.parametrize(
    ("known", "found", "here", "has_versions", "name"),
    [
        (None, None, DISK, False, None),
        (None, None, DISK, True, None),
        (None, "other", DISK, True, "other"),
        (KNOWN, "known", DISK, True, "known"),
        (KNOWN, None, DISK, True, "known"),
        (KNOWN, "other", DISK, True, "known"),
        (KNOWN, "other", DISK, False, "other"),
        (KNOWN, None, DISK, False, None),
        (KNOWN, None, MEMORY, True, None),
        (KNOWN, "other", MEMORY, True, "known"),
        (KNOWN, None, BENEATH, True, "known"),
    ],
)
def test_a_root_is_believed_to_be_the_one_that_it_was_unless_there_is_nothing_to_lose(
    known: RootMark | None, found: str | None, here: Mount, has_versions: bool, name: str | None
) -> None:
    assert recognise(known, found, here, has_versions=has_versions) == name


def test_a_root_gets_a_name_once_and_keeps_it(root: Path) -> None:
    mark = marked(root)
    assert mark_root(root, mark, has_versions=True, mounts=MOUNTS) == mark
    assert mark_root(root, None, has_versions=True, mounts=MOUNTS) == mark
    assert RootGuard(root, mark)() is None


def test_what_lies_in_the_place_of_the_root_is_named_with_what_to_do_until_the_root_is_back(root: Path) -> None:
    mark, guard = marked(root), RootGuard(root, marked(root))
    exchange(root)
    assert all(word in (guard() or "") for word in ("has no .refitd/id", "unmounted", "doctor --repair"))
    assert mark_root(root, mark, has_versions=True, mounts="/dev/x / ext4 rw 0 0\n") == mark
    assert not (root / SERVICE_FOLDER / "id").exists()
    marked(root)
    assert "is another root" in (guard() or "")
    put_back(root)
    assert guard() is None


def test_a_root_that_was_emptied_is_adopted_by_word_and_another_s_is_not(root: Path) -> None:
    mark = marked(root)
    shutil.rmtree(root)
    guard = RootGuard(root, mark)
    root.mkdir()
    assert guard() is not None
    adopt(root, mark, mounts=MOUNTS)
    assert guard() is None, "a service that runs goes on by itself"
    exchange(root)
    other = marked(root)
    with pytest.raises(RootRefusedError, match="another service's root"):
        adopt(root, mark, mounts=MOUNTS)
    assert RootGuard(root, other)() is None


def test_a_root_whose_file_system_is_seen_to_be_unmounted_is_not_adopted_by_word_either(root: Path) -> None:
    mark = mark_root(root, None, has_versions=False, mounts=f"{MOUNTS}nfs {root.parent} nfs rw 0 0\n")
    assert mark is not None
    exchange(root)
    with pytest.raises(RootRefusedError, match=f"write {mark.name} into"):
        adopt(root, mark, mounts=MOUNTS)
    assert not (root / SERVICE_FOLDER / "id").exists()


def test_a_root_that_comes_late_is_locked_when_it_comes(root: Path) -> None:
    mark = marked(root)
    exchange(root)
    with owned(root) as hold:
        guard = RootGuard(root, mark, hold.renew)
        assert guard() is not None
        put_back(root)
        (root / SERVICE_FOLDER / "lock").touch()
        with still(root) as holder:
            assert holder is None
            assert "another refitd" in (guard() or "")
        assert guard() is None
        with still(root) as holder:
            assert holder is not None
    with still(root) as holder:
        assert holder is None


def test_the_lock_is_not_lost_by_looking_for_it(root: Path) -> None:
    with owned(root) as hold:
        assert [hold.renew() for _ in range(3)] == [None] * 3
        with still(root) as holder:
            assert holder is not None


async def test_nothing_in_the_place_of_the_root_is_believed(root: Path) -> None:
    publish(root, "run", 1, tensors(1))
    files = DiskFiles(root, RootGuard(root, marked(root)))
    assert isinstance(await files.scan(), Listing)
    before = await files.signatures(["run/v000001"])
    exchange(root)
    publish(root, "run", 1, tensors(2))
    assert isinstance(await files.scan(), ListingFailed)
    found = await files.signatures(["run/v000001", "run/v000002"])
    assert all(isinstance(each, Unreadable) for each in found.values())
    with pytest.raises(RootAwayError, match="unmounted"):
        await files.structure("run/v000001")
    put_back(root)
    assert await files.signatures(["run/v000001"]) == before


async def test_a_notice_is_not_taken_for_what_lies_in_the_place_of_the_root(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        id_ = await stage.served(1)
        stage.root.rename(tmp_path / "away")
        publish(stage.root, "run", 2, tensors(2))
        answer = await stage.http.post("/v1/versions", json={"run": "run", "step": 2})
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:refitd:problem:not-ready")
        assert set(stage.store.versions) == {id_}
