"""Of many tasks that could go on, a few do so in each turn of the loop: those first whose engine is paused."""

import asyncio
from collections.abc import Awaitable, Callable

from refitd.clock import AT_A_TIME, in_turn_to_pause, my_turn

MANY = 200


async def most_in_one_turn(passed: list[str], count: int) -> int:
    """How many of `count` tasks passed in one turn of the loop at most."""
    most = 0
    async with asyncio.timeout(10):
        while len(passed) < count:
            before = len(passed)
            await asyncio.sleep(0)
            most = max(most, len(passed) - before)
    return most


def passing(passed: list[str], name: str) -> Callable[[], Awaitable[None]]:
    async def go() -> None:
        await my_turn()
        passed.append(name)

    return go


async def test_many_pass_a_few_at_a_time_in_the_order_in_which_they_came() -> None:
    passed: list[str] = []
    async with asyncio.TaskGroup() as group:
        for number in range(MANY):
            group.create_task(passing(passed, str(number))())  # type: ignore[arg-type]
        most = await most_in_one_turn(passed, MANY)
    assert passed == [str(number) for number in range(MANY)]
    assert most <= 2 * AT_A_TIME  # those that found the turn free, and those that it let pass


async def test_a_few_do_not_wait() -> None:
    """As many as have a turn of the loop pass in it; and so in each later one."""
    for _ in range(3):
        turns: list[int] = []
        counting = asyncio.get_running_loop().call_soon(turns.append, 1)
        for _ in range(AT_A_TIME):
            await my_turn()
        assert turns == []
        counting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_what_is_done_for_a_paused_engine_passes_all_that_waits() -> None:
    passed: list[str] = []

    async def paused(name: str) -> None:
        async with in_turn_to_pause():
            await asyncio.gather(passing(passed, name)(), passing(passed, name)())  # in tasks of its own too

    async with asyncio.TaskGroup() as group:
        group.create_task(paused("paused"))
        for number in range(MANY):
            group.create_task(passing(passed, str(number))())  # type: ignore[arg-type]
        await asyncio.sleep(0)
        group.create_task(passing(passed, "last")())  # type: ignore[arg-type]
        await most_in_one_turn(passed, MANY + 3)
    assert passed.index("paused") < 5 * AT_A_TIME
    assert passed.count("paused") == 2
    assert passed[-1] == "last"


async def test_one_that_is_cancelled_while_it_waits_costs_the_others_no_turn() -> None:
    passed: list[str] = []
    tasks = [asyncio.ensure_future(passing(passed, str(number))()) for number in range(MANY)]
    await asyncio.sleep(0)
    for task in tasks[10:-1]:
        task.cancel()
    async with asyncio.timeout(10):
        await asyncio.wait(tasks)
    assert passed == [*map(str, range(10)), str(MANY - 1)]


async def test_engines_that_are_paused_are_through_before_others_are_paused() -> None:
    """Else each of a thousand engines stands still for as long as all of them take together."""
    paused, most = 0, 0

    async def engine() -> None:
        nonlocal paused, most
        async with in_turn_to_pause():
            paused += 1
            most = max(most, paused)
            for _ in range(5):  # calls
                await my_turn()
                await asyncio.sleep(0)
            paused -= 1

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for _ in range(MANY):
            group.create_task(engine())
    assert paused == 0
    assert most <= 4 * AT_A_TIME
