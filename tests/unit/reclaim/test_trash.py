"""Deleting: only what was examined, only under the root, never through a link, and whole or not at all."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest

from refitd.reclaim import trash
from refitd.reclaim.trash import discard, empty, examine
from refitd.root.handle import Identity, root_at
from refitd.root.scan import Discarded, Emptied, Gone, Refused

VERSION = "exp/v000001"
NOBODY = 65534

_on_event: list[Callable[[str, tuple[object, ...]], None]] = []


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _on_event and event in {"os.rename", "os.rmdir", "os.remove", "os.mkdir"}:
        _on_event[0](event, arguments)


sys.addaudithook(_audit)  # Python tells of a call before it is made: the one way to do something right before it


@contextmanager
def before(event: str, name: str, act: Callable[[], None]) -> Iterator[None]:
    """Act once, right before the first system call of this kind on this name."""

    def act_once(seen: str, arguments: tuple[object, ...]) -> None:
        if (seen, arguments[0]) == (event, name):
            _on_event.clear()
            act()

    _on_event.append(act_once)
    try:
        yield
        assert not _on_event, f"{event} of {name} never came"
    finally:
        _on_event.clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    make_tree(root / VERSION)
    (root / ".refitd").mkdir()
    return root


@pytest.fixture
def handle(root: Path) -> Iterator[int]:
    with root_at(root) as opened:
        yield opened


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """What must be there after whatever happens."""
    make_tree(tmp_path / "precious")
    return tmp_path / "precious"


def make_tree(folder: Path) -> None:
    (folder / "inner" / "deep").mkdir(parents=True)
    (folder / "empty").mkdir()
    for name in ("model.safetensors", "refit.json", "inner/a", "inner/deep/b"):
        (folder / name).write_text(name)


def is_whole(folder: Path) -> bool:
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return files == {"model.safetensors", "refit.json", "inner/a", "inner/deep/b"}


def examined(handle: int, path: str = VERSION) -> Identity:
    found = examine(handle, path)
    assert isinstance(found, Identity)
    return found


def in_trash(root: Path) -> list[Path]:
    return sorted((root / ".refitd" / "trash").iterdir())


def test_a_version_leaves_its_place_at_once_and_the_disk_when_the_trash_is_emptied(root: Path, handle: int) -> None:
    assert discard(handle, VERSION, examined(handle)) == Discarded(VERSION)
    assert not (root / VERSION).exists()
    (folder,) = in_trash(root)
    assert is_whole(next(folder.iterdir()))
    assert empty(handle) == Emptied(1)
    assert in_trash(root) == []


def test_the_trash_belongs_to_the_service_alone(root: Path, handle: int) -> None:
    (root / ".refitd" / "trash").mkdir(mode=0o777)
    (root / ".refitd" / "trash").chmod(0o777)
    discard(handle, VERSION, examined(handle))
    assert (root / ".refitd" / "trash").stat().st_mode & 0o777 == 0o700
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in in_trash(root))


def test_what_is_gone_already_is_fine(root: Path, handle: int) -> None:
    identity = examined(handle)
    (root / VERSION).rename(root / "elsewhere")
    assert discard(handle, VERSION, identity) == Gone(VERSION)
    assert examine(handle, VERSION) == Gone(VERSION)
    assert examine(handle, "no/run/v000001") == Gone("no/run/v000001")


def test_an_unmounted_root_does_not_look_like_deleted_versions(tmp_path: Path) -> None:
    (tmp_path / "mountpoint").mkdir()
    with root_at(tmp_path / "mountpoint") as handle:
        outcome = examine(handle, VERSION)
        assert isinstance(outcome, Refused)
        assert "may be unmounted" in outcome.reason
        assert discard(handle, VERSION, Identity(1, 1)) == outcome
        assert empty(handle) == Emptied(0)
    assert list((tmp_path / "mountpoint").iterdir()) == [], "and nothing is made there"


@pytest.mark.parametrize(
    "path", ["../precious", "exp/../../precious", "/etc", "", ".", "exp/.", ".refitd/held", "exp//v000001", "a\0b"]
)
def test_a_path_that_leaves_the_root_is_refused(root: Path, handle: int, precious: Path, path: str) -> None:
    outcome = discard(handle, path, Identity(precious.stat().st_dev, precious.stat().st_ino))
    assert isinstance(outcome, Refused)
    assert "not a path under the root" in outcome.reason
    assert isinstance(examine(handle, path), Refused)
    assert is_whole(precious)


def test_links_inside_are_unlinked_and_not_followed(root: Path, handle: int, precious: Path) -> None:
    (root / VERSION / "to_file").symlink_to(precious / "refit.json")
    (root / VERSION / "to_folder").symlink_to(precious)
    (root / VERSION / "inner" / "up").symlink_to("../../../..")
    (root / VERSION / "dangling").symlink_to("/nowhere")
    (root / VERSION / "hard").hardlink_to(precious / "model.safetensors")
    discard(handle, VERSION, examined(handle))
    assert empty(handle) == Emptied(1)
    assert is_whole(precious)
    assert (precious / "model.safetensors").read_text() == "model.safetensors"


def test_fifos_sockets_and_devices_inside_are_removed_without_being_opened(root: Path, handle: int) -> None:
    os.mkfifo(root / VERSION / "fifo")
    if os.geteuid() == 0:
        os.mknod(root / VERSION / "device", 0o600 | 0o020000, os.makedev(1, 3))
    discard(handle, VERSION, examined(handle))
    assert empty(handle) == Emptied(1)
    assert in_trash(root) == []


def test_a_version_that_is_a_link_is_refused(root: Path, handle: int, precious: Path) -> None:
    (root / "exp" / "v000002").symlink_to(precious)
    for outcome in (examine(handle, "exp/v000002"), discard(handle, "exp/v000002", _identity(precious))):
        assert isinstance(outcome, Refused)
        assert "links are never followed" in outcome.reason
    assert is_whole(precious)
    assert (root / "exp" / "v000002").is_symlink()


def test_a_run_that_is_a_link_is_refused(root: Path, handle: int, precious: Path) -> None:
    (root / "other").symlink_to(precious)
    outcome = discard(handle, "other/inner", _identity(precious / "inner"))
    assert isinstance(outcome, Refused)
    assert "links are never followed" in outcome.reason
    assert is_whole(precious)


def test_a_trash_that_is_a_link_is_refused(root: Path, handle: int, precious: Path) -> None:
    (root / ".refitd" / "trash").symlink_to(precious)
    assert isinstance(discard(handle, VERSION, examined(handle)), Refused)
    assert empty(handle).left
    assert is_whole(root / VERSION)
    assert is_whole(precious)


def test_another_folder_that_was_put_in_its_place_is_refused(root: Path, handle: int) -> None:
    identity = examined(handle)
    (root / VERSION).rename(root / "old")
    make_tree(root / VERSION)
    outcome = discard(handle, VERSION, identity)
    assert isinstance(outcome, Refused)
    assert "not the folder that was examined" in outcome.reason
    assert is_whole(root / VERSION)


def _identity(folder: Path) -> Identity:
    return Identity(folder.stat().st_dev, folder.stat().st_ino)


def test_a_link_swapped_in_between_check_and_rename_is_put_back(root: Path, handle: int, precious: Path) -> None:
    def swap() -> None:
        (root / VERSION).rename(root / "away")
        (root / VERSION).symlink_to(precious)

    with before("os.rename", "v000001", swap):
        outcome = discard(handle, VERSION, examined(handle))
    assert isinstance(outcome, Refused)
    assert "swapped" in outcome.reason
    assert (root / VERSION).is_symlink()
    assert empty(handle).left == ()
    assert is_whole(precious)
    assert is_whole(root / "away")


def test_a_parent_swapped_for_a_link_leads_nowhere_else(root: Path, handle: int, precious: Path) -> None:
    """The run's folder is open by then: the rename acts on it, wherever its name points."""
    make_tree(precious / "v000001")

    def swap() -> None:
        (root / "exp").rename(root / "away")
        (root / "exp").symlink_to(precious)

    with before("os.rename", "v000001", swap):
        assert discard(handle, VERSION, examined(handle)) == Discarded(VERSION)
    assert empty(handle) == Emptied(1)
    assert is_whole(precious / "v000001")
    assert not (root / "away" / "v000001").exists()


