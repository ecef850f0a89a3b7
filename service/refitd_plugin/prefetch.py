"""Reading versions ahead, in a process beside each rank: the engine's loop never waits, and Python lets one thread run.

A thread beside that loop waits for the interpreter at each step. To look at a version's headers takes few. To digest
its bytes, and to lay a delta out for the model, takes thousands: so this process does it. It imports neither torch nor
an engine. Without a process the rank's thread reads.

The rank has a file without a name (memfd_create(2)) for a delta, and sends it with the order (SCM_RIGHTS, unix(7)). The
process puts the delta there, laid out, and says where. A rank with a GPU registers the file once, which takes longer
than to fill it, and uses it again for a later delta.

There is one reply to each order. The process ends when its rank does: the socket says so, and where a copy of the
rank's end lives on somewhere, its parent. `PrefetchWorker` is the process as its rank has it.
"""

import logging
import mmap
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from threading import Event, Lock
from typing import Any, Literal
from weakref import finalize

import msgspec
import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.inventory import Reference
from refitd_client.checkpoint.opening import ChangedError, FileStat, Folder, OpeningRefusedError
from refitd_client.contract.decoding import msgpack_decoder
from refitd_client.contract.manifest import Manifest
from refitd_client.contract.naming import DELTA_NAME, version_id
from refitd_client.files.plain_file import memory_file
from refitd_client.validation.contents import ReadingStoppedError
from refitd_client.validation.validate import Options
from refitd_plugin.delta.changes import DeltaChanges, DeltaHandle, most_memory, open_changes
from refitd_plugin.delta.layout import COLUMNS, LaidOutDelta, PieceGroup, PlacedTensor, Placements
from refitd_plugin.memory.source import (
    FullNeededError,
    SourceRefusedError,
    VersionPlace,
    open_version,
    reference_in,
)

_MOST_BYTES = 2**28  # of a message
_BODY_SECONDS = 30  # for a message that has begun to come
_LOOK_SECONDS = 5.0  # between two looks of the process at its parent
_TURN_SECONDS = 0.1  # between two looks of the rank at whether a version is still wanted
_STOP_REPLY_SECONDS = 5.0  # until a process that was told to stop has to reply
_BEGIN_AGAIN_SECONDS = 30.0  # between two beginnings: a process that dies at once costs a core
_BUFFER_STEP = 2**24  # bytes: buffers are multiples of it, so that one a little larger is not needed next time
logger = logging.getLogger("refitd_plugin")


class ReadOrder(msgspec.Struct, tag=True, kw_only=True):
    """Read all bytes of a full version, or a delta.

    `model` is the folder that full versions are held against, and that says how much memory a delta may take (empty: it
    cannot be found). A delta is laid out where the order `lays_out`: by these `placements`, or by the last ones.
    """

    root: str
    path: str
    model: str
    check_bytes: bool
    options: Options = Options()
    is_delta: bool = False
    lays_out: bool = False
    placements: dict[str, PlacedTensor] | None = None


class StopReading(msgspec.Struct, tag=True):
    """The reply to the order still comes."""


class FullRead(msgspec.Struct, tag=True, kw_only=True):
    """A full version is good, whose files look so from outside."""

    signature: str
    ms: float = 0.0


class StoredArray(msgspec.Struct, array_like=True):
    """Where an array lies in the buffer: its first byte, its length in elements, numpy's name of its type."""

    begin: int
    count: int
    dtype: str


class StoredGroup(msgspec.Struct, array_like=True):
    """As `refitd_plugin.delta.layout.PieceGroup`; `table` as it lies in memory."""

    indices: StoredArray
    values: StoredArray
    table: bytes


class DeltaRead(msgspec.Struct, tag=True, kw_only=True):
    """As `DeltaChanges`. `groups` are None where it was not laid out."""

    manifest: Manifest
    files: list[FileStat]
    results: dict[str, int]
    nbytes: int
    names: list[str]
    whole: list[bool]
    groups: list[StoredGroup] | None
    ms: float = 0.0


class Refusal(msgspec.Struct, tag=True):
    """The version cannot be loaded or looked at. `unable`: the process cannot say which, and the rank looks itself."""

    kind: Literal["refused", "full", "stopped", "unreadable", "unable"]
    reason: str = ""


Reply = FullRead | DeltaRead | Refusal
_ASKED: msgspec.msgpack.Decoder[ReadOrder | StopReading] = msgpack_decoder(ReadOrder | StopReading)
_REPLY: msgspec.msgpack.Decoder[Reply] = msgpack_decoder(Reply)


