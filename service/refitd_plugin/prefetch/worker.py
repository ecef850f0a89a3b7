"""A rank's prefetch process as the rank sees it: begun when a service is there, asked, stopped, begun again if lost.
Its replies and files become what the rank's thread would have found by itself, in a few steps.
"""

import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Event, Lock
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.inventory import inventory_of
from refitd_client.contract.decoding import msgpack_decoder
from refitd_client.contract.naming import version_id
from refitd_client.validation.validate import Structure
from refitd_plugin.delta.changes import DeltaChanges, DeltaHandle
from refitd_plugin.delta.layout import COLUMNS, LaidOutDelta, PieceGroup, Placements
from refitd_plugin.memory.source import HeldFiles, VersionPlace, VersionSource, close_all
from refitd_plugin.prefetch.process import (
    BufferArray,
    DeltaFound,
    FullFound,
    Line,
    LineLostError,
    PlacedGroup,
    ReadOrder,
    Reply,
    Stop,
)

Mapper = Callable[[int, int], Any]
"""Maps a file of some size, for reading: an object whose `bytes` are a buffer of it for as long as it lives."""


class BufferLease:
    """Keeps buffers from being written again as long as it lives. `buffers` are their mappings by number."""

    def __init__(self, buffers: Mapping[int, Any]) -> None:
        self.buffers = buffers


class MappedBuffers:
    """A prefetch worker's buffers, as its rank has mapped them. `mapper` may register them with a device as well."""

    def __init__(self, mapper: Mapper) -> None:
        self._mapper = mapper
        self._mapped: dict[int, Any] = {}
        self._leases: WeakValueDictionary[int, BufferLease] = WeakValueDictionary()

    @property
    def busy(self) -> list[int]:
        return list(self._leases)

    def forget(self) -> None:
        """Drop all mappings: another prefetch worker has other buffers."""
        self._mapped, self._leases = {}, WeakValueDictionary()

    def take(self, reply: DeltaFound, files: Sequence[int]) -> BufferLease:
        """Map the buffers that a delta lies in. `files` stay the caller's."""
        self._mapped = {number: buffer for number, buffer in self._mapped.items() if number in reply.kept}
        for (number, size), fd in zip(reply.buffers, files, strict=True):
            if number not in self._mapped:
                self._mapped[number] = self._mapper(fd, size)
        lease = BufferLease({number: self._mapped[number] for number, _ in reply.buffers})
        for number in lease.buffers:
            self._leases[number] = lease
        return lease


class PlainBuffer:
    """A buffer where there is no device. The class is a `Mapper`."""

    def __init__(self, fd: int, size: int) -> None:
        self.bytes: Any = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)


def full_version(place: VersionPlace, reply: FullFound, files: Sequence[int]) -> VersionSource:
    """A full version. `files`: its weight files, opened; they are closed when the version is collected."""
    held = HeldFiles(dict(zip(reply.headers, files, strict=True)))
    seen = Structure(
        path=place.path,
        signature=reply.signature,
        files=reply.files,
        manifest=reply.manifest,
        has_manifest=reply.manifest is not None,
        headers=reply.headers,
        inventory=inventory_of(reply.headers),
    )
    maps = {name: mmap.mmap(fd, reply.files[name].size, access=mmap.ACCESS_COPY) for name, fd in held.files.items()}
    return VersionSource(place=place, structure=seen, inventory=seen.inventory.digest, maps=maps, held=held)


def delta_changes(
    place: VersionPlace,
    reply: DeltaFound,
    files: Sequence[int],
    buffers: MappedBuffers,
    placements: Placements | None,
) -> DeltaChanges:
    """A delta. `files`: its file and its buffers, opened; they are closed here. `placements`: those that the worker
    laid it out by, where it did.
    """
    manifest, (file, *_) = reply.manifest, files
    try:
        handle = DeltaHandle(file, place, manifest.base or "", version_id(manifest.run, manifest.order))
        lease = buffers.take(reply, files[1:])
        groups = [_group(each, lease) for each in reply.groups]
    finally:
        close_all(files)
    is_laid = bool(reply.along) and placements is not None
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


