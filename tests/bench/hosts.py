"""A follower of a hub on one machine: its pulls beside a raw socket, and what a pull loses that is killed.

Every service is a process of its own, with its root in memory where there is room; engines say what they were told to
load. Versions are pulled into slots once the host has one, as in a training.
"""

import re
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from figures import Figure, spread
from raw_socket import raw_rates
from training import Training

from refitd_client import WeightPublisher
from refitd_client.contract.manifest import BLOCK
from support.checkpoints import write_model
from support.hosts import RUN, Host, Hosts, until
from support.hosts import hosts as running_hosts
from support.links import Link

BYTES = 128 * 2**20
ROUNDS = 5
WARM = 3  # full versions until each host has a slot
KILLS = 3
PARTS = 4  # that a follower pulls at a time
MEMORY = Path("/dev/shm")  # noqa: S108 - a file system in memory


def hosts(folder: Path) -> list[Figure]:
    """One follower."""
    room = MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 64 * BYTES else folder
    with tempfile.TemporaryDirectory(prefix="refitd-bench-", dir=room) as name:
        return [*_one(Path(name) / "one"), *_resumed(Path(name) / "resumed")]


class _Stage:
    """A hub, followers that are reached over links that count, and a trainer."""

    def __init__(self, folder: Path, opened: ExitStack, count: int) -> None:
        self.training = Training(BYTES)
        model = write_model(folder / "larger", self.training.weights)
        self.flags = ("--base-model", str(model), "--keep-last", "1")
        self.all: Hosts = opened.enter_context(running_hosts(folder, *self.flags))
        self.links = [opened.enter_context(Link(self.all.hub.refitd.port)) for _ in range(count)]
        self.hosts = [
            self.all.follower(f"host-{number}", *self.flags, url=link.url) for number, link in enumerate(self.links)
        ]
        publisher = WeightPublisher(self.all.hub.root, RUN, self.all.hub.refitd.url)
        self.training.publisher = opened.enter_context(publisher)

    def publish(self) -> int:
        """Train and publish a step; its bytes."""
        return self.training.publish(delta=False)[1]

    def served(self, host: Host) -> None:
        """Wait until the host's engine was loaded with the step."""
        label = str(self.training.step)
        until(lambda: host.engines[0].served["weight_version"] == label, self.all.hub, host)


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
            stage.publish()
            stage.served(host)
            if number >= WARM:
                step = stage.training.step
                pulls.append(_rate(host, step) / 1e9)
                time.sleep(2)  # both services still check and clear up, and the sockets are to have the machine alone
                shard = next((stage.all.hub.root / RUN / f"v{step:06d}").glob("*.safetensors"))
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


def _resumed(folder: Path) -> list[Figure]:
    """A follower is killed in the middle of a pull: parts that are pulled again, for each of its connections."""
    lost: list[float] = []
    with ExitStack() as opened:
        stage = _Stage(folder, opened, 1)
        (host,), (link,) = stage.hosts, stage.links
        for number in range(KILLS):
            before = link.down
            size = stage.publish()
            share = size * (number + 1) / (KILLS + 1)
            _reaches(lambda before=before, share=share: link.down - before >= share)
            host.refitd.kill()
            host.refitd.start()
            stage.served(host)
            lost.append((link.down - before - size) / BLOCK / PARTS)
    name = f"hosts: parts pulled again after SIGKILL, for each connection, worst of {KILLS}"
    return [Figure(name=name, measured=round(max(lost), 2), unit="parts", limit=1.0, detail={"spread": spread(lost)})]


def _reaches(what: Callable[[], bool]) -> None:
    while not what():
        time.sleep(0.0005)
