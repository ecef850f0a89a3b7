"""An engine with the plugin is led by one service: another one is refused in its name, for as long as that is true."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from refitd.engine.plugin import LEASE_SECONDS, PROBES, Leads, service_name
from refitd.engine.port import Outcome, Reached
from refitd.engine.transaction import ServerEngine
from refitd.policy.next_action import at_rest_interval
from refitd.update.controller import service_leads
from refitd_client.contract.plugin import Owner
from refitd_plugin.rank_plugin import RequestHandler
from refitd_plugin.update.rank_engine import LONGEST_SECONDS, LeaderLease
from support.engines import sglang_engine
from support.plugged_mini import PluggedMini, plugged_mini, put, target
from support.sockets import ask

FIRST = Owner(service="one", root="/mnt/one", host="gpu-1", pid=os.getpid())
OTHER = Owner(service="two", root="/mnt/two", host="gpu-2", pid=1)
PAUSE, LOAD = "/pause_generation", "/update_weights_from_disk"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(clock: Clock) -> LeaderLease:
    lease = LeaderLease(clock)
    assert lease.take(FIRST, 30.0) is None
    return lease


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def sglang(root: Path) -> Iterator[PluggedMini]:
    with plugged_mini(root) as engine:
        yield engine


def speaking_to(sglang: PluggedMini, root: Path, owner: Owner | None) -> aclosing[ServerEngine]:
    return aclosing(sglang_engine(sglang.url, root=root, leads=None if owner is None else Leads(owner=owner)))


async def probed(engine: ServerEngine) -> Reached:
    seen = await engine.probe()
    assert isinstance(seen, Reached)
    return seen


def test_a_service_that_restarts_takes_its_own_lease_again_at_once(lease: LeaderLease) -> None:
    again = Owner(service="one", root="/mnt/one", host="gpu-1", pid=4242)
    assert lease.take(again, 30.0) is None
    assert "pid 4242" in (lease.leader() or "")


def test_the_services_of_a_group_follow_each_other_at_once_and_one_that_was_followed_is_refused_for_good(
    lease: LeaderLease, clock: Clock
) -> None:
    clock.now += 31.0
    first, second = (structs.replace(FIRST, service="group", host=f"hub-{epoch}", epoch=epoch) for epoch in (1, 2))
    assert lease.take(first, 30.0) is None
    assert lease.take(second, 30.0) is None
    assert "hub-2 (pid" in (lease.take(first, 30.0) or "")
    clock.now += 31.0
    assert "epoch 2 after 1" in (lease.take(first, 30.0) or ""), "also when the other has not said anything for long"
    assert lease.take(second, 30.0) is None


def test_a_lease_that_is_not_renewed_ends(lease: LeaderLease, clock: Clock) -> None:
    clock.now += 29
    lease.renew()
    clock.now += 29
    assert lease.take(OTHER, 30.0) is not None
    clock.now += 1
    assert lease.leader() is None
    lease.renew()
    assert lease.take(OTHER, 30.0) is None


def test_a_lease_ends_with_the_process_of_its_owner(clock: Clock) -> None:
    lease = LeaderLease(clock)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert lease.take(FIRST, 30.0, process.pid) is None
        assert lease.take(OTHER, 30.0, os.getpid()) is not None
        process.kill()
        process.wait()
        assert lease.take(OTHER, 30.0, os.getpid()) is None


def test_a_lease_of_a_process_that_cannot_be_seen_ends_in_its_time(clock: Clock) -> None:
    lease = LeaderLease(clock)
    assert lease.take(FIRST, 10 * LONGEST_SECONDS, pid=0) is None
    clock.now += LONGEST_SECONDS
    assert lease.leader() is None


def test_no_descriptor_is_left_open(clock: Clock) -> None:
    lease, before = LeaderLease(clock), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert lease.take(FIRST, 30.0, os.getpid()) is None
        lease.renew()
    clock.now += 30
    assert lease.leader() is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_process_is_what_the_kernel_says_and_not_what_the_request_says(root: Path, sglang: PluggedMini) -> None:
    owner = {"service": "one", "root": "/mnt/one", "host": "gpu-1", "pid": 1}
    assert ask(sglang.members[0].socket, do="lead", owner=owner, seconds=30, peer=2**30)["ok"] is True
    assert "root /mnt/one" in ask(sglang.members[0].socket, do="hello")["leader"]
    for wrong in ({}, {"owner": owner}, {"seconds": 30}, {"owner": {"service": "one"}, "seconds": 30}):
        assert ask(sglang.members[0].socket, do="lead", **wrong)["ok"] is False


@pytest.mark.parametrize("size", [1, 2])
async def test_a_service_of_another_root_is_refused_in_the_name_of_the_one_that_leads(
    tmp_path: Path, root: Path, size: int
) -> None:
    other_root = tmp_path / "other"
    (other_root / ".refitd").mkdir(parents=True)
    put(root, 1)
    put(other_root, 2)
    with plugged_mini(root, size) as sglang:
        async with speaking_to(sglang, root, FIRST) as first, speaking_to(sglang, other_root, OTHER) as second:
            assert (await probed(first)).led_by is None
            assert (await first.refit(target(root, 1), lambda _: None)).outcome is Outcome.ACK
            await probed(second)
            for repairs in (False, True):
                refused = await second.refit(target(other_root, 2, repairs=repairs), lambda _: None)
                assert (refused.outcome, refused.led, refused.resumed) == (Outcome.NACK, True, True)
            assert "led by the refitd of root /mnt/one at gpu-1" in (refused.reason or "")
            assert sglang.holds(1)
            for rank in sglang.members:
                rank.engine.lease._end()
            assert (await second.refit(target(other_root, 2), lambda _: None)).outcome is Outcome.ACK
            assert sglang.holds(2)


async def test_a_second_service_at_the_same_channel_is_told_who_leads_until_that_one_is_gone(
    root: Path, sglang: PluggedMini
) -> None:
    async with speaking_to(sglang, root, FIRST) as first, speaking_to(sglang, root, OTHER) as second:
        assert (await probed(first)).led_by is None
        for _ in range(2):
            assert "root /mnt/one" in ((await probed(second)).led_by or "")
        sglang.members[0].engine.lease._end()
        assert (await probed(second)).led_by is None


async def test_a_plugin_that_knows_nothing_of_leases_is_told_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    handshake, handle = RequestHandler._hello, RequestHandler.handle

    def older(self: RequestHandler) -> dict[str, Any]:
        return {key: value for key, value in handshake(self).items() if key not in {"leads", "leader"}}

    def noted(self: RequestHandler, request: Any) -> dict[str, Any]:
        asked.append(request.do)
        return handle(self, request)

    monkeypatch.setattr(RequestHandler, "_hello", older)
    monkeypatch.setattr(RequestHandler, "handle", noted)
    with plugged_mini(root) as sglang:
        async with speaking_to(sglang, root, FIRST) as engine:
            seen = await probed(engine)
    assert (seen.plugin is not None, seen.led_by) == (True, None)
    assert set(asked) == {"hello"}


async def test_who_only_looks_leads_nothing(root: Path, sglang: PluggedMini) -> None:
    """As doctor does."""
    async with speaking_to(sglang, root, None) as engine:
        assert (await probed(engine)).plugin is not None
    assert sglang.members[0].engine.lease.leader() is None


def test_a_service_keeps_its_name_in_its_state_folder(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    assert service_name(one) == service_name(one) != service_name(other)


def test_a_lease_outlasts_looks_also_where_many_engines_are_looked_at_seldom(tmp_path: Path) -> None:
    for engines in (1, 1000, 100_000):
        store = cast("Any", SimpleNamespace(engines=range(engines)))
        leads = service_leads(store, tmp_path, tmp_path, 2.0, None)
        assert leads is not None
        assert (leads.owner.root, leads.owner.pid) == (str(tmp_path), os.getpid())
        assert min(leads.lasts(), LONGEST_SECONDS) >= PROBES * at_rest_interval(2.0, engines)


async def test_a_lease_is_renewed_at_once_where_so_many_engines_were_added_that_it_has_to_last_longer(
    root: Path, sglang: PluggedMini, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    take, engines = LeaderLease.take, [1]

    def noted(self: LeaderLease, owner: Owner, seconds: float, pid: int = 0) -> str | None:
        asked.append(seconds)
        return take(self, owner, seconds, pid)

    monkeypatch.setattr(LeaderLease, "take", noted)
    engine = sglang_engine(
        sglang.url,
        root=root,
        leads=Leads(owner=FIRST, lasts=lambda: max(LEASE_SECONDS, PROBES * at_rest_interval(0.0, engines[0]))),
    )
    try:
        for count in (1, 1, 1000, 1000):
            engines[0] = count
            await probed(engine)
    finally:
        await engine.aclose()
    assert asked == [LEASE_SECONDS, PROBES * 25.0]
