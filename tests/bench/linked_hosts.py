"""A hub and followers that pull from each other, on one machine, each with a link of its own that carries so much.

Two cores cannot do the work of nine hosts at the speed of a data centre's links. So links are slow here, and a pull
takes as long as its link: then what one follower takes and what eight take can be compared. The kernel counts what
goes over each link (`host_network.py`). Engines answer as an SGLang with the plugin does, without a model.
"""

import re
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from figures import Figure, spread
from host_network import HostLink, host_links, set_rate
from training import Training

from refitd_client import WeightPublisher
from refitd_client.contract.manifest import parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME, parse_version_folder, version_id
from refitd_client.contract.plugin import Answer, PluginRequest, UpdateOutcome
from refitd_plugin.channel import Channel, Reply
from support.checkpoints import write_model
from support.hosts import RUN, until
from support.scripted_server import Step, serve
from support.scripted_sglang import ScriptedSglang, said
from support.servers import RefitdServer

FOLLOWERS = 8
ROUNDS = 3
CHILDREN = 2
PORT = 8700
TOKEN = "opens-everything"
SEED = 7
MODEL, CHANGED = 600 * 10**6, 0.075  # bytes and share whose delta is as large as that of 1 % of 3 GB in bfloat16
LARGE = 256 * 2**20  # bytes of a version that travels in full
RATE = 12.5e6  # bytes a second of each link in each direction
FAST = 4e9  # while the first version comes
PATIENCE = 900.0  # seconds for that


@dataclass
class PluggedEngine(ScriptedSglang):
    """An SGLang with refitd inside that takes what it is told, and says by its channel what it holds."""

    def listen(self, root: Path) -> None:
        """Open the plugin's channel."""
        self._root, port = root, int(self.url.rpartition(":")[2])
        self.told |= {"port": port, "random_seed": SEED}
        self._hello = {"ok": True, "protocol": 1, "plugin": "0.1.0", "sglang": self.version, "state": "on"}
        self._hello |= {"host": "bench", "port": port, "seed": SEED, "rank": 0, "ranks": 1, "dp_rank": None}
        Channel(root, 0, self._handle).open()

    def _handle(self, request: PluginRequest) -> Reply:
        match request.do:
            case "hello":
                return self._hello
            case "contents":
                return {"ok": True, "contents": self._contents}
            case "prepare":
                manifest = parse_manifest((self._root / request.path / MANIFEST_NAME).read_bytes())
                return {"ok": True, "digest": manifest.digest}
            case _:
                return {"ok": True}

    @property
    def _contents(self) -> str:
        return self.served["weight_version"].rjust(32, "0")

    def load(self) -> Step:
        super().load()
        order = parse_version_folder(Path(self.served["model_path"]).name)
        version = "" if order is None else version_id(RUN, order)
        done = Answer(outcome=UpdateOutcome.SERVED, version=version, contents=self._contents, proved=1)
        return said(200, done.message)


class LinkedRefitd(RefitdServer):
    """A service on a host that has a link."""

    ready = re.compile(rb' ready on http://[0-9.]+:(\d+)(?:$|")')
    link: HostLink

    @property
    def url(self) -> str:
        return f"http://{self.link.address}:{self.port}"


@dataclass
class LinkedHost:
    """A host, its service and its engine."""

    name: str
    link: HostLink
    root: Path
    engine: PluggedEngine
    refitd: LinkedRefitd = field(init=False)

    def start(self, folder: Path, opened: ExitStack, *flags: str) -> None:
        """Start its service."""
        (folder / "token").write_text(TOKEN)
        flags = ("--host", self.link.address, "--token-file", str(folder / "token"), *flags)
        self.refitd = LinkedRefitd(folder, self.root, [self.engine.url], *flags, first=self.link.enter)
        self.refitd.link, self.refitd.port = self.link, PORT
        opened.enter_context(self.refitd)


def _host(opened: ExitStack, folder: Path, link: HostLink) -> LinkedHost:
    root = folder / "root"
    root.mkdir(parents=True)
    engine = PluggedEngine(link.inside(lambda: opened.enter_context(serve())))
    engine.server.steps.append(engine.step)
    engine.listen(root)
    return LinkedHost(folder.name, link, root, engine)


