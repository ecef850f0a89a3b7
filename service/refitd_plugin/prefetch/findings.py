"""A prefetch worker's reply and its files, as what the rank's thread would have found by itself: in a few steps."""

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.inventory import Inventory, inventory_of
from refitd_client.checkpoint.strict_header import Header
from refitd_client.contract.naming import version_id
from refitd_client.validation.validate import Structure
from refitd_plugin.changes import DeltaChanges, DeltaHandle
from refitd_plugin.layout import COLUMNS, LaidOutDelta, PieceGroup, Placements
from refitd_plugin.prefetch import messages
from refitd_plugin.source import HeldFiles, VersionPlace, VersionSource, close_all


class MappedFile(Protocol):
    """A file in memory: `bytes` is a buffer of it, as long as the object lives."""

    bytes: Any


Mapper = Callable[[int, int], MappedFile]
"""Maps a file of some size, for reading."""


@dataclass(frozen=True, slots=True)
class KnownHeaders:
    """The headers of a version's files. The next one mostly has the same."""

    name: str
    headers: Mapping[str, Header]
    inventory: Inventory


class BufferLease:
    """Keeps buffers from being written again as long as it lives. `buffers` are their mappings by number."""

    def __init__(self, buffers: Mapping[int, MappedFile]) -> None:
        self.buffers = buffers


class MappedBuffers:
    """A prefetch worker's buffers, as its rank has mapped them. `mapper` may register them with a device as well."""

    def __init__(self, mapper: Mapper) -> None:
        self._mapper = mapper
        self._mapped: dict[int, MappedFile] = {}
        self._leases: WeakValueDictionary[int, BufferLease] = WeakValueDictionary()

    @property
    def busy(self) -> list[int]:
        """The buffers that are still used."""
        return list(self._leases)

    def forget(self) -> None:
        """Drop all mappings: another prefetch worker has other buffers."""
        self._mapped, self._leases = {}, WeakValueDictionary()

    def take(self, reply: messages.DeltaFound, files: Sequence[int]) -> BufferLease:
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


def layout_of(reply: messages.FullFound, known: KnownHeaders | None) -> KnownHeaders:
    """The headers of what was found. `known` are those of the last version."""
    if reply.headers is None:
        if known is None or known.name != reply.layout:
            raise ValueError("a prefetch worker left out headers that are not known")
        return known
    return KnownHeaders(reply.layout, reply.headers, inventory_of(reply.headers))


def full_version(
    place: VersionPlace, reply: messages.FullFound, files: Sequence[int], layout: KnownHeaders
) -> VersionSource:
    """A full version.

    Args:
        place: its folder.
        reply: what the worker found.
        files: its weight files, opened; they are closed when the version is collected.
        layout: the headers of its files.
    """
    held = HeldFiles(dict(zip(reply.names, files, strict=True)))
    seen = Structure(
        path=place.path,
        signature=reply.signature,
        files=reply.files,
        manifest=reply.manifest,
        has_manifest=reply.manifest is not None,
        headers=layout.headers,
        inventory=layout.inventory,
    )
    maps = {name: mmap.mmap(fd, reply.files[name].size, access=mmap.ACCESS_COPY) for name, fd in held.files.items()}
    return VersionSource(place=place, structure=seen, inventory=reply.inventory, maps=maps, held=held)


def delta_changes(
    place: VersionPlace,
    reply: messages.DeltaFound,
    files: Sequence[int],
    buffers: MappedBuffers,
    placements: Placements | None,
) -> DeltaChanges:
    """A delta.

    Args:
        place: its folder.
        reply: what the worker found.
        files: its file and its buffers, opened; they are closed here.
        buffers: the worker's buffers.
        placements: those that the worker laid it out by, where it did.
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


def _group(group: messages.PlacedGroup, lease: BufferLease) -> PieceGroup:
    table = np.frombuffer(group.table, np.int64).reshape(-1, COLUMNS)
    return PieceGroup(_array(group.indices, lease), _array(group.values, lease), table)


def _array(array: messages.BufferArray, lease: BufferLease) -> NDArray[Any]:
    return np.frombuffer(lease.buffers[array.buffer].bytes, np.dtype(array.dtype), array.count, array.begin)
