"""One server under two names is loaded by one entry; the other says which, and is left alone."""

import pytest

from refitd.engine.port import Process, Reached
from refitd.policy.contest import twin_of
from refitd_client.contract.states import EngineState
from support.records import engine

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
