"""Updates that are paused on a host itself: its upstream's orders bring its engines to nothing newer."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from refitd.clock import SystemClock
from refitd.state.journal.journal import Journal
from refitd.state.observer import Notifier
from refitd.state.store import Store
from refitd.update.targets import Targets
from refitd_client.contract.follow import HostReply
from refitd_hosts.follow.orders import Orders
from support.records import engine, version

V1, V2 = version(1).id, version(2).id


class PausedHost:
    """A host that has served both versions, serves the first again, and is paused there."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(Journal(folder), SystemClock())
        self.targets = Targets(self.store, follows=True)
        self.orders = Orders(self.store, self.targets, Notifier(), run="run")
        for step in (1, 2):
            self.store.put_version(version(step, served_at="2026-01-01T00:00:00Z"))
        self.store.put_engine(engine("a", serving=V1))
        self.order(V1)
        self.store.start_update("run", V1, "newest good version")
        self.pause(True)

    def order(self, version: str) -> None:
        reply = HostReply(lease_seconds=30, serve={"run": version}, leader="hub", knows={"run": "run~v000003"})
        self.orders.obey(reply, "http://hub")

    def pause(self, paused: bool) -> None:
        self.store.pause_updates(self.store.updates["run"], paused=paused)

    @property
    def goes_to(self) -> str | None:
        """Where its engine may go now."""
        loadable = self.targets.of_engine(self.store.engines["a"]).loadable
        return None if loadable is None else loadable.id


@pytest.fixture
def host(tmp_path: Path) -> Iterator[PausedHost]:
    host = PausedHost(tmp_path)
    yield host
    host.store.journal.close()


def test_an_order_of_a_newer_version_that_was_served_before_waits_until_the_host_is_resumed(host: PausedHost) -> None:
    host.order(V2)
    assert host.goes_to == V1
    host.pause(False)
    host.orders.carry_out()
    assert host.goes_to == V2


def test_an_order_of_a_newer_version_that_was_never_served_moves_no_engine_either(host: PausedHost) -> None:
    host.store.put_version(version(3))
    host.order(version(3).id)
    assert host.goes_to == V1, "and not to what was served last and left"


def test_an_order_to_go_back_is_carried_out_on_a_paused_host(host: PausedHost) -> None:
    host.store.put_version(replace(version(1), order=replace(version(1).order, step=0), path="run/v000000"))
    host.order("run~v000000")
    assert host.store.runs.ordered["run"] == "run~v000000"
