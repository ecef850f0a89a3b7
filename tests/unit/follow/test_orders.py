"""Which hub's replies a host obeys, by the epochs that it has heard."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refitd.state.observer import Notifier
from refitd.update.targets import Targets
from refitd_client.contract.follow import HostReply
from refitd_client.contract.states import VersionState
from refitd_hosts.follow.orders import Orders
from support.journals import stored
from support.records import engine, version

V1, V2 = version(1).id, version(2).id


@asynccontextmanager
async def host(folder: Path, run: str | None = None) -> AsyncIterator[Orders]:
    """A host from its start to its end."""
    async with stored(folder) as store:
        yield Orders(store, Targets(store, follows=True), Notifier(), run=run)


def reply(epoch: int, *, leader: str = "hub", again: int = 0, **more: Any) -> HostReply:
    """A reply to serve versions by their runs; `knows` and `digests` are the reply's own."""
    own = {name: more.pop(name) for name in ("knows", "digests") if name in more}
    return HostReply(lease_seconds=30, serve=more, again=again, leader=leader, epoch=epoch, **own)


@pytest.mark.parametrize("first", [V2, None])  # None: it was never ordered anything, and follows no run yet
async def test_a_host_obeys_no_epoch_below_that_of_a_reply_which_ordered_nothing_also_after_its_restart(
    tmp_path: Path, first: str | None
) -> None:
    async with host(tmp_path) as orders:
        orders.obey(reply(5, **{} if first is None else {"run": first}), "http://hub")
        orders.obey(reply(6), "http://hub")
        orders.obey(reply(5, run=V1), "http://hub")
        assert orders.refused is not None
    async with host(tmp_path) as orders:
        orders.obey(reply(5, run=V1), "http://hub")
        assert orders.refused is not None
        assert (orders.lead.fence, orders._store.runs.desired) == (6, {} if first is None else {"run": first})


async def test_a_hub_that_leads_again_after_another_one_is_obeyed_by_no_epoch_below_its_last(tmp_path: Path) -> None:
    async with host(tmp_path) as orders:
        orders.obey(reply(7, run=V1), "http://hub")
        orders.obey(reply(0, leader="other", run=V1), "http://other")
        orders.obey(reply(6, run=V2), "http://hub")
        assert orders.refused is not None
        assert orders.lead.leader == "other"
        orders.obey(reply(8, run=V2), "http://hub")
        assert (orders.refused, orders._store.runs.desired) == (None, {"run": V2})


async def test_a_load_is_not_repeated_for_the_number_of_a_former_hub(tmp_path: Path) -> None:
    async with host(tmp_path) as orders:
        orders.obey(reply(7, again=3, a=V1, b=V1), "http://hub")
        assert orders.obey(reply(0, again=1, leader="other", a=V1), "http://other") == "a"
        assert orders.obey(reply(0, again=1, leader="other", a=V1), "http://other") is None
        assert (orders.lead.leader, orders.lead.orders) == ("other", 1)


@pytest.mark.parametrize("leader", ["hub", "another, after its root was emptied"])
async def test_a_host_does_not_go_back_with_a_hub_that_has_lost_what_it_knew_also_after_its_restart(
    tmp_path: Path, leader: str
) -> None:
    async with host(tmp_path) as orders:
        for step in (1, 2):
            orders._store.put_version(version(step))
        orders.obey(reply(0, knows={"run": V2}, run=V2), "http://hub")
    async with host(tmp_path) as orders:
        orders.obey(reply(0, leader=leader, knows={"run": V1}, run=V1), "http://hub")
        assert (orders._store.runs.desired, orders._store.runs.ordered) == ({"run": V2}, {"run": V2})
        assert "http://hub wants run~v000001, and does not know run~v000002" in (orders.refused or "")
        orders.obey(reply(0, leader=leader, knows={"run": V2}, run=V1), "http://hub")
        assert (orders._store.runs.ordered, orders.refused) == ({"run": V1}, None), "it was rolled back there"


async def test_a_host_remembers_an_epoch_also_where_it_does_not_do_what_the_reply_says(tmp_path: Path) -> None:
    async with host(tmp_path) as orders:
        for step in (1, 2):
            orders._store.put_version(version(step))
        orders.obey(reply(5, knows={"run": V2}, run=V2), "http://hub")
        orders.obey(reply(7, knows={"run": V1}, run=V1), "http://hub")
        assert "does not know" in (orders.refused or "")
    async with host(tmp_path) as orders:
        orders.obey(reply(6, knows={"run": V2}, run=V1), "http://hub")
        assert "has led with epoch 7 since" in (orders.refused or "")
        assert orders._store.runs.ordered == {"run": V2}


