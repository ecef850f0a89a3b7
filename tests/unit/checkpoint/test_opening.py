"""Opening files beneath the root: links, FIFOs, devices and swaps do not get through."""

import os
import socket
from pathlib import Path

import pytest

from refitd_client.checkpoint.opening import ChangedError, Folder, OpeningRefusedError
from refitd_client.contract.naming import INDEX_NAME

SHARD = "model.safetensors"


@pytest.fixture
def version(tmp_path: Path) -> Path:
    folder = tmp_path / "root" / "exp" / "v000001"
    folder.mkdir(parents=True)
    (folder / SHARD).write_bytes(b"weights")
    return folder


@pytest.fixture
def root(version: Path) -> Path:
    return version.parent.parent


PATH = "exp/v000001"


def read(root: Path, name: str = SHARD) -> bytes:
    with Folder(root, PATH) as folder, folder.open(name, folder.list()[name]) as fd:
        return os.read(fd, 100)


def signature(root: Path) -> str:
    with Folder(root, PATH) as folder:
        return folder.signature(folder.list())


@pytest.mark.parametrize(
    "path", ["", "/etc", "../root/exp", "exp/../exp/v000001", "exp//v000001", "./exp", "exp/", "a\0"]
)
def test_a_path_that_is_not_plain_is_refused(root: Path, path: str) -> None:
    with pytest.raises(OpeningRefusedError, match="not a plain path beneath the root"):
        Folder(root, path)


def test_a_link_among_the_folders_is_refused(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside" / "v000001"
    outside.mkdir(parents=True)
    (root / "linked").symlink_to(outside.parent)
    (root / "exp" / "v000002").symlink_to(outside)
    for path in ("linked/v000001", "exp/v000002"):
        with pytest.raises(OpeningRefusedError, match="is a link or no folder"):
            Folder(root, path)


def test_the_root_itself_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert read(tmp_path / "link") == b"weights"


def test_a_link_in_place_of_a_shard_is_refused(root: Path, version: Path) -> None:
    (version / "passwd.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(OpeningRefusedError, match=r"passwd\.safetensors is a symbolic link"):
        read(root, "passwd.safetensors")


def test_what_is_no_regular_file_is_refused_without_waiting(root: Path, version: Path) -> None:
    os.mkfifo(version / "fifo.safetensors")
    (version / "folder.safetensors").mkdir()
    os.mknod(version / "device.safetensors", 0o600 | 0o020000, os.makedev(1, 5)) if os.geteuid() == 0 else None
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(version / "s.safetensors"))
    nouns = {"fifo": "FIFO", "folder": "folder", "s": "socket"} | ({"device": "character"} if os.geteuid() == 0 else {})
    for name, noun in nouns.items():
        with pytest.raises(OpeningRefusedError, match=f"is a {noun}"):
            read(root, f"{name}.safetensors")


@pytest.mark.parametrize("swap", ["other", "link", "fifo", "gone"])
def test_a_swap_between_look_and_opening_is_noticed(root: Path, version: Path, swap: str) -> None:
    with Folder(root, PATH) as folder:
        seen = folder.list()[SHARD]
        (version / SHARD).rename(version / "kept")
        match swap:
            case "other":
                (version / SHARD).write_bytes(b"hostile")
            case "link":
                (version / SHARD).symlink_to("/etc/passwd")
            case "fifo":
                os.mkfifo(version / SHARD)
            case _:
                pass
        with pytest.raises(ChangedError, match="while it was read"), folder.open(SHARD, seen):
            pytest.fail("it opened")


def test_a_folder_that_is_swapped_goes_on_being_read(root: Path, version: Path) -> None:
    with Folder(root, PATH) as folder:
        version.rename(root / "moved")
        version.mkdir()
        (version / SHARD).write_bytes(b"hostile")
        with folder.open(SHARD, folder.list()[SHARD]) as fd:
            assert os.read(fd, 100) == b"weights"


def test_no_descriptor_is_left_open(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    read(root)
    for path in ("exp/none", f"{PATH}/{SHARD}"):
        with pytest.raises((OSError, OpeningRefusedError)):
            Folder(root, path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_hidden_files_are_not_listed(root: Path, version: Path) -> None:
    (version / ".hidden.safetensors").touch()
    with Folder(root, PATH) as folder:
        assert list(folder.list()) == [SHARD]


def test_a_name_that_is_not_utf8_is_listed(root: Path, version: Path) -> None:
    (Path(os.fsdecode(os.fsencode(version) + b"/\xff.safetensors"))).touch()
    assert signature(root)
    with Folder(root, PATH) as folder:
        assert os.fsdecode(b"\xff.safetensors") in folder.list()


def test_the_signature_stays_while_nothing_that_counts_changes(root: Path, version: Path) -> None:
    before = signature(root)
    (version / "optimizer.pt").write_bytes(b"much later")
    (version / SHARD).chmod(0o444)
    os.link(version / SHARD, root / "held")  # as holding a version does
    version.rename(version.parent / "elsewhere")
    (version.parent / "elsewhere").rename(version)
    assert signature(root) == before


def rewrite(path: Path) -> None:
    status = path.stat()
    path.write_bytes(b"other77")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.mark.parametrize("change", ["content", "copy", "more", "index", "gone", "folder"])
def test_the_signature_tells_every_change_that_counts(root: Path, version: Path, change: str) -> None:
    before = signature(root)
    match change:
        case "content":
            rewrite(version / SHARD)
        case "copy":  # same size, same time, another inode
            status = (version / SHARD).stat()
            (version / "new").write_bytes(b"weights")
            os.utime(version / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
            (version / "new").rename(version / SHARD)
        case "more":
            (version / "model-2.safetensors").touch()
        case "index":
            (version / INDEX_NAME).touch()
        case "gone":
            (version / SHARD).unlink()
        case _:  # the same file in a new folder of the same name
            version.rename(root / "old")
            version.mkdir()
            os.link(root / "old" / SHARD, version / SHARD)
    assert signature(root) != before
