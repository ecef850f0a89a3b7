"""Which type of file system holds a folder, and whether it tells of what other hosts write."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Types that give no events of what other hosts write, or of nothing at all.
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "lustre", "overlay", "fuse", "cifs", "smb3", "9p", "beegfs", "ceph"})


@dataclass(frozen=True, slots=True)
class Mount:
    """Where a file system is mounted, and its type; empty where it is not known."""

    point: str = ""
    kind: str = ""


def mounts_now() -> str:
    """What is mounted, as /proc/self/mounts says it; nothing where there is no such file."""
    with suppress(OSError):
        return Path("/proc/self/mounts").read_text()
    return ""


def mount_of(path: Path, mounts: str) -> Mount:
    """The file system that holds `path`, from the text of /proc/self/mounts."""
    best = Mount()
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = point == "/" or str(path) == point or str(path).startswith(point + "/")
        if inside and len(point) >= len(best.point):
            best = Mount(point, fields[2])
    return best


def file_system_of(path: Path, mounts: str) -> str:
    """The type of the file system that holds `path`, from the text of /proc/self/mounts; "" where it is not there."""
    return mount_of(path, mounts).kind


def root_file_system(root: Path) -> str:
    """The type of the file system that holds the root now, "" where it is not known."""
    return file_system_of(root.resolve(), mounts_now())


def wants_polling(kind: str) -> bool:
    """Whether events of other hosts' writes are missing on this type of file system."""
    return kind.partition(".")[0] in NETWORK_FILE_SYSTEMS


def why_no_slots(count: int, root: Path) -> str | None:
    """Why nothing is recycled; None where it is: on file systems of this machine, where a rename arbitrates for all."""
    kind = root_file_system(root)
    if not count:
        return "slots are off (--slots 0)"
    if kind != "overlay" and wants_polling(kind):
        return f"the root is on {kind}: slots are for tmpfs and local file systems"
    return None
