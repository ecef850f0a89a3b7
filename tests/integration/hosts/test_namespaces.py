"""A host next to a stranger: its hub is in another network, and knows no way to it.

Three network namespaces: the hub's, the host's, and a router between them that passes on to the hub what hosts send
there. The hub sees the router's address alone and has no route to the host, which listens on its own loopback.
"""

import re
import socket
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from refitd_client import PublishOptions, WeightPublisher
from support import namespaces
from support.checkpoints import Tensors, tensors, write_model
from support.hosts import QUICK, RUN, Host, HostEngine, until
from support.links import Link, slow
from support.namespaces import Machine, machine
from support.scripted_server import serve
from support.servers import RefitdServer

pytestmark = [pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing()))]
HUB, ROUTER, GATE = "10.98.0.1", "10.98.0.254", "192.168.98.254"
ADDRESS, OTHER = "192.168.98.7", "192.168.98.8"
NOWHERE = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
FOLLOW, WRITE = "f" * 24, "w" * 24


class Server(RefitdServer):
    """A service that others ask at an address of its machine."""

    ready = re.compile(rb' ready on https?://[\d.]+:(\d+)(?:$|")')


@dataclass
class Net:
    """The machines, and what runs on them."""

    folder: Path
    hub_at: Machine
    router: Machine
    host_at: Machine
    opened: ExitStack
    hub: Host = field(init=False)
    link: Link = field(init=False)
    scheme: str = "http"

    def start_hub(self, *flags: str, base: Tensors | None = None) -> None:
        """The hub on its own machine, and the router's way there."""
        self.base = write_model(self.folder / "base", base)
        for name, token in (("write", WRITE), ("follow", f"host:{FOLLOW}")):
            (self.folder / name).write_text(token)
        tokens = ("--token-file", str(self.folder / "write"), "--followers-token-file", str(self.folder / "follow"))
        self.hub = self._host("hub", self.hub_at, "--host", HUB, *tokens, *flags)
        self.opened.enter_context(self.hub.refitd)
        with self.router.inside():
            self.link = self.opened.enter_context(Link(self.hub.refitd.port, at=GATE, to=HUB))

    def start_host(self, *flags: str) -> Host:
        """The host on its own machine, with an engine beside it."""
        with self.host_at.inside():
            server = self.opened.enter_context(serve())
        engine = HostEngine(server)
        server.steps.append(engine.step)
        follow = (
            "--follow",
            f"{self.scheme}://{GATE}:{self.link.port}",
            "--follow-token-file",
            str(self.folder / "follower"),
        )
        (self.folder / "follower").write_text(FOLLOW)
        host = self._host("host", self.host_at, "--engine", engine.url, *follow, "--follower", "host", *flags)
        host.engines.append(engine)
        self.opened.enter_context(host.refitd)
        return host

    def _host(self, name: str, at: Machine, *flags: str) -> Host:
        folder = self.folder / name
        (folder / "root").mkdir(parents=True)
        server = Server(folder, folder / "root", [], *QUICK, "--base-model", str(self.base), *flags, first=at.enter)
        return Host(name, folder, server)

    def publish(self, step: int, weights: Tensors | None = None) -> None:
        """Publish to the hub, on its machine."""
        with (
            self.hub_at.inside(),
            WeightPublisher(
                self.hub.root, RUN, f"{self.scheme}://{HUB}:{self.hub.refitd.port}", options=PublishOptions(token=WRITE)
            ) as publisher,
        ):
            publisher.publish(tensors(step) if weights is None else weights, step=step)


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Net]:
    """Three machines. In everybody's environment are proxies that do not answer."""
    for name, value in NOWHERE.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as opened:
        hub_at, router, host_at = (opened.enter_context(machine()) for _ in range(3))
        router.joined(hub_at, f"{ROUTER}/24", f"{HUB}/24")
        router.joined(host_at, f"{GATE}/24", f"{ADDRESS}/24")
        yield Net(tmp_path, hub_at, router, host_at, opened)


def reaches(at: Machine, address: str, port: int) -> bool:
    """Whether a connection to an address can be opened from a machine."""
    try:
        with at.inside(), socket.create_connection((address, port), timeout=2):
            return True
    except OSError:
        return False


def test_a_host_that_its_hub_cannot_reach_is_led_all_the_same_and_no_proxy_of_the_environment_is_asked(
    net: Net,
) -> None:
    net.start_hub()
    host = net.start_host()
    assert not reaches(net.hub_at, ADDRESS, host.refitd.port)
    assert not reaches(net.hub_at, GATE, net.link.port)
    net.publish(1)
    until(lambda: host.serves(1), net.hub, host)
    net.publish(2)
    until(lambda: host.serves(2), net.hub, host)


def test_a_host_whose_address_changes_in_the_middle_of_a_pull_goes_on(net: Net) -> None:
    weights = {"weight": np.arange(2**24, dtype=np.float32)}  # four parts
    net.start_hub(base=weights)
    host = net.start_host()
    net.publish(1, weights)
    until(lambda: host.serves(1), net.hub, host)
    net.link.passing = slow(4e6)
    before = net.link.down
    net.publish(2, weights)
    until(lambda: net.link.down - before > 2**22, net.hub, host)
    device = f"v{net.router.pid}.{net.host_at.pid}"[:15]
    net.host_at.ip("address", "del", f"{ADDRESS}/24", "dev", device)
    net.host_at.ip("address", "add", f"{OTHER}/24", "dev", device)
    net.link.passing = lambda data: data
    until(lambda: host.serves(2), net.hub, host, patience=90)
    net.publish(3, weights)
    until(lambda: host.serves(3), net.hub, host)