def test_what_was_caught_by_mistake_is_not_deleted_when_its_place_is_taken(
    root: Path, handle: int, precious: Path
) -> None:
    def swap() -> None:
        (root / VERSION).rename(root / "away")
        precious.rename(root / VERSION)

    real = trash._put_back

    def put_back(parent: int, path: str, folder: int, caught: str, what: str) -> str:
        make_tree(root / VERSION)
        return real(parent, path, folder, caught, what)

    with before("os.rename", "v000001", swap), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trash, "_put_back", put_back)
        outcome = discard(handle, VERSION, examined(handle))
    assert isinstance(outcome, Refused)
    assert "not deleted" in outcome.reason
    (left,) = empty(handle).left
    assert "never deleted" in left
    (folder,) = in_trash(root)
    assert is_whole(next(folder.iterdir()))
    assert is_whole(root / VERSION)


def test_a_kill_between_rename_and_check_deletes_nothing_unexamined(root: Path, handle: int, precious: Path) -> None:
    """The process died holding something precious under the inode number of something else."""
    folder = root / ".refitd" / "trash" / ("0" * 32)
    folder.mkdir(parents=True)
    precious.rename(folder / f"caught-{(root / VERSION).stat().st_ino}")
    (left,) = empty(handle).left
    assert "moved by mistake" in left
    assert is_whole(next(folder.iterdir()))


def test_only_what_the_service_put_into_the_trash_is_deleted(root: Path, handle: int) -> None:
    make_tree(root / ".refitd" / "trash" / "somebody's")
    (left,) = empty(handle).left
    assert "was not put there by this service" in left
    assert is_whole(root / ".refitd" / "trash" / "somebody's")


