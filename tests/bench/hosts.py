"""Followers of a hub on one machine: bytes on each link, pulls beside a raw socket, all hosts beside one, a resume.

Every service is a process of its own, with its root in memory where there is room; engines say what they were told to
load. The hub has one as well, which a trainer's deltas need. Full versions are pulled into slots once each host has
one, as in a training.
"""

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from figures import Figure, spread
from raw_socket import raw_rates

from refitd_client import WeightPublisher
from refitd_client.contract.manifest import BLOCK
from refitd_client.contract.states import Kind
from support.checkpoints import Tensors, write_model
from support.hosts import RUN, Host, Hosts, until
from support.hosts import hosts as running_hosts
from support.links import Link

BYTES = 128 * 2**20
TENSORS = 16
CHANGED = 0.01
FOLLOWERS = 8
ROUNDS = 3
WARM = 3  # full versions until each host has a slot
KILLS = 3
PARTS = 4  # that a follower pulls at a time
MEMORY = Path("/dev/shm")  # noqa: S108 - a file system in memory


def hosts(folder: Path) -> list[Figure]:
    """One follower and eight."""
    room = MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 64 * BYTES else folder
    with tempfile.TemporaryDirectory(prefix="refitd-bench-", dir=room) as name:
        return [*_one(Path(name) / "one"), *_all(Path(name) / "all"), *_resumed(Path(name) / "resumed")]