class Stage:
    """A hub with a trainer, and so many followers of it."""

    def __init__(self, folder: Path, opened: ExitStack, links: Sequence[HostLink], size: int) -> None:
        self.training = Training(size, CHANGED)
        base = write_model(folder / "model", self.training.weights)
        common = ("--base-model", str(base), "--keep-last", "1")
        self.hub = _host(opened, folder / "hub", links[0])
        self.hub.start(folder / "hub", opened, *common, "--relay-children", str(CHILDREN))
        self.followers = [_host(opened, folder / f"host-{link.number}", link) for link in links[1:]]
        for host in self.followers:
            token = ("--follow-token-file", str(host.root.parent / "token"))
            names = ("--follower", host.name, "--advertise", f"http://{host.link.address}:{PORT}", "--run", RUN)
            host.start(host.root.parent, opened, *common, "--follow", self.hub.refitd.url, *token, *names)
        publisher = WeightPublisher(self.hub.root, RUN, self.hub.refitd.url, token=TOKEN)
        self.training.publisher = opened.enter_context(publisher)

    def publish(self, *, is_delta: bool) -> tuple[float, int]:
        """Train and publish a step on the hub's host; when it was published (monotonic seconds), and its bytes."""
        return self.hub.link.inside(lambda: self.training.publish(delta=is_delta))

    def served(self) -> float:
        """When the last follower's engine was loaded with the step, in monotonic seconds."""
        hosts = [*self.followers, self.hub]
        label = str(self.training.step)
        loaded: dict[str, float] = {}

        def all_are() -> bool:
            for host in hosts:
                if host.name not in loaded and host.engine.served["weight_version"] == label:
                    loaded[host.name] = time.monotonic()
            return len(loaded) == len(hosts)

        until(all_are, *hosts, patience=PATIENCE)
        return max(loaded[host.name] for host in self.followers)


@dataclass
class _Measured:
    """Of one kind of version: seconds by the count of followers, and links' bytes beside the version's."""

    seconds: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    down: list[float] = field(default_factory=list[float])
    up: list[float] = field(default_factory=list[float])
    hub: list[float] = field(default_factory=list[float])
    size: int = 0


def linked_hosts(folder: Path) -> list[Figure]:
    """Deltas of a large version and full versions of a smaller one, to one follower and to eight."""
    found: list[Figure] = []
    for kind, size in (("delta", MODEL), ("full", LARGE)):
        measured = _Measured()
        for count in (1, FOLLOWERS):
            with host_links(1 + count, FAST) as links, ExitStack() as opened:
                stage = Stage(folder / kind / str(count), opened, links, size)
                _measure(stage, measured, is_delta=kind != "full")
            shutil.rmtree(folder / kind)
        found += _figures(kind, measured)
    return found


def _measure(stage: Stage, measured: _Measured, *, is_delta: bool) -> None:
    """Some steps, after the first version has come to all."""
    stage.publish(is_delta=is_delta)
    stage.served()
    links = [stage.hub.link, *(host.link for host in stage.followers)]
    for link in links:
        set_rate(link, RATE)
    seconds = measured.seconds.setdefault(len(stage.followers), [])
    for _ in range(ROUNDS):
        time.sleep(2)  # nothing of the step before is under way
        before = [(link.down, link.up) for link in links]
        began, size = stage.publish(is_delta=is_delta)
        seconds.append(stage.served() - began)
        after = [(link.down, link.up) for link in links]
        went = [((b[0] - a[0]) / size, (b[1] - a[1]) / size) for a, b in zip(before, after, strict=True)]
        measured.hub.append(went[0][1])
        measured.down += [down for down, _ in went[1:]]
        measured.up += [up for _, up in went[1:]]
        measured.size = size


def _figures(kind: str, measured: _Measured) -> list[Figure]:
    one, all_ = measured.seconds[1], measured.seconds[FOLLOWERS]
    detail = {"bytes": measured.size, "bytes a second of each link": RATE}
    name = f"linked hosts: {kind} of {measured.size / 1e6:.0f} MB"
    times = {"one, s": spread(one), f"{FOLLOWERS}, s": spread(all_)}
    ratio = round(float(np.median(all_) / np.median(one)), 2)
    sent = measured.hub[-ROUNDS:]
    return [
        Figure(
            name=f"{name}, bytes on a follower's link beside the version's, worst way of {len(measured.down)}",
            measured=round(max(*measured.down, *measured.up), 3),
            unit="x",
            limit=1.05,
            detail=detail | {"to it": spread(measured.down), "from it": spread(measured.up)},
        ),
        Figure(
            name=f"{name}, copies that the hub sends to {FOLLOWERS}, worst of {ROUNDS}",
            measured=round(max(sent), 3),
            unit="x",
            limit=CHILDREN,
            detail=detail | {"spread": spread(sent)},
        ),
        Figure(
            name=f"{name}, published to all {FOLLOWERS} served beside one, k = {CHILDREN}, p50",
            measured=ratio,
            unit="x",
            limit=1.5,
            detail=detail | times,
        ),
    ]
