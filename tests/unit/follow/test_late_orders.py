"""Orders that a host hears after others that were made later."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from refitd.clock import SystemClock
from refitd.follow.orders import OrderOvertakenError, OrderRefusedError, Orders
from refitd.rollout.targets import Targets
from refitd.state.journal.journal import Journal
from refitd.state.observer import Notifier
from refitd.state.records import RunRecord
from refitd.state.store import Store
from refitd_client.contract.follow import HostOrder, ReportAnswer
from support.records import version

V1, V2 = version(1).id, version(2).id
OTHER = version(5, run="other").id


class Host:
    """The orders of a host, over its restarts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.start()

    def start(self) -> None:
        self.store = Store(Journal(self._folder), SystemClock())
        self.orders = Orders(self.store, Targets(self.store, follows=True), Notifier(), run=None)

    def write(self) -> None:
        """Have what has happened written into the journal."""

        async def written() -> None:
            writer = asyncio.create_task(self.store.journal.run())
            await self.store.durable()
            writer.cancel()

        asyncio.run(written())

    def stop(self) -> None:
        self.store.journal.close()

    def obey(self, version: str | None, after: int | None, **fields: Any) -> None:
        order = HostOrder(**({"run": "run", "version": version, "after": after, "leader": "hub"} | fields))
        self.orders.obey(order, "http://hub")

    @property
    def desired(self) -> str | None:
        return self.store.runs.desired.get("run")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.stop()


def test_each_order_that_is_obeyed_counts(host: Host) -> None:
    host.obey(V1, 0)
    host.obey(V2, 1)
    assert (host.desired, host.orders.lead.orders) == (V2, 2)


def test_an_order_that_comes_after_one_that_was_made_later_is_refused_and_changes_nothing(host: Host) -> None:
    host.obey(V1, 0)
    before = host.orders.lead
    with pytest.raises(OrderOvertakenError, match="another order came in between"):
        host.obey(V2, 0, told_by="the refitd of hub")
    assert (host.desired, host.orders.lead) == (V1, before)


def test_an_order_that_changes_nothing_makes_earlier_ones_late_all_the_same(host: Host) -> None:
    """A hub has ordered step 2 and has given up on that, and orders what is served already to stay."""
    host.obey(V1, 0)
    host.obey(V1, 1)
    with pytest.raises(OrderOvertakenError):
        host.obey(V2, 1)


def test_an_order_that_comes_twice_is_answered_well_and_counts_once(host: Host) -> None:
    host.obey(V1, 0)
    host.obey(V1, 0)
    assert (host.desired, host.orders.lead.orders) == (V1, 1)
    with pytest.raises(OrderOvertakenError):
        host.obey(V1, 0, again=True)


def test_an_order_that_comes_twice_still_says_by_which_lead(host: Host) -> None:
    host.obey(V1, 0, fence=1)
    host.obey(V1, 0, fence=2)
    with pytest.raises(OrderRefusedError, match="leads with epoch 2"):
        host.obey(V2, 1, fence=1)


def test_a_late_order_of_another_run_is_refused_though_that_desired_the_same_last(host: Host) -> None:
    host.obey(OTHER, 0, run="other")
    host.obey(V1, 1)
    with pytest.raises(OrderOvertakenError):
        host.obey(OTHER, 0, run="other")
    assert host.orders.run == "run"


def test_a_host_that_is_restarted_or_not_led_for_a_while_knows_how_many_orders_it_has_obeyed(host: Host) -> None:
    host.obey(V1, 0)
    host.obey(V2, 1)
    host.write()
    host.stop()
    host.start()
    host.orders.answered("run", ReportAnswer(lease_seconds=30))
    host.orders.answered("run", ReportAnswer(lease_seconds=30, leads=True, leader="hub"))
    assert host.orders.lead.orders == 2
    with pytest.raises(OrderOvertakenError):
        host.obey(V1, 1)


def test_a_hub_that_knows_of_no_number_is_obeyed_as_before(host: Host) -> None:
    host.obey(V1, None)
    host.obey(V2, None)
    assert (host.desired, host.orders.lead.orders) == (V2, 2)


def test_an_order_is_written_down_with_its_number_at_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a host that is killed in between would take an order for late that it has not obeyed, or obey a late one."""
    written: list[RunRecord] = []
    monkeypatch.setattr(host.store, "put_order", lambda record, _: written.append(record))
    host.obey(V1, 0)
    assert [(record.desired, record.lead.orders) for record in written] == [(V1, 1)]