def _group(group: PlacedGroup, lease: BufferLease) -> PieceGroup:
    table = np.frombuffer(group.table, np.int64).reshape(-1, COLUMNS)
    return PieceGroup(_array(group.indices, lease), _array(group.values, lease), table)


def _array(array: BufferArray, lease: BufferLease) -> NDArray[Any]:
    return np.frombuffer(lease.buffers[array.buffer].bytes, np.dtype(array.dtype), array.count, array.begin)


logger = logging.getLogger("refitd_plugin")

_TURN_SECONDS = 0.1  # between two looks at whether it is still wanted
_STOP_REPLY_SECONDS = 5.0  # until a prefetch worker that was sent a Stop has to reply
_BEGIN_AGAIN_SECONDS = 30.0  # between two beginnings: one that dies at once costs a core
_REPLY: msgspec.msgpack.Decoder[Reply] = msgpack_decoder(Reply)


class PrefetchWorker:
    """At most one process. `generation` counts them: a new process has none of the state of the one before."""

    def __init__(self) -> None:
        self.generation = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Line | None = None
        self._begun_at = -_BEGIN_AGAIN_SECONDS
        self._turn = Lock()

    def begin(self) -> None:
        """Start the process, unless there is one or the last was started just now. Never raises."""
        with self._turn:
            if self._line is not None or time.monotonic() - self._begun_at < _BEGIN_AGAIN_SECONDS:
                return
            self._begun_at = time.monotonic()
            try:
                self._spawn()
            except OSError as error:
                logger.warning("refitd reads versions in a thread, since no process can be begun: %s", error)

    def ask(self, order: ReadOrder, stop: Event) -> tuple[Reply, list[int]] | None:
        """The reply and the files that came with it, which are the caller's to close. None: there is no process now.

        Once `stop` is set the process stops reading, and replies that it did.
        """
        if not self._turn.acquire(blocking=False):
            return None
        try:
            return None if self._line is None else self._reply(self._line, order, stop)
        except (OSError, LineLostError) as error:
            logger.warning("refitd has lost the process that reads for it, and reads in a thread: %s", error)
            self._end()
            return None
        finally:
            self._turn.release()

    def end(self) -> None:
        with self._turn:
            self._end()

    @property
    def pid(self) -> int | None:
        """The process's id; None where there is none."""
        return None if self._process is None else self._process.pid

    def _spawn(self) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with its:
                self._process = _process(its.fileno())
        except BaseException:
            mine.close()
            raise
        self._line, self.generation = Line(mine), self.generation + 1

    def _reply(self, line: Line, order: ReadOrder, stop: Event) -> tuple[Reply, list[int]]:
        line.send(order)
        told_at: float | None = None
        while True:
            if (found := line.receive(_REPLY, _TURN_SECONDS)) is not None:
                return found
            if stop.is_set() and told_at is None:
                line.send(Stop())
                told_at = time.monotonic()
            if told_at is not None and time.monotonic() - told_at > _STOP_REPLY_SECONDS:
                raise LineLostError("it does not stop")

    def _end(self) -> None:
        process, line, self._process, self._line = self._process, self._line, None, None
        if line is not None:
            line.close()
        if process is not None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_REPLY_SECONDS)


def _process(line: int) -> subprocess.Popen[bytes]:
    """Start it in a session of its own: signals that a terminal sends to the server are not for it."""
    path = os.pathsep.join(dict.fromkeys(each for each in sys.path if each))
    return subprocess.Popen(  # noqa: S603 - this Python, and no words from outside
        [sys.executable, "-P", "-m", "refitd_plugin.prefetch.process", str(line)],
        pass_fds=[line],
        stdin=subprocess.DEVNULL,
        env=dict(os.environ) | {"PYTHONPATH": path},
        start_new_session=True,
    )
