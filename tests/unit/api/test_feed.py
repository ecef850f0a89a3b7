"""The event stream: encoded once for all, nothing lost, and nobody buffered for without bound."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from refitd.api import log as feed_module
from refitd.api.log import PING, Feed, FellBehindError
from refitd.clock import SystemClock
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd_client.contract.wire import Event


@asynccontextmanager
async def store_at(folder: Path) -> AsyncIterator[Store]:
    """A store whose journal is written."""
    journal = Journal(folder)
    store = Store(journal, SystemClock())
    async with asyncio.TaskGroup() as group:
        writing = group.create_task(journal.run())
        try:
            yield store
        finally:
            writing.cancel()
    journal.close()


def say(store: Store, count: int) -> None:
    for number in range(count):
        store.say("engine", f"gpu-{number}", "UPDATING: loads run~v000001", state="UPDATING")


def numbers(frame: bytes) -> list[int]:
    """The events of a frame, by the number that each tells in its data; `id` has to say the same."""
    events = [part.split(b"\n") for part in frame.split(b"\n\n") if part and part != PING.strip()]
    told = [json.loads(lines[2].removeprefix(b"data: "))["seq"] for lines in events]
    assert told == [int(lines[1].removeprefix(b"id: ")) for lines in events]
    return told


async def until(feed: Feed, position: int, last: int) -> list[bytes]:
    """The frames that a watcher gets until it has seen event `last`."""
    frames: list[bytes] = []
    async with asyncio.timeout(10), aclosing(feed.watch(position)) as watching:
        async for frame in watching:
            frames.append(frame)
            if numbers(frame)[-1:] == [last]:
                return frames
    raise AssertionError


async def test_all_watchers_get_the_very_same_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []

    def counted(event: Event) -> bytes:
        encoded.append(event.seq)
        return real(event)

    real = feed_module.encode
    monkeypatch.setattr(feed_module, "encode", counted)
    async with store_at(tmp_path) as store:
        feed = Feed(store)
        async with asyncio.TaskGroup() as group:
            watching = [group.create_task(until(feed, 0, 30)) for _ in range(20)]
            await asyncio.sleep(0)
            say(store, 30)
        frames = [task.result() for task in watching]
        assert [number for frame in frames[0] for number in numbers(frame)] == list(range(1, 31))
        for others in frames[1:]:
            assert all(one is other for one, other in zip(frames[0], others, strict=True))
        assert encoded == list(range(1, 31))


async def test_what_comes_in_quick_succession_goes_out_together(tmp_path: Path) -> None:
    async with store_at(tmp_path) as store:
        feed = Feed(store)
        watching = asyncio.ensure_future(until(feed, 0, 200))
        await asyncio.sleep(0)
        for _ in range(20):
            say(store, 10)
            await asyncio.sleep(0)
        assert len(await watching) < 20


@pytest.mark.parametrize("position", [0, 1, 7, 15, 39, 40])
async def test_who_comes_back_misses_nothing_and_hears_nothing_twice(tmp_path: Path, position: int) -> None:
    """Wherever it stopped: before the frames that are kept, in the middle of one, or at the end."""
    async with store_at(tmp_path) as store:
        say(store, 15)
        await store.durable()
        feed = Feed(store)
        first = asyncio.ensure_future(until(feed, 15, 60))
        await asyncio.sleep(0)
        say(store, 25)
        async with asyncio.timeout(10):
            while not feed._frames:
                await store.changed.wait_after(store.changed.count, within=0.01)
        back = asyncio.ensure_future(until(feed, position, 60))
        await asyncio.sleep(0)
        say(store, 20)
        assert [number for frame in await back for number in numbers(frame)] == list(range(position + 1, 61))
        assert [number for frame in await first for number in numbers(frame)] == list(range(16, 61))


async def test_a_slow_watcher_is_dropped_and_not_buffered_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "KEPT_BYTES", 20_000)
    monkeypatch.setattr(feed_module, "FRAME_SECONDS", 0.0)
    async with store_at(tmp_path) as store:
        feed = Feed(store)
        async with aclosing(feed.watch(0)) as slow:
            first = asyncio.ensure_future(anext(slow))
            await asyncio.sleep(0)
            say(store, 1)
            assert numbers(await first) == [1]
            position = 1
            for _ in range(10):
                quick = asyncio.ensure_future(until(feed, position, position + 40))
                await asyncio.sleep(0)
                say(store, 40)
                await quick
                position += 40
                assert feed._bytes <= 20_000
            with pytest.raises(FellBehindError):
                await anext(slow)
        assert [number for frame in await until(feed, 1, position) for number in numbers(frame)] == list(
            range(2, position + 1)
        )


async def test_one_who_leaves_while_it_makes_the_frame_takes_it_from_nobody(tmp_path: Path) -> None:
    async with store_at(tmp_path) as store:
        feed = Feed(store)
        maker = asyncio.ensure_future(until(feed, 0, 5))
        other = asyncio.ensure_future(until(feed, 0, 5))
        for _ in range(3):
            await asyncio.sleep(0)
        maker.cancel()
        say(store, 5)
        assert [number for frame in await other for number in numbers(frame)] == [1, 2, 3, 4, 5]


async def test_a_silent_stream_says_that_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "PING_SECONDS", 0.01)
    async with store_at(tmp_path) as store:
        feed = Feed(store)
        async with aclosing(feed.watch(0)) as one, aclosing(feed.watch(0)) as other:
            assert await asyncio.gather(anext(one), anext(other)) == [PING, PING]
