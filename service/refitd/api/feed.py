"""The event stream, made once for all its readers.

Events are gathered for up to 50 ms, read from the journal (so what is streamed is durable) and encoded into one frame,
which every reader is sent as it is. The newest frames are kept for readers that are a little behind; they are the only
buffer there is. A reader takes the next frame when it has taken the one before. One that has fallen behind the oldest
frame is dropped, and costs nothing more. It loses nothing either: it comes back with Last-Event-ID, and gets what it
missed from the journal at its own pace.

There is no task behind this: of the readers that wait for a frame, one makes it for all.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import sqlalchemy as sa

from refitd.state.journal import reads
from refitd.state.store import Store
from refitd_client.contract.wire import Event

FRAME_SECONDS = 0.05
FRAME_EVENTS = 1000
FRAME_BYTES = 2**18
ROWS = 100  # read at a time: they may be long
KEPT_FRAMES = 256
KEPT_BYTES = 4 * 2**20
PING_SECONDS = 15.0  # a comment as often as this tells both sides that the other is there

PING = b": ping\n\n"


class FellBehindError(Exception):
    """A reader has not taken frames that are no longer kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Events `first` to `last`, as they go out."""

    first: int
    last: int
    data: bytes


class Feed:
    """The newest frames, and the making of the next one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._frames: deque[Frame] = deque()
        self._bytes = 0
        self._last = 0
        self._made_at = 0.0
        self._watchers = 0
        self._turn = asyncio.Lock()

    async def watch(self, position: int) -> AsyncIterator[bytes]:
        """Yield what to send to a reader that has seen all events up to `position`, without end.

        Raises:
            FellBehindError: it takes them more slowly than they come.
            JournalError: the journal cannot be written now, so that nothing new is durable.
        """
        with self._watching():
            while position < self._oldest:  # it missed something, and gets it at its own pace
                await self._store.durable()
                frame = await self._read(position)
                position = frame.last
                yield frame.data
            while True:
                try:
                    async with asyncio.timeout(PING_SECONDS):
                        frame = await self._next(position)
                except TimeoutError:
                    yield PING
                    continue
                position = frame.last
                yield frame.data

    @contextmanager
    def _watching(self) -> Generator[None]:
        """Count a reader. Frames are made while there is one; older ones are of no use to one that comes later."""
        if self._watchers == 0:
            self._frames.clear()
            self._bytes = 0
            self._last = self._store.last_event
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1

    @property
    def _oldest(self) -> int:
        """A reader that has seen this event can be sent what follows from the frames."""
        return self._frames[0].first - 1 if self._frames else self._last

    async def _next(self, position: int) -> Frame:
        if position < self._oldest:
            raise FellBehindError
        while self._last <= position:
            async with self._turn:
                if self._last <= position:  # no other reader made it while this one waited for its turn
                    await self._make()
        # The frame with the event behind `position`. Most readers wait for the newest, so the search begins there.
        frame = next(frame for frame in reversed(self._frames) if frame.first <= position + 1)
        # A reader that caught up from the journal may have seen half of a frame.
        return frame if frame.first == position + 1 else await self._read(position)

    async def _make(self) -> None:
        seen = self._store.changed.count
        while self._store.last_event <= self._last:
            seen = await self._store.changed.wait_after(seen)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._made_at + FRAME_SECONDS - loop.time()))
        await self._store.durable()
        frame = await self._read(self._last)
        self._made_at = loop.time() if frame.last == self._store.last_event else 0.0  # what did not fit follows at once
        self._frames.append(frame)
        self._bytes += len(frame.data)
        self._last = frame.last
        while len(self._frames) > KEPT_FRAMES or (self._bytes > KEPT_BYTES and len(self._frames) > 1):
            self._bytes -= len(self._frames.popleft().data)

    async def _read(self, after: int) -> Frame:
        return await asyncio.to_thread(self._store.journal.read, lambda connection: _gather(connection, after))


def _gather(connection: sa.Connection, after: int) -> Frame:
    """Return the events behind `after`, as many as fit into one frame. Blocks."""
    data, last = bytearray(), after
    while last - after < FRAME_EVENTS:
        events = reads.read_events(connection, after=last, limit=ROWS)
        for event in events:
            data += encode(event)
            last = event.seq
            if len(data) >= FRAME_BYTES:
                break
        if len(events) < ROWS or len(data) >= FRAME_BYTES:
            break
    return Frame(first=after + 1, last=last, data=bytes(data))


def encode(event: Event) -> bytes:
    """Encode a server-sent event (WHATWG): its kind, the number that Last-Event-ID takes, and all of it in JSON."""
    return b"event: %b\nid: %d\ndata: %b\n\n" % (event.kind.encode(), event.seq, msgspec.json.encode(event))