def test_a_file_that_comes_back_is_left_for_the_next_time(root: Path, handle: int) -> None:
    """NFS renames a file that somebody has open to .nfs…, and its folder is not empty until that one closes it."""
    (root / "exp" / "v000002").mkdir()
    discard(handle, "exp/v000002", examined(handle, "exp/v000002"))
    (tree,) = next(iter(in_trash(root))).iterdir()
    with before("os.rmdir", tree.name, (tree / ".nfs0001").touch):
        emptied = empty(handle)
    assert emptied.folders == 0
    assert "tried again the next time" in emptied.left[0]
    assert empty(handle) == Emptied(1)


def test_a_tree_of_any_depth_is_deleted_with_few_handles(root: Path, handle: int) -> None:
    inner = os.open(root / VERSION, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d", dir_fd=inner)
        deeper = os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(inner)
        inner = deeper
    discard(handle, VERSION, examined(handle))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # what other tests left open counts too
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 100, hard))
    try:
        assert empty(handle) == Emptied(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(inner)


@pytest.fixture
def unprivileged(root: Path, handle: int) -> Iterator[None]:
    """Root may read everything: be nobody for the time of the test, with only the open handle to get there."""
    del handle
    if os.geteuid() != 0:
        yield
        return
    for path in (root, *root.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.usefixtures("unprivileged")
def test_a_subfolder_that_cannot_be_read_is_reported_and_the_rest_deleted(root: Path, handle: int) -> None:
    os.chmod("exp/v000001/inner", 0, dir_fd=handle)
    discard(handle, VERSION, examined(handle))
    emptied = empty(handle)
    assert emptied.folders == 0
    assert "/inner may not be deleted by this user" in emptied.left[0]
    (folder,) = os.listdir(_fd(handle, ".refitd/trash"))
    (tree,) = os.listdir(_fd(handle, f".refitd/trash/{folder}"))
    assert os.listdir(_fd(handle, f".refitd/trash/{folder}/{tree}")) == ["inner"]
    os.chmod(f".refitd/trash/{folder}/{tree}/inner", 0o700, dir_fd=handle)
    assert empty(handle) == Emptied(1)


@pytest.mark.usefixtures("unprivileged")
def test_a_run_without_write_permission_is_refused_and_says_what_to_do(root: Path, handle: int) -> None:
    os.chmod("exp", 0o500, dir_fd=handle)
    outcome = discard(handle, VERSION, examined(handle))
    assert isinstance(outcome, Refused)
    assert "give its folder a shared group" in outcome.reason
    os.chmod("exp", 0o700, dir_fd=handle)


_handles: list[int] = []


def _fd(root: int, path: str) -> int:
    _handles.append(os.open(path, os.O_RDONLY, dir_fd=root))
    return _handles[-1]


@pytest.fixture(autouse=True)
def _close_handles() -> Iterator[None]:
    yield
    while _handles:
        os.close(_handles.pop())


IN_A_MOUNT_NAMESPACE = dedent("""
    import os, sys
    from refitd.reclaim import trash
    from refitd.root.handle import Identity, root_at
    with root_at(sys.argv[1]) as root:
        for path in ("exp/v000002", "other/v000003"):
            print(trash.examine(root, path).reason)
        same = os.stat("exp/v000004", dir_fd=root)
        print(trash.discard(root, "exp/v000004", Identity(same.st_dev, same.st_ino)).reason)
        trash.discard(root, "exp/v000001", trash.examine(root, "exp/v000001"))
        print(*trash.empty(root).left, sep=chr(10))
    """)


def test_mount_points_are_not_crossed(root: Path, precious: Path) -> None:
    """v2 is another file system, v3 lies in one, v4 is a bind mount of the same one, and so is a part of v1."""
    for name in ("v000002", "v000004", "../other"):
        (root / "exp" / name).mkdir(parents=True)
    mounts = dedent(f"""
        set -e; cd {root}/exp
        mount -t tmpfs none v000002; mount -t tmpfs none ../other; mkdir ../other/v000003
        mount --bind {precious} v000004; mount --bind {precious} v000001/inner
        exec {sys.executable} -c "$1" {root}
        """)
    unshare = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this machine gives no mount namespaces to this user")
    done = subprocess.run(
        [*unshare, "sh", "-c", mounts, "sh", IN_A_MOUNT_NAMESPACE], check=True, capture_output=True, text=True
    )
    two, three, four, inner = done.stdout.splitlines()
    assert "another file system" in two
    assert "another file system" in three
    assert "in use" in four
    assert "/inner is still in use" in inner
    assert is_whole(precious)


def test_emptying_stops_when_it_is_told_to_and_goes_on_later(root: Path, handle: int) -> None:
    discard(handle, VERSION, examined(handle))
    answers = iter([False, False, False])
    emptied = empty(handle, stopped=lambda: next(answers, True))
    assert emptied.folders == 0
    assert "told to stop" in emptied.left[0]
    assert empty(handle) == Emptied(1)
