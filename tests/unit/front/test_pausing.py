"""The gate of the front: it holds back what comes while the trainer pauses, and not for ever."""

import asyncio

import pytest

from refitd_front.pausing import PauseGate

AT_ONCE = 0.001


async def passed(gate: PauseGate) -> None:
    async with gate.passing():
        pass


async def test_a_pause_lasts_as_long_as_an_update_is_under_way() -> None:
    asked: list[bool] = []

    def updating() -> bool:
        asked.append(True)
        return len(asked) < 3

    gate = PauseGate("http://a:1", updating, AT_ONCE)
    gate.close()
    await asyncio.wait_for(passed(gate), 10)
    assert len(asked) == 3


async def test_a_pause_that_the_trainer_ends_leaves_no_timer_to_the_next() -> None:
    gate = PauseGate("http://a:1", lambda: pytest.fail("the timer of an earlier pause"), AT_ONCE)
    gate.close()
    gate.open()
    await asyncio.sleep(10 * AT_ONCE)
    await passed(gate)