class _Stage:
    """A hub, followers that are reached over links that count, and a trainer."""

    def __init__(self, folder: Path, opened: ExitStack, count: int) -> None:
        self._random = np.random.default_rng(1)
        shape = (TENSORS, 1, BYTES // TENSORS // 4)
        values = self._random.standard_normal(shape, np.float32)
        self.weights: Tensors = {f"layers.{number:02d}.weight": values[number] for number in range(TENSORS)}
        self.flags = ("--base-model", str(write_model(folder / "larger", self.weights)), "--keep-last", "1")
        self.all: Hosts = opened.enter_context(running_hosts(folder, *self.flags, engines=1))
        self.links = [opened.enter_context(Link(self.all.hub.refitd.port)) for _ in range(count)]
        self.hosts = [
            self.all.follower(f"host-{number}", *self.flags, url=link.url) for number, link in enumerate(self.links)
        ]
        self._publisher = opened.enter_context(WeightPublisher(self.all.hub.root, RUN, self.all.hub.refitd.url))
        self.step = 0

    def publish(self, *, delta: bool) -> tuple[float, int]:
        """Train and publish a step; when it was published (monotonic seconds), and its bytes."""
        self.step += 1
        for tensor in self.weights.values():
            at = self._random.integers(0, tensor.size, int(tensor.size * CHANGED))
            tensor[0, at] += 1
        done = self._publisher.publish(self.weights, step=self.step, delta="auto" if delta else "never")
        if delta and self.step > 1 and done.kind is not Kind.DELTA:
            raise RuntimeError(f"step {self.step} is no delta: {done.why_full}")
        return time.monotonic(), done.bytes

    def served(self, hosts: Sequence[Host]) -> float:
        """When the hosts' engines were loaded with the step, in monotonic seconds; waits for the hub's as well."""
        self._until_loaded(hosts)
        at = time.monotonic()
        self._until_loaded([self.all.hub])
        return at

    def _until_loaded(self, hosts: Sequence[Host]) -> None:
        label = str(self.step)
        until(lambda: all(each.engines[0].served["weight_version"] == label for each in hosts), self.all.hub, *hosts)


def _rate(host: Host, step: int) -> float:
    """Bytes a second of a pull, as the follower says them."""
    entries = host.get("/v1/log", params={"limit": 200}).json()["items"]
    version = f"{RUN}~v{step:06d}"
    texts = [entry["text"] for entry in entries if entry["subject"] == version]
    found = [match for text in texts if (match := re.match(r"pulled (\d+) bytes in ([\d.]+) s", text))]
    return int(found[-1][1]) / float(found[-1][2])


def _one(folder: Path) -> list[Figure]:
    """One follower, without a link in between: its pulls beside a raw socket."""
    with ExitStack() as opened:
        stage = _Stage(folder, opened, 0)
        host = stage.all.follower("host", *stage.flags)
        pulls: list[float] = []
        raw: dict[str, list[float]] = {"memory": [], "file": []}
        for number in range(WARM + ROUNDS):
            stage.publish(delta=False)
            stage.served([host])
            if number >= WARM:
                pulls.append(_rate(host, stage.step) / 1e9)
                shard = next((stage.all.hub.root / RUN / f"v{stage.step:06d}").glob("*.safetensors"))
                for where, rate in raw_rates(shard, folder / "received", connections=PARTS).items():
                    raw[where].append(rate / 1e9)
    detail = {"pull, GB/s": spread(pulls)} | {f"raw socket into {to}, GB/s": spread(each) for to, each in raw.items()}
    limits = {"memory": 1 / 0.8, "file": 1 / 0.8}
    return [
        Figure(
            name=f"hosts: a raw socket into {to} beside a pull, p50",
            measured=round(float(np.median(raw[to]) / np.median(pulls)), 2),
            unit="x",
            limit=limit,
            detail=detail,
        )
        for to, limit in limits.items()
    ]


def _all(folder: Path) -> list[Figure]:
    """Full versions and deltas to one host, then to eight."""
    found: list[Figure] = []
    took: dict[str, dict[int, list[float]]] = {"full": {}, "delta": {}}
    share: list[float] = []
    for count in (1, FOLLOWERS):
        with ExitStack() as opened:
            stage = _Stage(folder / str(count), opened, count)
            stage.publish(delta=True)
            stage.served(stage.hosts)
            for kind in ("delta", "full"):
                times = took[kind].setdefault(count, [])
                for _ in range(ROUNDS):
                    time.sleep(1)  # nothing of the step before is under way
                    before = [link.down + link.up for link in stage.links]
                    began, size = stage.publish(delta=kind == "delta")
                    times.append(stage.served(stage.hosts) - began)
                    if kind == "delta":
                        came = [link.down + link.up for link in stage.links]
                        share += [(after - first) / size for after, first in zip(came, before, strict=True)]
    found.append(
        Figure(
            name=f"hosts: bytes on a host's link beside the delta's, worst of {len(share)}",
            measured=round(max(share), 4),
            unit="x",
            limit=1.05,
            detail={"spread": spread(share)},
        )
    )
    for kind, times in took.items():
        one, several = times[1], times[FOLLOWERS]
        found.append(
            Figure(
                name=f"hosts: {kind}, published to all {FOLLOWERS} served beside one, p50",
                measured=round(float(np.median(several) / np.median(one)), 2),
                unit="x",
                limit=1.5,
                detail={"one, s": spread(one), f"{FOLLOWERS}, s": spread(several)},
            )
        )
    return found


def _resumed(folder: Path) -> list[Figure]:
    """A follower is killed in the middle of a pull: parts that are pulled again, for each of its connections."""
    lost: list[float] = []
    with ExitStack() as opened:
        stage = _Stage(folder, opened, 1)
        (host,), (link,) = stage.hosts, stage.links
        for number in range(KILLS):
            before = link.down
            _, size = stage.publish(delta=False)
            share = size * (number + 1) / (KILLS + 1)
            _reaches(lambda before=before, share=share: link.down - before >= share)
            host.refitd.kill()
            host.refitd.start()
            stage.served([host])
            lost.append((link.down - before - size) / BLOCK / PARTS)
    name = f"hosts: parts pulled again after SIGKILL, for each connection, worst of {KILLS}"
    return [Figure(name=name, measured=round(max(lost), 2), unit="parts", limit=1.0, detail={"spread": spread(lost)})]


def _reaches(what: Callable[[], bool]) -> None:
    while not what():
        time.sleep(0.0005)
