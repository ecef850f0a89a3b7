"""Reading versions ahead, in a process beside each rank: the engine's loop never waits, and Python lets one thread run.

A thread that reads a version beside that loop waits for the interpreter at every step, some thousands of times. So this
process reads: it looks at the folder as the rank's thread would, checks names, shapes, dtypes and digests, lays a delta
out for the model, and sends a message and open files. The rank's thread maps them, which are a few steps (`worker`).
It imports neither torch nor an engine. Without a process the thread reads.

It takes one order at a time, and can be told meanwhile to stop reading. Bytes of a delta go to buffers that rank and
process both see: files without a name (memfd_create(2)), used again and again. A rank with a GPU registers a buffer
once, which takes longer than to fill it. A buffer that a rank still uses is never written.

It ends when its rank does: the socket says so, and where a copy of the rank's end lives on somewhere, its parent.

There is one reply to each order. A message begins with the number of its files (4 bytes); they follow it with one byte
of their own (SCM_RIGHTS, unix(7)).
"""

import mmap
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.header import Header
from refitd_client.checkpoint.inventory import Reference
from refitd_client.checkpoint.opening import ChangedError, FileStat, Folder, OpeningRefusedError
from refitd_client.contract.decoding import msgpack_decoder
from refitd_client.contract.manifest import Manifest
from refitd_client.files.plain_file import memory_file
from refitd_client.validation.contents import ReadingStoppedError
from refitd_client.validation.validate import Options
from refitd_plugin.delta.changes import is_delta, most_memory, open_changes
from refitd_plugin.delta.layout import LaidOutDelta, PlacedTensor
from refitd_plugin.memory.source import (
    FullNeededError,
    SourceRefusedError,
    VersionPlace,
    VersionSource,
    close_all,
    open_version,
    reference_in,
)

MOST_FILES = 200  # the kernel takes 253 in a message
MOST_BYTES = 2**28
_BODY_SECONDS = 30
_FILES = struct.Struct("<I")


class ReadOrder(msgspec.Struct, tag=True, kw_only=True):
    """Look at a version.

    `model` is the folder that full versions are held against, and that says how much memory a delta may take (empty: it
    cannot be found); `busy` are the buffers that the rank still uses. `placements` come once, with the number that is
    named from then on in `along` (0: none).
    """

    root: str
    path: str
    model: str
    check_bytes: bool
    options: Options = Options()
    busy: list[int] = []
    placements: dict[str, PlacedTensor] | None = None
    along: int = 0


class Stop(msgspec.Struct, tag=True):
    """Stop reading. The reply to the order still comes."""


class FullFound(msgspec.Struct, tag=True, kw_only=True):
    """A full version. Its weight files come with it, opened, in the order of `headers`."""

    signature: str
    files: dict[str, FileStat]
    manifest: Manifest | None
    headers: dict[str, Header]
    ms: float = 0.0


class BufferArray(msgspec.Struct, array_like=True):
    """Where an array lies: its buffer's number, its first byte, its length in elements, numpy's name of its type."""

    buffer: int
    begin: int
    count: int
    dtype: str


class PlacedGroup(msgspec.Struct, array_like=True):
    """As `refitd_plugin.delta.layout.PieceGroup`; `table` as it lies in memory."""

    indices: BufferArray
    values: BufferArray
    table: bytes


class DeltaFound(msgspec.Struct, tag=True, kw_only=True):
    """A delta, laid out where placements were sent. Its file comes with it, and after it the buffers that groups lie in
    (number and size of each). `kept` are all buffers that there are.
    """

    manifest: Manifest
    files: list[FileStat]
    results: dict[str, int]
    nbytes: int
    along: int
    names: list[str]
    whole: list[bool]
    groups: list[PlacedGroup]
    buffers: list[tuple[int, int]]
    kept: list[int]
    ms: float = 0.0


class Refusal(msgspec.Struct, tag=True):
    """The version cannot be loaded or looked at. `unable`: the worker cannot say which, and the rank looks itself."""

    kind: Literal["refused", "full", "stopped", "unreadable", "unable"]
    reason: str = ""


WorkerMessage = ReadOrder | Stop


Reply = FullFound | DeltaFound | Refusal


class LineLostError(Exception):
    """The other side is gone, or what it sends is no message."""


