"""Several hosts on loopback: a hub that a trainer publishes to, and followers with engines of their own, in processes.

The engines are scripted: each has a server of its own and says what it was last told to load.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import httpx

from refitd_client import PublishOptions, RefitClient, WeightPublisher
from refitd_client.contract.follow import Following, HostReport
from support.checkpoints import Tensors, tensors, write_model
from support.scripted_server import Step, answer, serve
from support.scripted_sglang import DONE, NO_FILES, ScriptedSglang, said
from support.servers import RefitdServer

RUN = "run"
PATIENCE = 30.0
QUICK = ("--probe-interval", "0.2", "--scan-interval", "0.2", "--settle", "0.2")


@dataclass
class HostEngine(ScriptedSglang):
    """Its checksums are those of the version, wherever the host's root is. While it `refuses` it loads nothing, and a
    load ends once it `may_load`.
    """

    refuses: bool = False
    may_load: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_load.set()

    def load(self) -> Step:
        self.may_load.wait(PATIENCE)
        if self.refuses:
            return said(400, NO_FILES)
        super().load()
        self.ranks = [{"w": "/".join(Path(self.served["model_path"]).parts[-2:])}]
        return said(200, DONE)

    def _work(self, path: str) -> Step:
        if path != "/generate":
            return super()._work(path)
        meta = {"output_token_logprobs": [[-0.5, 7, None]], "weight_version": self.served["weight_version"]}
        return answer(200, {"text": "7", "meta_info": meta})

    @property
    def loaded(self) -> list[str]:
        """The folders that it was told to load."""
        return [body["model_path"] for body in self.bodies("/update_weights_from_disk")]


@contextmanager
def _engine() -> Generator[HostEngine]:
    with serve() as server:
        engine = HostEngine(server)
        server.steps.append(engine.step)
        yield engine


@dataclass
class Host:
    """One service, its root and its engines."""

    name: str
    folder: Path
    refitd: RefitdServer
    engines: list[HostEngine] = field(default_factory=list[HostEngine])

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def client(self) -> RefitClient:
        return RefitClient(self.refitd.url)

    def get(self, path: str, **more: Any) -> httpx.Response:
        """Ask without the SDK."""
        return httpx.get(f"{self.refitd.url}{path}", timeout=PATIENCE, trust_env=False, **more)

    def following(self) -> dict[str, Any]:
        """What a follower says of itself."""
        return self.get("/v1/follow").json()

    def serves(self, step: int) -> bool:
        """Whether all of its engines were loaded with a step."""
        return all(f"{RUN}/v{step:06d}" in engine.served["model_path"] for engine in self.engines)


@dataclass
class Hosts:
    """The hub, and what starts more hosts."""

    folder: Path
    hub: Host
    base: Path
    _open: ExitStack

    def follower(self, name: str, *flags: str, engines: int = 1, url: str | None = None, **more: Any) -> Host:
        """Start one more follower, which decides for itself, of the hub unless `url` is another upstream. `more` is for
        its `RefitdServer`.
        """
        flags = ("--follow-freely", *flags, "--follow", url or self.hub.refitd.url)
        host = self.host(name, *flags, engines=engines, **more)
        self._open.enter_context(host.refitd)
        return host

    def led(self, name: str, *flags: str, engines: int = 1, url: str | None = None) -> Host:
        """Start one more host of the hub that is called so there. `url` is another way to the hub."""
        host = self.host(name, "--follow", url or self.hub.refitd.url, "--follower", name, *flags, engines=engines)
        self._open.enter_context(host.refitd)
        return host

    def host(self, name: str, *flags: str, engines: int = 1, **more: Any) -> Host:
        """A host that is not started yet."""
        return _host(self._open, self.folder / name, self.base, flags, engines, **more)

    def report(self, name: str, *pulls: str) -> None:
        """Report to the hub as a host of this name that has just started."""
        told = Following(follower=name, upstream=self.hub.refitd.url, upstreams=[], process=uuid4().hex)
        self.hub.client.report(HostReport(told=told, pulls=pulls, freely=True))

    def publish(self, step: int, weights: Tensors | None = None, **more: Any) -> str:
        """Publish a step to the hub; its version's id."""
        with WeightPublisher(self.hub.root, RUN, self.hub.refitd.url, options=PublishOptions(**more)) as publisher:
            return publisher.publish(tensors(step) if weights is None else weights, step=step).version_id


def _host(opened: ExitStack, folder: Path, base: Path, flags: tuple[str, ...], engines: int, **more: Any) -> Host:
    (folder / "root").mkdir(parents=True, exist_ok=True)
    own = [opened.enter_context(_engine()) for _ in range(engines)]
    urls = [engine.url for engine in own]
    refitd = RefitdServer(folder, folder / "root", urls, *QUICK, "--base-model", str(base), *flags, **more)
    return Host(folder.name, folder, refitd, own)


@contextmanager
def hosts(folder: Path, *flags: str, engines: int = 0, weights: Tensors | None = None) -> Generator[Hosts]:
    """Run a hub. `flags` are its own, `engines` how many it has itself, `weights` those of the model at the start."""
    base = write_model(folder / "base", weights)
    with ExitStack() as opened:
        hub = _host(opened, folder / "hub", base, flags, engines)
        opened.enter_context(hub.refitd)
        yield Hosts(folder, hub, base, opened)


class Logged(Protocol):
    """A host, as far as a failure tells of it."""

    @property
    def name(self) -> str: ...
    @property
    def refitd(self) -> RefitdServer: ...


def until(what: Callable[[], object], *hosts: Logged, patience: float = PATIENCE) -> None:
    """Wait for something to become true; the error has the end of the hosts' logs."""
    ends = time.monotonic() + patience
    while not what():
        logs = "\n".join(f"--- {host.name}\n{host.refitd.tail()}" for host in hosts)
        assert time.monotonic() < ends, f"it did not happen\n{logs}"
        time.sleep(0.02)
