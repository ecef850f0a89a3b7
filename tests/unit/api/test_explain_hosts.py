"""`refitd explain` of a host that the hub leads: who does what, and which of its engines are not there yet, and why."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from refitd.clock import SystemClock
from refitd.engine.port import Reached
from refitd.explain.present import orders_of_hosts, present_engine, present_version
from refitd.explain.run import glance_at
from refitd.explain.version import explain_engine, on_engines
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.update.targets import Targets
from refitd_client.contract.follow import Following, HostEngine, HostEngines, OrderState
from refitd_client.contract.states import EngineState, Standing
from refitd_hosts.hub.engine import picture, reached
from support.records import engine, version

ONE, TWO = version(1), version(2)
HUB = "http://hub:8700"
SERVED = HostEngine(id="127.0.0.1:30000", state=EngineState.IN_SYNC, version=ONE.id)
TAINTED = HostEngine(id="127.0.0.1:30001", state=EngineState.TAINTED, reason="it died in mid-load")
HOSTS = {EngineState.IN_SYNC: 1, EngineState.TAINTED: 1}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(Journal(tmp_path), SystemClock())
    for each in (ONE, TWO):
        made.put_version(each)
    yield made
    made.journal.close()


def explained(store: Store, host: HostEngines, **fields: Any) -> list[str]:
    known: dict[str, Any] = {
        "server": "refitd",
        "server_version": "0.1.0",
        "pulls": True,
        "serving": ONE.id,
        "host": host,
    }
    record = engine("host-1", **(known | fields))
    store.put_engine(record)
    return explain_engine(record, store, Targets(store))


def test_it_says_who_pulls_from_where_who_updates_and_what_this_service_does(store: Store) -> None:
    told = explained(store, HostEngines(follower="host-1", states=HOSTS, engines=(TAINTED, SERVED), upstream=HUB))
    assert "It is refitd 0.1.0, on a host that has engines of its own." in told
    assert f"The host host-1 pulls each version from {HUB} and updates its own 2 engines." in told
    assert "This service only says which version, and waits until the host has proved that it serves it." in told
    assert "When the host last reported, its engines were: 1 IN_SYNC, 1 TAINTED." in told
    why = "it was TAINTED (it died in mid-load), and it served no version"
    away = f"Its engine {TAINTED.id} was not on {ONE.id} yet: {why}."
    assert [each for each in told if each.startswith("Its engine ")] == [away]


def test_while_a_host_carries_out_an_order_each_engine_that_is_not_there_yet_is_named(store: Store) -> None:
    store.open_attempt("host-1", TWO.id)
    told = explained(store, HostEngines(follower="host-1", states=HOSTS, engines=(TAINTED, SERVED), upstream=HUB))
    waits = f"it served {ONE.id}, and the host had not begun to load it"
    assert f"Its engine {SERVED.id} was not on {TWO.id} yet: {waits}." in told
    assert any(each.startswith(f"Its engine {TAINTED.id} was not on {TWO.id} yet: it was TAINTED") for each in told)


def test_what_the_host_does_for_them_now_is_said(store: Store) -> None:
    store.put_version(TWO.having(bytes=5_000_000_000))
    store.open_attempt("host-1", TWO.id)
    host = HostEngines(follower="host-1", states=HOSTS, pulling=TWO.id, pulled_bytes=3_100_000_000)
    told = explained(store, host, state=EngineState.UPDATING, reason="its disk was full")
    pulls = f"pulls {TWO.id} (3.1 GB of 5.0 GB)"
    assert told[0] == f"host-1 is UPDATING: it was ordered to serve {TWO.id}."
    assert f"Now the host {pulls}." in told
    shown = present_engine(store.engines["host-1"], store, Targets(store))
    assert (shown.reason, shown.host) == (pulls, host)
    assert glance_at(store, Targets(store), "run").reasons[-1] == f"host-1 is UPDATING: host-1 {pulls}"
    away = explained(store, host, state=EngineState.UNREACHABLE, reason="it does not answer")
    assert not any("pulls v" in each or pulls in each for each in away), "that was before it was lost"


def test_it_says_from_where_a_host_pulls_or_how_many_hosts_pull_before_it_and_why_not_from_the_store(
    store: Store,
) -> None:
    more: dict[str, Any] = {"follower": "host-1", "states": HOSTS, "upstream": HUB, "pulling": TWO.id}
    waits = explained(store, HostEngines(**more, ahead=3, store_fault="it is gone"))
    assert f"Now the host waits to pull {TWO.id}: 3 hosts pull before this one." in waits
    assert "It pulls from its upstream, and not from the object store: it is gone." in waits
    pulls = explained(store, HostEngines(**more, source="s3://bucket/prefix"))
    assert any(f"pulls {TWO.id} from s3://bucket/prefix (" in each for each in pulls)


def test_a_host_that_waits_for_its_own_pause_is_said_to_wait_wherever_it_is_named(store: Store) -> None:
    store.open_attempt("host-1", TWO.id)
    said = "updates of run are paused on that host since 2026-01-01: refitd resume run there"
    host = HostEngines(follower="host-1", states={EngineState.IN_SYNC: 1}, engines=(SERVED,), waits=said)
    waits = f"waits to load {TWO.id}: {said}"
    told = explained(store, host, state=EngineState.UPDATING, reason="its disk was full")
    assert f"Now the host {waits}." in told
    record, targets = store.engines["host-1"], Targets(store)
    assert present_engine(record, store, targets).reason == waits
    assert glance_at(store, targets, "run").reasons[-1] == f"host-1 is UPDATING: host-1 {waits}"
    (on,) = present_version(TWO, [record], hosts=orders_of_hosts([record], store)).engines
    assert on.reason == waits
    where = f"Engine host-1 does not serve it yet: it is UPDATING ({waits}), and serves {ONE.id}."
    assert where in on_engines(TWO, store, targets)


def test_a_host_that_is_behind_since_its_own_operator_has_paused_it_is_said_to_wait_wherever_it_is_named(
    store: Store,
) -> None:
    said = "updates of run are paused on that host since 2026-01-01: refitd resume run there"
    host = HostEngines(follower="host-1", states={EngineState.IN_SYNC: 1}, engines=(SERVED,), waits=said)
    waits = f"waits: {said}"
    told = explained(store, host, state=EngineState.BEHIND)
    assert f"Now the host {waits}." in told
    record, targets = store.engines["host-1"], Targets(store)
    assert present_engine(record, store, targets).reason == waits
    glance = glance_at(store, targets, "run")
    assert glance.reasons[-1] == f"host-1 is BEHIND: host-1 {waits}"
    assert glance.standing is Standing.PAUSED, "an operator is waited for"
    store.put_engine(engine("b", state=EngineState.BEHIND, serving=ONE.id))
    assert glance_at(store, targets, "run").standing is Standing.MOVING
    (on,) = present_version(TWO, [record], hosts=orders_of_hosts([record], store)).engines
    assert on.reason == waits
    where = f"Engine host-1 does not serve it yet: it is BEHIND ({waits}), and serves {ONE.id}."
    assert where in on_engines(TWO, store, targets)


def test_a_host_that_waits_is_not_shown_as_one_that_loads() -> None:
    def loading(waits: str | None) -> str | None:
        host = HostEngines(follower="host-1", states=HOSTS, waits=waits)
        told = Following(
            follower="host-1",
            upstream=HUB,
            upstreams=[HUB],
            desired=TWO.id,
            ordered=TWO.id,
            order=OrderState.COMES,
            order_reason=waits,
            host=host,
        )
        seen = picture(told)
        assert seen is not None
        assert seen.waits == waits
        return seen.loading

    assert (loading("it is paused"), loading(None)) == (None, TWO.id)


def test_engines_that_the_host_does_not_name_are_counted(store: Store) -> None:
    many = {EngineState.TAINTED: 20, EngineState.IN_SYNC: 3}
    told = explained(store, HostEngines(follower="host-1", states=many, engines=(TAINTED,) * 16))
    assert "The host host-1 pulls each version and updates its own 23 engines." in told
    assert "4 more of its engines were not IN_SYNC: 'refitd status' on that host names all of them." in told


def test_the_hub_knows_from_where_a_host_pulls() -> None:
    told = Following(
        follower="host-1", upstream=HUB, upstreams=[HUB], host=HostEngines(follower="host-1", states=HOSTS)
    )
    seen = reached(told, "/root")
    assert isinstance(seen, Reached)
    assert seen.host is not None
    assert seen.host.upstream == HUB


def test_of_two_hosts_that_do_not_report_each_is_said_to_be_silent_by_its_own_name(store: Store) -> None:
    for name in ("host-2", "host-3"):
        why = f"the host {name} does not report: its last report came at 10:00"
        store.put_engine(engine(name, pulls=True, state=EngineState.UNREACHABLE, serving=ONE.id, reason=why))
    silent = [each for each in glance_at(store, Targets(store), "run").reasons if "UNREACHABLE" in each]
    assert silent == [
        "host-2 and host-3 are UNREACHABLE: the host host-2 does not report: its last report came at 10:00; "
        "the host host-3 does not report: its last report came at 10:00"
    ]


def test_a_name_that_two_hosts_report_by_is_trouble_in_status(store: Store) -> None:
    host = HostEngines(follower="host-1", states={EngineState.IN_SYNC: 1}, engines=(SERVED,), shares_name=True)
    why = "wo hosts report as host-1: give each a name of its own (--follower)"
    assert f"T{why}." in explained(store, host)
    targets = Targets(store)
    shown = present_engine(store.engines["host-1"], store, targets)
    assert shown.reason == f"t{why}"
    glance = glance_at(store, targets, "run")
    assert (glance.standing, glance.trouble) == (Standing.TROUBLED, f"T{why}")
