"""A clerk's reply and its files, as what the rank's thread would have found by itself: a few steps."""

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from refitd.catalog.evidence import Structure
from refitd.catalog.header import Header
from refitd.catalog.inventory import Inventory, inventory_of
from refitd_client.contract.naming import version_id
from refitd_sglang.ahead import letters
from refitd_sglang.changes import Changes
from refitd_sglang.held import Held, close_all
from refitd_sglang.kept import Kept
from refitd_sglang.laid import COLUMNS, Group, Laid, Ways
from refitd_sglang.source import Place, Source


class InMemory(Protocol):
    """A file in memory: `bytes` is a buffer of it, as long as the object lives."""

    bytes: Any


Mapper = Callable[[int, int], InMemory]
"""Maps a file of some size, for reading."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The headers of a version's files. The next one mostly has the same."""

    name: str
    headers: Mapping[str, Header]
    inventory: Inventory


class Lease:
    """Keeps rooms from being written again as long as somebody has it."""

    def __init__(self, rooms: Mapping[int, InMemory]) -> None:
        """`rooms` are their mappings by number."""
        self.rooms = rooms


class Rooms:
    """A clerk's rooms, as its rank has mapped them."""

    def __init__(self, mapper: Mapper) -> None:
        """None yet. `mapper` may register them with a device as well."""
        self._mapper = mapper
        self._mapped: dict[int, InMemory] = {}
        self._leases: WeakValueDictionary[int, Lease] = WeakValueDictionary()

    @property
    def busy(self) -> list[int]:
        """Those that are still used."""
        return list(self._leases)

    def forget(self) -> None:
        """Another clerk has others."""
        self._mapped, self._leases = {}, WeakValueDictionary()

    def take(self, reply: letters.Delta, files: Sequence[int]) -> Lease:
        """Map those that a delta lies in. `files` stay the caller's."""
        self._mapped = {number: room for number, room in self._mapped.items() if number in reply.kept}
        for (number, size), fd in zip(reply.rooms, files, strict=True):
            if number not in self._mapped:
                self._mapped[number] = self._mapper(fd, size)
        lease = Lease({number: self._mapped[number] for number, _ in reply.rooms})
        for number in lease.rooms:
            self._leases[number] = lease
        return lease


class Plain:
    """One where there is no device. It is a `Mapper` itself."""

    def __init__(self, fd: int, size: int) -> None:
        self.bytes: Any = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)


def layout_of(reply: letters.Whole, known: Layout | None) -> Layout:
    """The headers of what was found."""
    if reply.headers is None:
        if known is None or known.name != reply.layout:
            raise ValueError("a clerk left out headers that are not known")
        return known
    return Layout(reply.layout, reply.headers, inventory_of(reply.headers))


def whole(place: Place, reply: letters.Whole, files: Sequence[int], layout: Layout) -> Source:
    """A full version. It takes the files over."""
    held = Held(dict(zip(reply.names, files, strict=True)))
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
    return Source(place=place, structure=seen, inventory=reply.inventory, maps=maps, held=held)


def delta(place: Place, reply: letters.Delta, files: Sequence[int], rooms: Rooms, ways: Ways | None) -> Changes:
    """A delta. It takes the files over."""
    manifest, (file, *_) = reply.manifest, files
    try:
        kept = Kept(file, place, manifest.base or "", version_id(manifest.run, manifest.order))
        lease = rooms.take(reply, files[1:])
        groups = [_group(each, lease) for each in reply.groups]
    finally:
        close_all(files)
    is_laid = bool(reply.along) and ways is not None
    return Changes(
        place=place,
        manifest=manifest,
        files=tuple(reply.files),
        kept=kept,
        results=reply.results,
        nbytes=reply.nbytes,
        ways=ways if is_laid else None,
        laid=Laid(reply.names, reply.whole, groups) if is_laid else None,
        lease=lease,
    )


def _group(group: letters.Group, lease: Lease) -> Group:
    table = np.frombuffer(group.table, np.int64).reshape(-1, COLUMNS)
    return Group(_array(group.indices, lease), _array(group.values, lease), table)


def _array(array: letters.Array, lease: Lease) -> NDArray[Any]:
    return np.frombuffer(lease.rooms[array.room].bytes, np.dtype(array.dtype), array.count, array.begin)
