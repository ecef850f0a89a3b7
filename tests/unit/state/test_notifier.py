"""A notifier wakes whoever waits."""

import asyncio

from refitd.state.observer import Notifier


async def test_a_ring_between_a_look_and_the_wait_is_not_lost() -> None:
    notifier = Notifier()
    seen = notifier.count
    notifier.notify()
    assert await notifier.wait_after(seen) == 1


async def test_everyone_who_waits_is_woken() -> None:
    notifier = Notifier()
    async with asyncio.TaskGroup() as group:
        waits = [group.create_task(notifier.wait_after(0)) for _ in range(3)]
        await asyncio.sleep(0)
        notifier.notify()
    assert [wait.result() for wait in waits] == [1, 1, 1]


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
