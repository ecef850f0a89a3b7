"""A user and mount namespace of its own, in which anybody may mount small file systems: `unshare --user --mount`.

Whoever made it sees what is mounted there through /proc, so the trainer and the engine of a test stay outside.
"""

import ctypes
import errno
import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

_SHARE = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", "echo ready; exec cat")
BLOCK = 4096  # bytes


class Room:
    """A namespace, held by a process that does nothing."""

    def __init__(self, holder: "subprocess.Popen[str]") -> None:
        self._holder = holder
        self.enter = partial(_enter, holder.pid)

    def seen(self, path: Path) -> Path:
        """Where a path of the namespace is seen from outside."""
        return Path(f"/proc/{self._holder.pid}/root") / path.relative_to("/")

    def tmpfs(self, path: Path, options: str) -> Path:
        """Mount a tmpfs on a folder that is made for it."""
        path.mkdir(exist_ok=True)
        self.do("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path))
        return path

    def bind(self, source: Path, path: Path, options: str = "rw") -> Path:
        """Show a folder at another path, too."""
        path.mkdir(exist_ok=True)
        self.do("mount", "--bind", str(source), str(path))
        if options != "rw":
            self.do("mount", "-o", f"remount,bind,{options}", str(path))
        return path

    def unmount(self, path: Path) -> None:
        """Take a file system away from those who use it."""
        self.do("umount", "--lazy", str(path))

    def do(self, *words: str) -> None:
        """Run a command in there."""
        enter = ("nsenter", f"--target={self._holder.pid}", "--user", "--mount", "--preserve-credentials", "--")
        done = subprocess.run([*enter, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


def _enter(holder: int) -> None:
    """Let this process, which has one thread, go on in the namespaces of another."""
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = [os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY) for kind in ("user", "mnt")]
    for space in spaces:
        if libc.setns(space, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)


@contextmanager
def room() -> Generator[Room]:
    """Make one, or skip the test where the machine lets nobody."""
    holder = subprocess.Popen(
        _SHARE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    with holder:
        if holder.stdout.readline() != "ready\n":
            pytest.skip(f"no file system can be mounted here (unshare --user --mount): {holder.stderr.read()}")
        try:
            yield Room(holder)
        finally:
            holder.stdin.close()  # with its last process the namespace goes, and all mounts with it


def fill(folder: Path, *, leave: int = 0) -> Path:
    """Take what room there is where `folder` lies, but for `leave` bytes; delete the file to give it back."""
    filler = folder / ".filler"
    with filler.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * BLOCK)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        if leave:
            file.truncate(max(0, file.tell() - leave))
    return filler


def use_up_names(folder: Path) -> Path:
    """Take what inodes there are; delete the folder's files to give them back."""
    hoard = folder / ".hoard"
    hoard.mkdir()
    try:
        for number in range(100_000):
            (hoard / str(number)).touch()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    return hoard
