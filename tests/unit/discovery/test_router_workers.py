"""What a router's list of workers becomes, and what happens when the router does not play along."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from refitd.api.health import faults_of
from refitd.clock import SystemClock
from refitd.discovery.place import PlaceRefusedError, Router, RouterToKeep, parse_router, refuse_both
from refitd.discovery.router_workers import Changes, ListedWorker, RouterKeeper, changes
from refitd.policy.traffic import Demand, Shut
from refitd.rollout.targets import Targets
from refitd.state.journal.journal import Journal
from refitd.state.observer import Observer
from refitd.state.store import Store
from refitd_client.contract.wire import Event
from support.records import engine, version
from support.scripted_server import Server, answer, serve

OUT, HELD = Shut("serves no version yet"), Shut("is being updated", passing=True)
A, B = engine("a:1"), engine("b:1")


def listed(url: str, id_: str = "1", kind: str = "regular") -> ListedWorker:
    return ListedWorker(id=id_, url=url, worker_type=kind)


def test_engines_come_onto_the_list_and_go_by_their_gates() -> None:
    assert changes([listed(B.url)], [A, B], {A.id: None, B.id: OUT}) == Changes(add=[A], remove=[("1", B)])
    assert changes([listed(A.url)], [A, B], {A.id: None, B.id: OUT}) == Changes()


def test_an_engine_that_holds_requests_itself_stays_where_it_is() -> None:
    assert changes([listed(A.url)], [A, B], {A.id: HELD, B.id: HELD}) == Changes()


def test_workers_that_are_no_engines_here_and_those_of_pairs_are_left_alone() -> None:
    others = [listed("http://c:1"), listed("grpc://a:1"), listed(A.url, "2", "prefill"), listed(B.url, "3", "decode")]
    assert changes(others, [A, B], {A.id: OUT, B.id: None}) == Changes()


def test_every_rank_of_an_engine_is_taken_off() -> None:
    ranks = [listed(f"{A.url}@{rank}", str(rank)) for rank in range(2)]
    assert changes(ranks, [A], {A.id: OUT}) == Changes(remove=[("0", A), ("1", A)])
    assert changes(ranks, [A], {A.id: None}) == Changes()


def test_a_router_is_written_with_what_its_workers_have_to_serve() -> None:
    text = "sglang-router+http://r:1?run=exp/trial&max_behind=2&key_file=/k&worker_key_file=/w"
    demand = Demand(run="exp/trial", max_behind=2)
    kept = RouterToKeep(router=Router("http://r:1", Path("/k")), demand=demand, worker_key=Path("/w"))
    assert parse_router(text) == kept
    assert parse_router("sglang-router+http://r:1").demand == Demand(run=None, max_behind=0)


@pytest.mark.parametrize(
    "text",
    [
        "http://r:1",
        "sglang-router+r:1",
        "sglang-router+http://r:1?max_behind=-1",
        "sglang-router+http://r:1?max_behind=two",
        "sglang-router+http://r:1?run=../x",
        "sglang-router+http://r:1?key_file=relative",
        "sglang-router+http://r:1?steps=1",
    ],
)
def test_what_is_no_router_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(PlaceRefusedError, match=r"write sglang-router\+http://HOST:PORT"):
        parse_router(text)


def test_a_router_that_is_kept_is_no_place_to_find_engines() -> None:
    kept = ["sglang-router+http://r:1?max_behind=1"]
    refuse_both(["sglang-router+http://other:1", "dns:x?port=1"], kept)
    with pytest.raises(ValueError, match="--router and --discover name http://r:1"):
        refuse_both(["sglang-router+http://r:1/"], kept)


@asynccontextmanager
async def keeping(tmp_path: Path, router: Server, *, named: bool = True, **kept: Any) -> AsyncIterator[Store]:
    """A service with an engine that serves its target, and one that is new."""
    journal = Journal(tmp_path / "state")
    store = Store(journal, SystemClock())
    targets = Targets(store)
    store.put_version(version(1, served_at="2026-01-01T00:00:00Z"))
    for each in (engine("a:1", serving=version(1).id), engine("b:1")):
        store.put_engine(each)
    kept_router = RouterToKeep(router=Router(router.url), demand=Demand(max_behind=0), **kept)
    keeper = RouterKeeper(kept_router, store, targets, lambda _: named)
    task = asyncio.create_task(keeper.run())
    try:
        yield store
    finally:
        task.cancel()
        await asyncio.wait({task})
        journal.close()


class Told(Observer):
    """What the log says of the router, and when both changes are in it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.both = asyncio.Event()

    def decided(self, event: Event) -> None:
        if "requests" in event.text:
            self.texts.append(event.text)
        if len(self.texts) == 2:
            self.both.set()


