"""Machines of one kernel: network namespaces, each with addresses of its own, joined by links.

A thread is in one namespace; so are the sockets that it opens, and the threads and processes that it starts.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

_HELD = ("unshare", "--net", "sh", "-c", "echo ready; exec cat")


def missing() -> str | None:
    """Why no namespaces can be made here, None if they can."""
    if os.geteuid() != 0:
        return "only root joins network namespaces"
    lacks = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if lacks:
        return f"{', '.join(lacks)} not installed (iproute2, util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "name", "one", "type", "veth", "peer", "name", "two"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"no link between network namespaces can be made: {tried.stderr.strip()}"


class Machine:
    """A namespace, held by a process that does nothing."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.enter = partial(_enter, f"/proc/{pid}/ns/net")

    def ip(self, *words: str) -> None:
        """Run `ip` in there."""
        command = ["nsenter", f"--net=/proc/{self.pid}/ns/net", "ip", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"

    def joined(self, other: "Machine", here: str, there: str) -> None:
        """Join it to another by a link, with an address (such as 10.0.0.1/24) on each end."""
        name = f"v{self.pid}.{other.pid}"[:15]
        self.ip("link", "add", "name", name, "type", "veth", "peer", "name", name, "netns", str(other.pid))
        for machine, address in ((self, here), (other, there)):
            machine.ip("address", "add", address, "dev", name)
            machine.ip("link", "set", name, "up")

    @contextmanager
    def inside(self) -> Generator[None]:
        """Have this thread be in there."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            self.enter()
            yield
        finally:
            _enter(f"/proc/self/fd/{before}")
            os.close(before)


def _enter(path: str) -> None:
    """Have this thread go on in another namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    space = os.open(Path(path), os.O_RDONLY)
    try:
        if libc.setns(space, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(space)


@contextmanager
def machine() -> Generator[Machine]:
    """Make one, with loopback alone."""
    holder = subprocess.Popen(_HELD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == b"ready\n"
        try:
            made = Machine(holder.pid)
            made.ip("link", "set", "lo", "up")
            yield made
        finally:
            holder.stdin.close()  # with its last process and socket the namespace goes
