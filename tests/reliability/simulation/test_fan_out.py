"""A thousand hosts and one hub, in virtual time: what the hub sends, to how many at a time, and how often it is asked.

The turns, the reports with their pace, and the pulls are the product's own. Made up are the network and the store: all
bytes of the hub go through one link, in which a version takes as long as one of `SIZE` bytes.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.follow import Following, HostEngines, HostReply, HostReport, OrderState
from refitd_client.contract.manifest import parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME, Order
from refitd_client.contract.states import EngineState, VersionState
from refitd_hosts.follow import pull_turn
from refitd_hosts.follow.pull_turn import PullTurn
from refitd_hosts.follow.puller import Puller
from refitd_hosts.follow.reporting import UpstreamReporter
from refitd_hosts.follow.upstream import FilePart, FollowedSources, Upstream
from refitd_hosts.hub.engine import SILENT_SECONDS
from refitd_hosts.hub.reported import PLACES, ReportedHosts
from simulation.virtual_time import VirtualClock, VirtualLoop
from support.checkpoints import publish, tensors

RUN, VERSION, STORE = "run", "run~v000001", "s3://bucket/prefix"
HOSTS = 1000
SIZE = 2**31
LINK = 5e9  # bytes a second, 40 Gbit/s


class Link:
    """Bytes go through one after another."""

    def __init__(self, scale: float) -> None:
        self._turn = asyncio.Lock()
        self._scale = scale
        self.bytes = 0

    async def send(self, count: int) -> None:
        async with self._turn:
            await asyncio.sleep(count * self._scale / LINK)
        self.bytes += count


class Hub:
    """The hub's root, its turns, and what is asked of it. `asked` counts requests, `told` the bytes of reports and
    replies; `most` is how many hosts pulled at a time, and `order` in which they began.
    """

    def __init__(self, folder: Path, clock: VirtualClock) -> None:
        self.root = folder / "hub"
        made = publish(self.root, RUN, 1, tensors(1))
        self.manifest = (made / MANIFEST_NAME).read_bytes()
        self.files = {path.name: path.read_bytes() for path in made.iterdir()}
        self.size = sum(file.size for file in parse_manifest(self.manifest).files.values())
        self.digest = parse_manifest(self.manifest).digest
        self.link = Link(SIZE / self.size)
        self.store = Store(Journal(folder), clock)
        self.store.put_version(
            VersionRecord(
                run=RUN, order=Order(1, 1), path=f"{RUN}/{made.name}", state=VersionState.SEALED, created_at=""
            ).having(digest=self.digest, owned=True, bytes=SIZE)
        )
        self.hosts = ReportedHosts(self.store, clock, None)
        self.asked, self.told = Counter[str](), 0
        self.pulling: Counter[str] = Counter()
        self.most = 0
        self.order: dict[str, None] = {}
        self.is_full = asyncio.Event()

    def report(self, report: HostReport) -> HostReply:
        self.asked["reports"] += 1
        reply = self.hosts.reported(report, is_newest=True)
        self.told += len(msgspec.json.encode(report)) + len(msgspec.json.encode(reply))
        return reply


class HubCalls:
    """The hub as one host asks it."""

    leads = True
    name = "http://hub:8700"

    def __init__(self, hub: Hub, host: str) -> None:
        self._hub = hub
        self._host = host

    async def manifest(self, version: str) -> bytes:
        self._hub.asked["manifests"] += 1
        self._hub.told += len(self._hub.manifest)
        await asyncio.sleep(0.001)
        return self._hub.manifest

    async def fill(self, part: FilePart, buffer: memoryview) -> None:
        hub = self._hub
        hub.asked["parts"] += 1
        hub.order[self._host] = None
        hub.pulling[self._host] += 1
        if len(hub.order) == PLACES:
            hub.is_full.set()
        hub.most = max(hub.most, sum(count > 0 for count in hub.pulling.values()))
        try:
            await hub.link.send(part.length)
        finally:
            hub.pulling[self._host] -= 1
        buffer[:] = hub.files[part.file][part.start : part.start + part.length]

    async def report(self, report: HostReport) -> HostReply:
        await asyncio.sleep(0.002)
        return self._hub.report(report)


class Bucket:
    """The store, which counts what is read of it. It answers as long as it `works`."""

    name = STORE

    def __init__(self, hub: Hub, works: Callable[[], bool]) -> None:
        self._hub = hub
        self._works = works
        self.bytes = 0

    async def fill(self, key: str, start: int, buffer: memoryview) -> bool:
        await asyncio.sleep(0.05)
        if not self._works():
            return False
        self.bytes += len(buffer)
        buffer[:] = self._hub.files[key.rpartition("/")[2]][start : start + len(buffer)]
        return True


@dataclass
class Host:
    """A host that lacks the version. `done` is when it has it."""

    name: str
    hub: Hub
    folder: Path
    clock: VirtualClock
    done: float | None = None
    pulling: bool = False
    reports: int = 0
    left: list[str] = field(default_factory=list[str])
    task: "asyncio.Task[None] | None" = None
    reporting: "asyncio.Task[None] | None" = None
    turn: PullTurn = field(init=False)

    def start(self) -> None:
        self.sources = FollowedSources([cast("Upstream", HubCalls(self.hub, self.name))])
        self.turn = PullTurn(self.sources, self.clock)
        self.reporter = UpstreamReporter(self.sources, self.says, self.hears, lambda: self.done is None)
        self.puller = Puller(self.folder, self.sources)
        self.task = asyncio.create_task(self.pull())
        self.reporting = asyncio.create_task(self.reporter.run())

    def says(self) -> HostReport:
        self.reports += 1
        told = Following(
            follower=self.name,
            upstream=HubCalls.name,
            upstreams=[HubCalls.name],
            run=RUN,
            desired=VERSION,
            process=self.name,
            order=OrderState.COMES if self.done is None else OrderState.SERVED,
            pulling=VERSION if self.pulling else None,
            source=self.turn.source,
            ahead=self.turn.ahead,
            host=HostEngines(follower=self.name, states={EngineState.IN_SYNC: 8}),
        )
        holds = () if self.done is None else (VERSION,)
        return HostReport(told=told, number=self.reports, holds=holds, pulls=(VERSION,) if self.pulling else ())

    def hears(self, reply: HostReply) -> None:
        self.turn.heard(HubCalls.name, reply.pull)

    async def pull(self) -> None:
        self.folder.mkdir()
        self.turn.begin(VERSION)
        self.pulling = True
        await self.reporter.report()
        await self.turn.pulled(lambda sources: self.puller.pull(VERSION, self.hub.digest, sources), self.left.append)
        self.done = self.clock.monotonic()
        self.pulling = False
        self.turn.end()
        self.sources.told.notify()

    def dies(self) -> None:
        for task in (self.task, self.reporting):
            assert task is not None
            task.cancel()


@dataclass
class Fleet:
    """The hub, and its hosts in the order in which they come."""

    loop: VirtualLoop
    hub: Hub
    hosts: list[Host]
    bucket: Bucket

    async def all_have_it(self, *, but: Sequence[Host] = ()) -> float:
        """Start all and wait until they have the version; the seconds that it took."""
        began = self.loop.time()
        for host in self.hosts:
            self.hub.hosts.line(host.name).order(RUN, VERSION)
            host.start()
            await asyncio.sleep(0.001)
        waiting = [cast("asyncio.Task[None]", host.task) for host in self.hosts if host not in but]
        await asyncio.wait(waiting)
        took = self.loop.time() - began
        for task in waiting:
            task.result()
        await asyncio.sleep(2.0)  # the last reports
        for host in self.hosts:
            cast("asyncio.Task[None]", host.reporting).cancel()
            host.puller.close()
        return took

    @property
    def figures(self) -> dict[str, Any]:
        parts = self.hub.link.bytes / self.hub.size
        return dict(self.hub.asked) | {"copies": parts, "bytes told": self.hub.told, "most": self.hub.most}


@contextmanager
def fleet(
    folder: Path,
    patch: pytest.MonkeyPatch,
    count: int = HOSTS,
    *,
    store: bool = False,
    works: Callable[[], bool] = lambda: True,
) -> Generator[Fleet]:
    loop = VirtualLoop(random.Random(1))
    clock = VirtualClock(loop)
    hub = Hub(folder, clock)
    if store:
        hub.hosts.store_with = lambda _, digest: STORE if digest == hub.digest else ""
    bucket = Bucket(hub, works)
    patch.setenv("AWS_REGION", "here")
    patch.setattr(pull_turn.Bucket, "at", lambda _: bucket)
    try:
        yield Fleet(loop, hub, [Host(f"host-{n}", hub, folder / f"host-{n}", clock) for n in range(count)], bucket)
    finally:
        hub.store.journal.close()
        loop.close()


def test_of_a_thousand_hosts_with_a_store_none_takes_a_byte_of_the_version_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet(tmp_path, monkeypatch, store=True) as all_:
        took = all_.loop.run_until_complete(all_.all_have_it())
        print(took, all_.figures)
        assert all_.hub.link.bytes == 0
        assert all_.bucket.bytes == HOSTS * all_.hub.size
        assert all_.hub.asked["manifests"] == 2 * HOSTS
        assert all_.hub.asked["reports"] <= 8 * HOSTS


def test_without_a_store_so_many_hosts_pull_at_a_time_the_link_is_full_and_dead_ones_hold_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 300
    with fleet(tmp_path, monkeypatch, count) as all_:
        hub, dead = all_.hub, all_.hosts[:2]

        async def play() -> float:
            having = asyncio.create_task(all_.all_have_it(but=dead))
            await hub.is_full.wait()
            for host in dead:
                assert hub.pulling[host.name]
                host.dies()
            return await having

        took = all_.loop.run_until_complete(play())
        print(took, all_.figures)
        assert hub.most <= PLACES
        assert took <= 1.1 * count * SIZE / LINK + SILENT_SECONDS
        assert hub.asked["reports"] / took <= 250


def test_a_store_that_fails_leaves_hosts_to_the_hub_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet(tmp_path, monkeypatch, 50, store=True, works=lambda: False) as all_:
        all_.loop.run_until_complete(all_.all_have_it())
        print(all_.figures)
        assert all_.hub.most <= PLACES
        assert all(host.turn.store_fault is not None and len(host.left) == 1 for host in all_.hosts)
        assert all_.hub.link.bytes == 50 * all_.hub.size