class OfRouters(Observer):
    """Entries about routers, when two of them are there, and the fault that the store had at the first."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.events: list[Event] = []
        self.fault: str | None = None
        self.both = asyncio.Event()

    def decided(self, event: Event) -> None:
        if event.kind == "router":
            self.events.append(event)
            self.fault = self.fault or faults_of(self.store, None).routers
        if len(self.events) == 2:
            self.both.set()


async def test_the_router_gets_the_workers_key_and_the_log_says_what_was_done(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("of-the-engines\n")
    workers, told = {"workers": [{"id": "7", "url": B.url}]}, Told()
    with serve(answer(200, workers), answer(202, {}), answer(202, {}), answer(200, workers)) as router:
        async with keeping(tmp_path, router, worker_key=tmp_path / "key") as store:
            store.observe(told)
            async with asyncio.timeout(10):
                await told.both.wait()
    ours = f"({router.url})"
    assert told.texts == [f"gets requests {ours}", f"gets no more requests: it serves no version yet {ours}"]
    _, added, removed = router.seen[:3]
    assert (added.method, added.path) == ("POST", "/workers")
    assert added.body == b'{"url":"http://a:1","api_key":"of-the-engines"}'
    assert (removed.method, removed.path) == ("DELETE", "/workers/7")


async def test_no_key_goes_to_an_engine_that_the_operator_did_not_name(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("of-the-engines\n")
    with serve(answer(200, {"workers": []}), answer(202, {}), answer(200, {"workers": []})) as router:
        async with keeping(tmp_path, router, named=False, worker_key=tmp_path / "key"):
            await router.until("/workers", 2)
    assert [seen.body for seen in router.seen if seen.method == "POST"] == [b'{"url":"http://a:1"}']


@pytest.mark.parametrize("step", [answer(500), answer(200, {"workers": 7}), answer(200, b"<html>")])
async def test_a_router_that_cannot_be_read_is_asked_again_and_told_nothing(
    tmp_path: Path, step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refitd.discovery.router_workers.LOOK_EVERY_SECONDS", 0.01)
    with serve(step) as router:
        async with keeping(tmp_path, router):
            await router.until("/workers", 3)
    assert {seen.method for seen in router.seen} == {"GET"}


async def test_a_router_that_cannot_be_reached_is_a_fault_of_the_service_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning however long it lasts, though the reason changes, and one entry when it is over."""
    monkeypatch.setattr("refitd.discovery.router_workers.LOOK_EVERY_SECONDS", 0.01)
    workers = {"workers": [{"id": "7", "url": A.url}]}
    with serve(answer(500), answer(200, b"<html>"), answer(200, workers)) as router:
        async with keeping(tmp_path, router) as store:
            said = OfRouters(store)
            store.observe(said)
            async with asyncio.timeout(10):
                await said.both.wait()
            assert faults_of(store, None).routers is None
    begun, over = said.events
    assert (begun.severity, over.severity) == ("warning", "info")
    assert begun.text.startswith(f"the workers of router {router.url} are not kept current: /workers was answered 500")
    assert begun.text == said.fault
    assert over.text == f"the workers of router {router.url} are kept current again"
