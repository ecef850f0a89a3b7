"""A notifier wakes whoever waits."""

import asyncio

from refitd.clock import AT_A_TIME
from refitd.state.observer import Notifier


async def test_a_ring_between_a_look_and_the_wait_is_not_lost() -> None:
    notifier = Notifier()
    seen = notifier.count
    notifier.notify()
    assert await notifier.wait_after(seen) == 1


async def test_a_thousand_who_wait_leave_others_their_turns_of_the_loop() -> None:
    """Requests to the API come between engines that all go on at once; and each of these goes on, in order, once."""
    notifier, woken = Notifier(), list[int]()

    async def wait(number: int) -> None:
        assert await notifier.wait_after(0) == 1
        woken.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(1000):
            group.create_task(wait(number))
        await asyncio.sleep(0)
        notifier.notify()
        most = 0
        while len(woken) < 1000:
            before = len(woken)
            await asyncio.sleep(0)
            most = max(most, len(woken) - before)
    assert woken == list(range(1000))
    assert most <= AT_A_TIME


async def test_those_who_wait_again_while_others_are_being_woken_hear_of_the_next_ring() -> None:
    notifier, heard = Notifier(), dict[int, int]()

    async def wait(number: int) -> None:
        seen = 0
        while seen < 2:
            seen = await notifier.wait_after(seen)
            heard[number] = seen

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for number in range(100):
            group.create_task(wait(number))
        await asyncio.sleep(0)
        notifier.notify()
        await asyncio.sleep(0)
        notifier.notify()  # some have heard of the first alone, most of none
    assert set(heard.values()) == {2}


async def test_a_wait_has_an_end() -> None:
    assert await Notifier().wait_after(0, within=0.01) == 0
    assert await Notifier().wait_after(0, within=-1) == 0


async def test_a_cancellation_that_comes_together_with_a_ring_is_not_lost() -> None:
    notifier = Notifier()
    waiting = asyncio.create_task(notifier.wait_after(0, within=10))
    await asyncio.sleep(0)
    notifier.notify()
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