class BufferMemory:
    """Memory in a rank's buffer, one stretch after the other. The file grows where it has to."""

    def __init__(self, fd: int) -> None:
        self._fd, self._end = fd, 0
        self._stretches: list[tuple[int, NDArray[np.uint8]]] = []

    def memory(self, size: int) -> NDArray[np.uint8]:
        begin, room = self._end, -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._end += room
        if os.fstat(self._fd).st_size < self._end:
            os.ftruncate(self._fd, -(-self._end // _BUFFER_STEP) * _BUFFER_STEP)
        stretch = mmap.mmap(self._fd, room, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=begin)
        self._stretches.append((begin, np.frombuffer(stretch, np.uint8)))
        return self._stretches[-1][1][:size]

    def place(self, array: NDArray[Any]) -> StoredArray:
        """Where an array lies; one that lies elsewhere is copied to the buffer."""
        at = int(array.ctypes.data)
        for begin, stretch in self._stretches:
            inside = at - int(stretch.ctypes.data)
            if array.flags.c_contiguous and 0 <= inside < len(stretch):
                return StoredArray(begin + inside, len(array), array.dtype.str)
        there = self.memory(array.nbytes).view(array.dtype)
        there[:] = array
        return self.place(there)


class VersionReader:
    """Carries out orders. It keeps the models' headers and the last placements."""

    def __init__(self) -> None:
        self._references: dict[str, Reference] = {}
        self._placements: Placements | None = None

    def read(self, order: ReadOrder, buffer: int, stop: Event) -> Reply:
        """Carry out an order. Never raises. `buffer`: the descriptor of the rank's, for a delta."""
        began = time.perf_counter()
        self._placements = self._placements if order.placements is None else order.placements
        try:
            found = self._read_delta(order, BufferMemory(buffer)) if order.is_delta else self._read_full(order, stop)
        except FullNeededError as error:
            return Refusal("full", str(error))
        except SourceRefusedError as error:
            return Refusal("refused", str(error))
        except ReadingStoppedError:
            return Refusal("stopped")
        except OSError as error:
            return Refusal("unreadable", str(error))
        except Exception as error:
            return Refusal("unable", f"{type(error).__name__}: {error}")
        found.ms = round((time.perf_counter() - began) * 1000, 2)
        return found

    def _read_full(self, order: ReadOrder, stop: Event) -> FullRead:
        place, reference = VersionPlace(Path(order.root), order.path), self._reference(order.model)
        source = open_version(place, reference, order.options, check_bytes=order.check_bytes, stop=stop)
        return FullRead(signature=source.structure.signature)

    def _read_delta(self, order: ReadOrder, buffer: BufferMemory) -> DeltaRead:
        if order.lays_out and self._placements is None:
            raise LookupError("another process had the placements")
        reference = None
        with suppress(SourceRefusedError):
            reference = self._reference(order.model) if order.model else None
        changes = open_changes(
            VersionPlace(Path(order.root), order.path),
            check_bytes=order.check_bytes,
            allocate=buffer.memory,
            placements=self._placements if order.lays_out else None,
            most=most_memory(reference),
        )
        laid = changes.laid or LaidOutDelta((), (), ())
        groups = [
            StoredGroup(buffer.place(group.indices), buffer.place(group.values), group.table.tobytes())
            for group in laid.groups
        ]
        return DeltaRead(
            manifest=changes.manifest,
            files=list(changes.files),
            results=dict(changes.results),
            nbytes=changes.nbytes,
            names=list(laid.names),
            whole=list(laid.whole),
            groups=groups if order.lays_out else None,
        )

    def _reference(self, model: str) -> Reference:
        if model not in self._references:
            self._references[model] = reference_in(Path(model))
        return self._references[model]


class _Interrupted(Event):
    """Set where the rank has sent something while an order is carried out: it is to stop, or the rank is gone."""

    def __init__(self, line: Connection) -> None:
        super().__init__()
        self._line = line

    def is_set(self) -> bool:
        return self._line.poll(0)


def serve(line: Connection) -> None:
    """Carry out orders until the rank is gone; then the process ends."""
    reading, parent = VersionReader(), os.getppid()
    with suppress(OSError, EOFError, msgspec.MsgspecError):
        while os.getppid() == parent:
            if not line.poll(_LOOK_SECONDS):
                continue
            order = _ASKED.decode(line.recv_bytes(_MOST_BYTES))
            if isinstance(order, StopReading):  # of an order that had ended
                continue
            buffer = recv_handle(line) if order.is_delta else -1
            reply = reading.read(order, buffer, _Interrupted(line))
            if order.is_delta:
                os.close(buffer)
            line.send_bytes(msgspec.msgpack.encode(reply))
    os._exit(0)


def _line(end: socket.socket) -> Connection:
    """One end of the socket. A message that breaks off holds the other side up for some seconds."""
    for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", _BODY_SECONDS, 0))
    return Connection(end.detach())


Mapper = Callable[[int, int], Any]
"""Maps a file of some size, for reading: an object whose `bytes` are a buffer of it for as long as it lives."""


class PlainMapping:
    """A buffer where there is no device. The class is a `Mapper`."""

    def __init__(self, fd: int, size: int) -> None:
        self.bytes: Any = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)


class DeltaBuffer:
    """A file without a name, as its rank has it. `mapper` may register it with a device as well."""

    def __init__(self, mapper: Mapper) -> None:
        self.fd = memory_file("refitd-delta")
        finalize(self, os.close, self.fd)
        self._mapper, self._size, self._mapping = mapper, 0, None

    @property
    def bytes(self) -> Any:
        """Its memory, mapped anew where it has grown."""
        if (size := os.fstat(self.fd).st_size) != self._size:
            self._size, self._mapping = size, self._mapper(self.fd, size)
        return b"" if self._mapping is None else self._mapping.bytes


class BufferLease:
    """Keeps a buffer from being written again as long as this object lives. `free` are those without a lease."""

    def __init__(self, free: list[DeltaBuffer], mapper: Mapper) -> None:
        self.buffer = free.pop() if free else DeltaBuffer(mapper)
        finalize(self, free.append, self.buffer).atexit = False


def delta_changes(
    place: VersionPlace, reply: DeltaRead, lease: BufferLease, placements: Placements | None
) -> DeltaChanges:
    """A delta that the process has read. `placements`: those that it was laid out by.

    Raises:
        SourceRefusedError: its file is another one by now.
    """
    manifest, memory = reply.manifest, lease.buffer.bytes if reply.groups else b""
    label = version_id(manifest.run, manifest.order)
    try:
        with Folder(place.root, place.path) as folder, folder.open(DELTA_NAME, reply.files[1]) as fd:
            handle = DeltaHandle(fd, place, manifest.base or "", label)
    except (OpeningRefusedError, ChangedError) as error:
        raise SourceRefusedError(f"{place.folder} changed while it was looked at: {error}") from error

    def array(stored: StoredArray) -> NDArray[Any]:
        return np.frombuffer(memory, np.dtype(stored.dtype), stored.count, stored.begin)

    groups = [
        PieceGroup(array(each.indices), array(each.values), np.frombuffer(each.table, np.int64).reshape(-1, COLUMNS))
        for each in reply.groups or ()
    ]
    is_laid = reply.groups is not None
    return DeltaChanges(
        place=place,
        manifest=manifest,
        files=tuple(reply.files),
        handle=handle,
        results=reply.results,
        nbytes=reply.nbytes,
        placements=placements if is_laid else None,
        laid=LaidOutDelta(reply.names, reply.whole, groups) if is_laid else None,
        lease=lease,
    )


class PrefetchWorker:
    """At most one process. `generation` counts them: a new process has none of the state of the one before."""

    def __init__(self) -> None:
        self.generation = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None
        self._begun_at = -_BEGIN_AGAIN_SECONDS
        self._turn = Lock()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def begin(self) -> None:
        """Start the process, unless there is one or the last was started just now. Never raises."""
        with self._turn:
            if self._line is not None or time.monotonic() - self._begun_at < _BEGIN_AGAIN_SECONDS:
                return
            self._begun_at = time.monotonic()
            mine, its = socket.socketpair()
            with mine, its:
                try:
                    self._process = _process(its.fileno())
                    self._line, self.generation = _line(mine), self.generation + 1
                except OSError as error:
                    logger.warning("refitd reads versions in a thread, since no process can be begun: %s", error)

    def ask(self, order: ReadOrder, stop: Event, buffer: int = -1) -> Reply | None:
        """The reply; None where there is no process now. `buffer`: a descriptor, for a delta.

        Once `stop` is set the process stops reading, and replies that it did.
        """
        if not self._turn.acquire(blocking=False):
            return None
        try:
            return None if self._line is None else self._reply(self._line, order, stop, buffer)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            logger.warning("refitd has lost the process that reads for it, and reads in a thread: %s", error)
            self._end()
            return None
        finally:
            self._turn.release()

    def end(self) -> None:
        with self._turn:
            self._end()

    def _reply(self, line: Connection, order: ReadOrder, stop: Event, buffer: int) -> Reply:
        line.send_bytes(msgspec.msgpack.encode(order))
        if order.is_delta:
            send_handle(line, buffer, self.pid)
        told_at: float | None = None
        while not line.poll(_TURN_SECONDS):
            if stop.is_set() and told_at is None:
                line.send_bytes(msgspec.msgpack.encode(StopReading()))
                told_at = time.monotonic()
            if told_at is not None and time.monotonic() - told_at > _STOP_REPLY_SECONDS:
                raise TimeoutError("it does not stop")
        return _REPLY.decode(line.recv_bytes(_MOST_BYTES))

    def _end(self) -> None:
        process, line, self._process, self._line = self._process, self._line, None, None
        if line is not None:
            line.close()
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_REPLY_SECONDS)


def _process(line: int) -> subprocess.Popen[bytes]:
    """Start it in a session of its own: signals that a terminal sends to the server are not for it."""
    path = os.pathsep.join(dict.fromkeys(each for each in sys.path if each))
    return subprocess.Popen(  # noqa: S603 - this Python, and no words from outside
        [sys.executable, "-P", "-m", "refitd_plugin.prefetch", str(line)],
        pass_fds=[line],
        stdin=subprocess.DEVNULL,
        env=dict(os.environ) | {"PYTHONPATH": path},
        start_new_session=True,
    )


if __name__ == "__main__":  # `python -m refitd_plugin.prefetch FD`: a rank starts it with its end of a socket
    serve(_line(socket.socket(fileno=int(sys.argv[1]))))