async def test_a_host_says_that_its_hub_does_not_know_what_it_serves_also_where_that_wants_nothing(
    tmp_path: Path,
) -> None:
    async with host(tmp_path) as orders:
        orders._store.put_version(version(2))
        orders.obey(reply(0, knows={"run": V2}, run=V2), "http://hub")
        for knows, lost in (({"run": V2}, False), ({"run": V1}, True), ({}, True)):
            orders.hear("run", reply(0, knows=knows), "http://hub")
            assert ("http://hub does not know run~v000002" in (orders.lost or "")) is lost
        orders.hear("run", reply(0, run=V2), "http://hub")
        assert orders.lost is None, "what it wants says enough"


async def test_a_version_of_the_same_name_with_other_contents_goes_where_nothing_needs_it_and_is_then_pulled(
    tmp_path: Path,
) -> None:
    async with host(tmp_path) as orders:
        store = orders._store
        for step in (1, 2):
            store.put_version(version(step, digest="here"))
        store.record_fingerprint(V2, "c", "xxh3:here")
        orders.obey(reply(0, digests={V1: "here"}, knows={"run": V2}, run=V1), "http://hub")
        store.put_engine(engine("a", serving=V2, strikes={V2: 1}))
        orders.obey(reply(0, digests={V2: "there"}, run=V2), "http://hub")
        assert "engine a serves run~v000002, or may read it" in (orders.refused or "")
        assert (store.versions[V2].state, store.fingerprint(V2, "c")) == (VersionState.SEALED, "xxh3:here")
        store.put_engine(engine("a", serving=V1, strikes={V2: 1}))
        orders.obey(reply(0, digests={V2: "there"}, run=V2), "http://hub")
        assert "so it is deleted, and then the upstream's is pulled" in (orders.refused or "")
        assert store.versions[V2].state is VersionState.RETIRED
        assert (store.fingerprint(V2, "c"), store.engines["a"].trouble.strikes) == (None, {})
        orders.obey(reply(0, digests={V2: "there"}, run=V2), "http://hub")
        assert not orders.desire("run", V2, "http://hub", knows=V2, digest="there")
        assert store.runs.desired == {"run": V1}, "its files are there until it is deleted"
        store.put_version(replace(store.versions[V2], state=VersionState.DELETED))
        orders.obey(reply(0, digests={V2: "there"}, run=V2), "http://hub")
        assert (store.runs.desired, orders.refused) == ({"run": V2}, None)


async def test_a_host_says_why_a_version_of_its_own_stays_that_what_is_wanted_stands_on_with_other_contents(
    tmp_path: Path,
) -> None:
    """The hub's delta has another digest than all that the host has: its base is what is in the way."""
    async with host(tmp_path) as orders:
        store = orders._store
        for step in (1, 2):
            store.put_version(version(step, digest="here"))
        store.put_engine(engine("a", serving=V1))
        said = orders.make_way({V1, V2}, "http://hub")
        assert said.keys() == {V1}
        assert "http://hub has another run~v000001 than this host, of the same name: engine a serves" in said[V1]
        assert "Publish something newer" in said[V1]
        assert store.versions[V2].state is VersionState.RETIRED, "nothing needs it"


async def test_a_run_that_is_closed_at_the_upstream_is_closed_here_and_opened_again_with_it(tmp_path: Path) -> None:
    """A host kept three versions of a run of which its hub kept one, and closing it on the host was refused."""
    async with host(tmp_path) as orders:
        orders.follow_end("run", "http://hub", is_closed=True)
    async with host(tmp_path) as orders:
        assert orders._store.runs.closed.keys() == {"run"}
        orders.follow_end("run", "http://hub", is_closed=False)
        assert not orders._store.runs.closed


@pytest.mark.parametrize("served", ["t", None])
async def test_an_order_of_something_newer_waits_on_a_host_that_is_paused_itself(
    tmp_path: Path, served: str | None
) -> None:
    """Also where it was served before and left: a pause brings engines to the newest that was served."""
    async with host(tmp_path, "run") as orders:
        store, targets = orders._store, orders._targets
        for each in (version(1, served_at="t"), version(2, served_at=served)):
            store.put_version(each)
        store.put_engine(engine("a", serving=V1))
        orders.obey(reply(0, knows={"run": V2}, run=V1), "http://hub")
        update = store.start_update("run", V1, "newest good version")
        store.pause_updates(update, paused=True)

        def goes_to() -> str | None:
            loadable = targets.of_engine(store.engines["a"]).loadable
            return None if loadable is None else loadable.id

        orders.obey(reply(0, knows={"run": V2}, run=V2), "http://hub")
        assert goes_to() == V1
        store.pause_updates(store.updates["run"], paused=False)
        orders.carry_out()
        assert goes_to() == V2
        store.pause_updates(store.updates["run"], paused=True)
        orders.obey(reply(0, knows={"run": V2}, run=V1), "http://hub")
        assert store.runs.ordered["run"] == V1, "the way back waits for nothing"
