"""What a wait says of each engine of the run: its state, and the version that it serves."""

from typing import Any

import pytest

from refitd.explain.present import present_version
from refitd_client.contract.states import EngineState
from support.records import engine, version

WAITED_FOR = version(29, generation=2)


@pytest.mark.parametrize(
    ("of_engine", "serves", "step", "is_it"),
    [
        ({"serving": "run~v000029.g2"}, "run~v000029.g2", 29, True),
        ({"serving": "run~v000028.g2"}, "run~v000028.g2", 28, False),
        ({"serving": "run~v000029"}, "run~v000029", None, False),
        ({"serving": "other~v000029.g2"}, "other~v000029.g2", None, False),
        ({"serving": "run~v000029", "state": EngineState.UNREACHABLE}, None, None, False),
        ({"serving": "run~v000029.g2", "state": EngineState.UNREACHABLE}, None, None, False),
        ({"serving": None, "state": EngineState.QUARANTINED, "known": False}, None, None, False),
        ({"serving": None}, None, None, False),
    ],
    ids=["it", "older", "generation before", "other run", "down, before", "down", "unknown contents", "start-up"],
)
def test_an_engine_that_is_down_or_on_another_generation_shows_no_step_of_the_version_waited_for(
    of_engine: dict[str, Any], serves: str | None, step: int | None, is_it: bool
) -> None:
    record = engine("a", **of_engine)
    (on,) = present_version(WAITED_FOR, [record]).engines
    assert (on.state, on.version, on.step, on.serves) == (record.state, serves, step, is_it)
