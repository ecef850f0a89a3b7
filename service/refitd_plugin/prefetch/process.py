"""The process that reads for a rank: it takes one order at a time, and can be told meanwhile to stop reading.

It looks at a version as the rank's thread would, and sends what it found. What it reads of a delta goes to buffers that
rank and process both see: files without a name (memfd_create(2)), used again and again. A rank with a GPU registers a
buffer once, which takes longer than to fill it. What a rank still uses is never written.

It ends when its rank does: the socket says so, and where a copy of the rank's end lives on somewhere, its parent.
"""

import mmap
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from refitd_client.checkpoint.inventory import Reference
from refitd_client.checkpoint.opening import ChangedError, Folder, OpeningRefusedError
from refitd_client.contract.decoding import msgpack_decoder
from refitd_client.files.linux_calls import memory_file
from refitd_client.validation.contents import ReadingStoppedError
from refitd_client.validation.validate import Options
from refitd_plugin.changes import is_delta, most_memory, open_changes
from refitd_plugin.layout import LaidOutDelta
from refitd_plugin.prefetch import messages
from refitd_plugin.prefetch import messages as framed_socket
from refitd_plugin.prefetch.messages import MOST_FILES, BufferArray
from refitd_plugin.source import (
    FullNeededError,
    SourceRefusedError,
    VersionPlace,
    VersionSource,
    open_version,
    reference_in,
)

_BUFFER_STEP = 2**24  # bytes: buffers are multiples of it, so that one a little larger is not needed next time
_READER_LOOK_SECONDS = 5
_ASKED: msgspec.msgpack.Decoder[messages.WorkerMessage] = msgpack_decoder(messages.WorkerMessage)


@dataclass(frozen=True, slots=True, eq=False)
class SharedBuffer:
    """One buffer, as the prefetch worker has it."""

    number: int
    fd: int
    memory: NDArray[np.uint8] = field(repr=False)

    @property
    def address(self) -> int:
        """Its first byte, in this process."""
        return int(self.memory.ctypes.data)


class SharedBuffers:
    """All buffers of the prefetch worker."""

    def __init__(self) -> None:
        self._buffers: dict[int, SharedBuffer] = {}
        self._used: set[int] = set()
        self._last = 0

    def begin(self, busy: Collection[int]) -> None:
        """Begin with another order. `busy` are the buffers that the rank still uses."""
        self._used = set(busy)

    @property
    def numbers(self) -> list[int]:
        """The numbers of all buffers."""
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
        """The buffer of a number."""
        return self._buffers[number]


@dataclass(frozen=True, slots=True)
class ReadResult:
    """A reply, and the files that go with it: `own` are closed when they were sent."""

    reply: messages.Reply
    files: Sequence[int] = ()
    own: Sequence[int] = ()

    def close(self) -> None:
        """Close the files of this process: the rank has descriptors of its own."""
        for fd in self.own:
            os.close(fd)


class VersionReader:
    """Carries out orders. It keeps the models' headers, the last placements and its buffers."""

    def __init__(self) -> None:
        self._references: dict[str, Reference] = {}
        self._placements: tuple[int, messages.ReadOrder | None] = 0, None
        self._buffers = SharedBuffers()

    def read(self, order: messages.ReadOrder, stop: Event) -> ReadResult:
        """Carry out an order. Never raises."""
        began = time.perf_counter()
        if order.placements is not None:
            self._placements = order.along, order
        found = self._try_to_read(order, stop)
        if isinstance(found.reply, messages.FullFound | messages.DeltaFound):
            found.reply.ms = round((time.perf_counter() - began) * 1000, 2)
        return found

    def _try_to_read(self, order: messages.ReadOrder, stop: Event) -> ReadResult:
        try:
            if is_delta(f"{order.root}/{order.path}"):
                return self._read_delta(order)
            return self._read_full(order, stop)
        except FullNeededError as error:
            return ReadResult(messages.Refusal("full", str(error)))
        except SourceRefusedError as error:
            return ReadResult(messages.Refusal("refused", str(error)))
        except ReadingStoppedError:
            return ReadResult(messages.Refusal("stopped"))
        except OSError as error:
            return ReadResult(messages.Refusal("unreadable", str(error)))
        except Exception as error:
            return ReadResult(messages.Refusal("unable", f"{type(error).__name__}: {error}"))

    def _read_full(self, order: messages.ReadOrder, stop: Event) -> ReadResult:
        options = Options(
            allow_missing=order.allow_missing, allow_extra=order.allow_extra, allow_dtype_cast=order.allow_dtype_cast
        )
        place = VersionPlace(Path(order.root), order.path)
        source = open_version(place, self._reference(order.model), options, check_bytes=order.check_bytes, stop=stop)
        names = list(source.structure.headers)
        if len(names) > MOST_FILES:
            return ReadResult(messages.Refusal("unable", f"it has {len(names)} files"))
        layout = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(dict(source.structure.headers)))
        reply = messages.FullFound(
            signature=source.structure.signature,
            files=dict(source.structure.files),
            manifest=source.structure.manifest,
            inventory=source.inventory,
            layout=layout,
            headers=None if layout == order.layout else dict(source.structure.headers),
            names=names,
        )
        opened = _open_again(source, names)
        return ReadResult(reply, opened, opened)

    def _reference(self, model: str) -> Reference:
        if model not in self._references:
            self._references[model] = reference_in(Path(model))
        return self._references[model]

    def _read_delta(self, order: messages.ReadOrder) -> ReadResult:
        along, told = self._placements
        if order.along not in {0, along}:
            return ReadResult(messages.Refusal("unable", "it does not have these placements"))
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
            messages.PlacedGroup(
                self._buffers.place(group.indices), self._buffers.place(group.values), group.table.tobytes()
            )
            for group in laid.groups
        ]
        numbers = sorted({array.buffer for group in groups for array in (group.indices, group.values)})
        buffers = [self._buffers.of(number) for number in numbers]
        reply = messages.DeltaFound(
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
        for fd in fds:
            os.close(fd)
        if isinstance(error, OpeningRefusedError | ChangedError):
            raise SourceRefusedError(f"{source.place.folder} changed while it was looked at: {error}") from error
        raise
    return fds


class PrefetchProcess:
    """The process; `line` is its end of the socket."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._orders: queue.SimpleQueue[tuple[messages.ReadOrder, threading.Event]] = queue.SimpleQueue()
        self._reading = VersionReader()
        self._parent = os.getppid()

    def serve(self) -> None:
        """Serve until the rank is gone; then the process ends, whatever it does."""
        threading.Thread(target=self._work, name="refitd-prefetch", daemon=True).start()
        # For receiving alone: the other thread sends, however long that takes.
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _READER_LOOK_SECONDS, 0))
        stop = threading.Event()
        while (message := self._next()) is not None:
            match message:
                case messages.Stop():
                    stop.set()
                case messages.ReadOrder():
                    stop = threading.Event()
                    self._orders.put((message, stop))
        os._exit(0)

    def _next(self) -> messages.WorkerMessage | None:
        while os.getppid() == self._parent:
            try:
                return framed_socket.receive(self._line, _ASKED)[0]
            except TimeoutError:
                continue
            except framed_socket.LineLostError:
                return None
        return None

    def _work(self) -> None:
        while True:
            order, stop = self._orders.get()
            found = self._reading.read(order, stop)
            try:
                framed_socket.send(self._line, found.reply, found.files)
            except OSError:
                os._exit(0)
            finally:
                found.close()