class Line:
    """One end of the socket between rank and process, which closes with it."""

    def __init__(self, end: socket.socket) -> None:
        """Both sides wait for a message with `poll`: reading one that breaks off ends after some seconds."""
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _BODY_SECONDS, 0))
        self._socket, self._connection = end, Connection(os.dup(end.fileno()))

    def close(self) -> None:
        self._socket.close()
        self._connection.close()

    def send(self, message: Any, files: Sequence[int] = ()) -> None:
        """Send a message and open files. `files`: descriptors, which stay the caller's. Raises OSError: it is gone."""
        self._connection.send_bytes(_FILES.pack(len(files)) + msgspec.msgpack.encode(message))
        if files:
            socket.send_fds(self._socket, [b"\0"], files)

    def receive(self, decoder: msgspec.msgpack.Decoder[Any], within: float) -> tuple[Any, list[int]] | None:
        """The next message, and the files that came with it, the caller's to close; None: none began to come in time.

        Raises:
            LineLostError: the other side is gone, or what it sends is no message.
        """
        files: list[int] = []
        try:
            if not self._connection.poll(within):
                return None
            data = self._connection.recv_bytes(MOST_BYTES)
            (count,) = _FILES.unpack_from(data)
            if count:
                _, files, _, _ = socket.recv_fds(self._socket, 1, count)
            body = memoryview(data)[_FILES.size :] if len(files) == count else b""  # which is no message
            return decoder.decode(body), files
        except (OSError, EOFError, struct.error, msgspec.MsgspecError) as error:
            close_all(files)
            raise LineLostError(f"{error or 'the other side is gone'}") from error


_BUFFER_STEP = 2**24  # bytes: buffers are multiples of it, so that one a little larger is not needed next time
_READER_LOOK_SECONDS = 5
_ASKED: msgspec.msgpack.Decoder[WorkerMessage] = msgpack_decoder(WorkerMessage)


@dataclass(frozen=True, slots=True, eq=False)
class SharedBuffer:
    """One buffer, as the prefetch worker has it."""

    number: int
    fd: int
    memory: NDArray[np.uint8] = field(repr=False)

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)


