"""Hosts of one machine that have a link each: network namespaces, a bridge between them, token buckets on both ends.

Each end of a link sends at most so many bytes a second, as a port of a switch does, and the kernel counts what goes
over it, headers too. It wants root, `ip` and `tc`.
"""

import ctypes
import os
import subprocess
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

BRIDGE = "refitd-bench"
NETWORK = "10.213.77"
OUTSIDE = 254  # the number of this process's own address there
BUCKET = 2**18  # bytes that may go at once
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class HostLink:
    """A host's place in the network."""

    number: int

    @property
    def address(self) -> str:
        """Its IP address."""
        return f"{NETWORK}.{self.number}"

    @property
    def namespace(self) -> str:
        """The name of its network namespace."""
        return f"{BRIDGE}-{self.number}"

    @property
    def port(self) -> str:
        """The end of its link at the bridge."""
        return f"rb{self.number}"

    @property
    def down(self) -> int:
        """Bytes that have gone to the host."""
        return self._count("tx_bytes")

    @property
    def up(self) -> int:
        """Bytes that have come from the host."""
        return self._count("rx_bytes")

    def _count(self, what: str) -> int:
        return int(Path(f"/sys/class/net/{self.port}/statistics/{what}").read_text())

    def enter(self) -> None:
        """Let this thread go on in the host's namespace: sockets that it makes are the host's."""
        libc = ctypes.CDLL(None, use_errno=True)
        space = os.open(f"/run/netns/{self.namespace}", os.O_RDONLY)
        try:
            if libc.setns(space, 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(space)

    def inside(self, act: Callable[[], ResultT]) -> ResultT:
        """Do something in a thread that is on the host."""
        with ThreadPoolExecutor(1, initializer=self.enter) as pool:
            return pool.submit(act).result()


@contextmanager
def host_links(count: int, rate: float) -> Generator[list[HostLink]]:
    """Make a network of so many hosts.

    Args:
        count: how many.
        rate: bytes a second that each link carries in each direction.
    """
    links = [HostLink(number) for number in range(1, count + 1)]
    try:
        _do("link", "add", BRIDGE, "type", "bridge")
        _do("addr", "add", f"{NETWORK}.{OUTSIDE}/24", "dev", BRIDGE)
        _do("link", "set", BRIDGE, "up")
        for link in links:
            _connect(link, rate)
        yield links
    finally:
        for link in links:
            _do("link", "del", link.port, check=False)  # the kernel takes its time to end a namespace
            _do("netns", "del", link.namespace, check=False)
        _do("link", "del", BRIDGE, check=False)


def _connect(link: HostLink, rate: float) -> None:
    inside = ("-n", link.namespace)
    _do("netns", "add", link.namespace)
    _do("link", "add", link.port, "type", "veth", "peer", "name", "eth0", "netns", link.namespace)
    _do("link", "set", link.port, "master", BRIDGE, "up")
    _do(*inside, "addr", "add", f"{link.address}/24", "dev", "eth0")
    _do(*inside, "link", "set", "eth0", "up")
    _do(*inside, "link", "set", "lo", "up")
    set_rate(link, rate)


def set_rate(link: HostLink, rate: float) -> None:
    """Have a link carry so many bytes a second in each direction, from now on."""
    for where in (("dev", link.port), ("-n", link.namespace, "dev", "eth0")):
        inside, device = where[:-2], where[-2:]
        limits = ("rate", f"{int(rate * 8)}bit", "burst", str(BUCKET), "latency", "200ms")
        subprocess.run(["tc", *inside, "qdisc", "replace", *device, "root", "tbf", *limits], check=True)


def _do(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=not check)
