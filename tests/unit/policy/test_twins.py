"""One server under two names is loaded by one entry; the other says which, and is left alone."""

from pathlib import Path

import pytest

from refitd.engine.port import Process, Reached
from refitd.policy.contest import twin_of
from refitd_client.contract.states import EngineState
from support.fleets import running
from support.records import engine, version
from support.simulated_engine import SimulatedEngine

ONE = Process(seed=1, started="x")
ADDRESS = "localhost:30000"


def seen(address: str | None = ADDRESS, process: Process = ONE) -> Reached:
    return Reached(
        model_path="/base",
        weight_version="default",
        server_version="0.5.23",
        configuration="c",
        startup_path="/base",
        process=process,
        address=address,
    )


def test_the_second_name_of_a_server_names_the_first() -> None:
    first, second = (engine(name, address=ADDRESS, process=ONE) for name in ("a", "b"))
    told = twin_of(second, seen(), [first, second])
    assert told is not None
    assert "http://b" in told
    assert "a (http://a)" in told
    assert twin_of(first, seen(), [first, second]) is None


def test_the_name_that_a_server_is_loaded_by_already_stays_the_one() -> None:
    first, second = engine("b", address=ADDRESS, process=ONE, serving="v7"), engine("a", address=ADDRESS, process=ONE)
    assert twin_of(second, seen(), [first, second]) is not None
    assert twin_of(first, seen(), [first, second]) is None


@pytest.mark.parametrize(
    ("other", "reached"),
    [
        ({"address": "localhost:30001"}, seen()),  # another port
        ({"address": None}, seen()),  # not reached yet
        ({}, seen(address=None)),
        ({"state": EngineState.UNREACHABLE}, seen()),  # nobody knows where its name leads now
        ({"process": Process(seed=2)}, seen()),  # behind one proxy, as what they tell of themselves says
        ({"taken": "another service leads it"}, seen()),
    ],
)
def test_servers_that_are_not_one_are_both_loaded(other: dict[str, object], reached: Reached) -> None:
    first = engine("a", **{"address": ADDRESS, "process": ONE, **other})
    assert twin_of(engine("b"), reached, [first]) is None


async def test_a_server_that_is_named_twice_is_loaded_once_and_is_served(tmp_path: Path) -> None:
    server = SimulatedEngine()
    server.address, server.process = ADDRESS, ONE
    async with running(tmp_path, {"a": server, "b": server}) as stage:
        engines = stage.store.engines
        await stage.until(lambda: EngineState.CONTESTED in {each.state for each in engines.values()})
        stage.store.put_version(version(1))
        await stage.until(lambda: stage.store.versions[version(1).id].served_at is not None)
        second = engines["b:1"]
        assert (second.state, second.serving) == (EngineState.CONTESTED, None)
        assert "http://b:1" in (second.reason or "")
        assert "http://a:1" in (second.reason or "")
        assert server.loads == ["/root/run/v000001"]
        stage.fleet.resync("b:1")
        probes = server.probes
        await stage.until(lambda: server.probes > probes + 3)
        assert engines["b:1"].state is EngineState.CONTESTED
        assert len(server.loads) == 1