class SharedBuffers:
    def __init__(self) -> None:
        self._buffers: dict[int, SharedBuffer] = {}
        self._used: set[int] = set()
        self._last = 0

    def begin(self, busy: Collection[int]) -> None:
        """Begin with another order. `busy` are the buffers that the rank still uses."""
        self._used = set(busy)

    @property
    def numbers(self) -> list[int]:
        return sorted(self._buffers)

    def memory(self, size: int) -> NDArray[np.uint8]:
        """Memory of `size` bytes, in a buffer that is not in use."""
        free = [buffer for number, buffer in self._buffers.items() if number not in self._used]
        fitting = [buffer for buffer in free if len(buffer.memory) >= size]
        if fitting:
            buffer = min(fitting, key=lambda buffer: len(buffer.memory))
        else:
            if free:  # the rank sees it as one that grew; smaller ones are for smaller arrays
                grown = max(free, key=lambda buffer: len(buffer.memory))
                os.close(self._buffers.pop(grown.number).fd)
            rounded = max(_BUFFER_STEP, -(-size // _BUFFER_STEP) * _BUFFER_STEP)
            fd = memory_file("refitd-delta")
            os.ftruncate(fd, rounded)
            self._last += 1
            mapping = mmap.mmap(fd, rounded, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            buffer = SharedBuffer(self._last, fd, np.frombuffer(mapping, np.uint8))
            self._buffers[buffer.number] = buffer
        self._used.add(buffer.number)
        return buffer.memory[:size]

    def place(self, array: NDArray[Any]) -> BufferArray:
        """Where an array lies; one that lies in no buffer is copied to one."""
        begin = int(array.ctypes.data)
        for buffer in self._buffers.values():
            if array.flags.c_contiguous and buffer.address <= begin < buffer.address + len(buffer.memory):
                return BufferArray(buffer.number, begin - buffer.address, len(array), array.dtype.str)
        there = self.memory(array.nbytes).view(array.dtype)
        there[:] = array
        return self.place(there)

    def of(self, number: int) -> SharedBuffer:
        return self._buffers[number]


@dataclass(frozen=True, slots=True)
class ReadResult:
    """A reply, and the files that go with it: `own` are closed when they were sent."""

    reply: Reply
    files: Sequence[int] = ()
    own: Sequence[int] = ()


class VersionReader:
    """Carries out orders. It keeps the models' headers, the last placements and its buffers."""

    def __init__(self) -> None:
        self._references: dict[str, Reference] = {}
        self._placements: tuple[int, ReadOrder | None] = 0, None
        self._buffers = SharedBuffers()

    def read(self, order: ReadOrder, stop: Event) -> ReadResult:
        """Carry out an order. Never raises."""
        began = time.perf_counter()
        if order.placements is not None:
            self._placements = order.along, order
        found = self._try_to_read(order, stop)
        if isinstance(found.reply, FullFound | DeltaFound):
            found.reply.ms = round((time.perf_counter() - began) * 1000, 2)
        return found

    def _try_to_read(self, order: ReadOrder, stop: Event) -> ReadResult:
        try:
            if is_delta(f"{order.root}/{order.path}"):
                return self._read_delta(order)
            return self._read_full(order, stop)
        except FullNeededError as error:
            return ReadResult(Refusal("full", str(error)))
        except SourceRefusedError as error:
            return ReadResult(Refusal("refused", str(error)))
        except ReadingStoppedError:
            return ReadResult(Refusal("stopped"))
        except OSError as error:
            return ReadResult(Refusal("unreadable", str(error)))
        except Exception as error:
            return ReadResult(Refusal("unable", f"{type(error).__name__}: {error}"))

    def _read_full(self, order: ReadOrder, stop: Event) -> ReadResult:
        place, reference = VersionPlace(Path(order.root), order.path), self._reference(order.model)
        source = open_version(place, reference, order.options, check_bytes=order.check_bytes, stop=stop)
        names = list(source.structure.headers)
        if len(names) > MOST_FILES:
            return ReadResult(Refusal("unable", f"it has {len(names)} files"))
        reply = FullFound(
            signature=source.structure.signature,
            files=dict(source.structure.files),
            manifest=source.structure.manifest,
            headers=dict(source.structure.headers),
        )
        opened = _open_again(source, names)
        return ReadResult(reply, opened, opened)

    def _reference(self, model: str) -> Reference:
        if model not in self._references:
            self._references[model] = reference_in(Path(model))
        return self._references[model]

    def _read_delta(self, order: ReadOrder) -> ReadResult:
        along, told = self._placements
        if order.along not in {0, along}:
            return ReadResult(Refusal("unable", "it does not have these placements"))
        placements = None if told is None or not order.along else told.placements
        self._buffers.begin(order.busy)
        place = VersionPlace(Path(order.root), order.path)
        reference = None
        with suppress(SourceRefusedError):
            reference = self._reference(order.model) if order.model else None
        changes = open_changes(
            place,
            check_bytes=order.check_bytes,
            allocate=self._buffers.memory,
            placements=placements,
            most=most_memory(reference),
        )
        laid = changes.laid or LaidOutDelta((), (), ())
        groups = [
            PlacedGroup(self._buffers.place(group.indices), self._buffers.place(group.values), group.table.tobytes())
            for group in laid.groups
        ]
        numbers = sorted({array.buffer for group in groups for array in (group.indices, group.values)})
        buffers = [self._buffers.of(number) for number in numbers]
        reply = DeltaFound(
            manifest=changes.manifest,
            files=list(changes.files),
            results=dict(changes.results),
            nbytes=changes.nbytes,
            along=order.along,
            names=list(laid.names),
            whole=list(laid.whole),
            groups=groups,
            buffers=[(buffer.number, len(buffer.memory)) for buffer in buffers],
            kept=self._buffers.numbers,
        )
        file = changes.handle.opened()
        return ReadResult(reply, [file, *(buffer.fd for buffer in buffers)], [file])


def _open_again(source: VersionSource, names: Sequence[str]) -> list[int]:
    """Open the weight files that were looked at once more."""
    fds: list[int] = []
    try:
        with Folder(source.place.root, source.place.path) as folder:
            for name in names:
                with folder.open(name, source.structure.files[name]) as fd:
                    fds.append(os.dup(fd))
    except BaseException as error:
        close_all(fds)
        if isinstance(error, OpeningRefusedError | ChangedError):
            raise SourceRefusedError(f"{source.place.folder} changed while it was looked at: {error}") from error
        raise
    return fds


class PrefetchProcess:
    """The process; `line` is its end of the socket."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._orders: queue.SimpleQueue[tuple[ReadOrder, threading.Event]] = queue.SimpleQueue()
        self._reading = VersionReader()
        self._parent = os.getppid()

    def serve(self) -> None:
        """Serve until the rank is gone; then the process ends, whatever it does."""
        threading.Thread(target=self._work, name="refitd-prefetch", daemon=True).start()
        stop = threading.Event()
        with suppress(LineLostError):
            while os.getppid() == self._parent:
                match self._line.receive(_ASKED, _READER_LOOK_SECONDS):
                    case (Stop(), _):
                        stop.set()
                    case (ReadOrder() as order, _):
                        stop = threading.Event()
                        self._orders.put((order, stop))
                    case _:
                        continue
        os._exit(0)

    def _work(self) -> None:
        while True:
            order, stop = self._orders.get()
            found = self._reading.read(order, stop)
            try:
                self._line.send(found.reply, found.files)
            except OSError:
                os._exit(0)
            finally:
                close_all(found.own)


if __name__ == "__main__":  # `python -m refitd_plugin.prefetch.process FD`: a rank starts it with its end of a socket
    PrefetchProcess(Line(socket.socket(fileno=int(sys.argv[1])))).serve()
