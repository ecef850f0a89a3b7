"""The trainer's memory, offered and as an engine sees it; tensors in shared memory; and the identity of this host.

`SharedTensors` are to the CPU what `device` is to a GPU: the same offers, the same lock, the same transaction, other
addresses. All tensors are in one file.
"""

import mmap
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import msgspec

from refitd_client.checkpoint.finite import Rule
from refitd_client.checkpoint.header import BITS
from refitd_client.files.plain_file import open_plain
from refitd_client.fingerprint import Scan, ScanInput, scan
from refitd_client.tensors import DTYPES, TORCH_NAMES
from refitd_client.transport import device
from refitd_client.transport.device import DeviceMemory
from refitd_client.transport.offer import (
    Allocation,
    DevicePlace,
    HostPlace,
    Offer,
    OfferedTensor,
    OfferLayout,
    OfferRefusedError,
    offer_with,
    side_by_side,
)

if TYPE_CHECKING:
    from refitd_client.fingerprint.batch import FixedScan


def host_name() -> str:
    """The kernel's name for this host. Containers with names of their own are hosts of their own."""
    return socket.gethostname()


def boot_id() -> str:
    """The kernel's random id of this boot (proc(5)). Empty where the kernel has none, as with gVisor."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        return ""


def own_address(other: str) -> str:
    """The address of this host from which another host is reached. Nothing is sent. Raises OSError: it has no address,
    or there is no way to it.
    """
    family, kind, _, _, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - names in it are random, and made exclusively
PREFIX = "refitd-"
_MADE: "WeakSet[SharedTensors]" = WeakSet()


class NotSharedError(RuntimeError):
    """A tensor lies in memory that only this process has."""


class SharedTensors:
    """Tensors that a trainer can export. `specs` maps names to (safetensors' dtype, shape); `flat` is all of it.

    The file's name begins with `refitd-` and `owner`. `laid` says where they begin, and the bytes of all; else they lie
    side by side.
    """

    def __init__(
        self,
        specs: Mapping[str, tuple[str, tuple[int, ...]]],
        folder: Path = SHARED_MEMORY,
        owner: str = "",
        laid: tuple[Sequence[int], int] | None = None,
    ) -> None:
        self.path = folder / f"{PREFIX}{owner}{secrets.token_hex(8)}"
        sizes = (prod(shape) * BITS[dtype] // 8 for dtype, shape in specs.values())
        offsets, size = side_by_side(sizes) if laid is None else laid
        self.places = {name: HostPlace(str(self.path), at) for name, at in zip(specs, offsets, strict=True)}
        fd = open_plain(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
        try:
            os.ftruncate(fd, max(size, 1))
            self._memory = mmap.mmap(fd, max(size, 1))
        finally:
            os.close(fd)
        views = {name: (self.places[name].offset, *spec) for name, spec in specs.items()}
        self.tensors = {name: view(self._memory, *each) for name, each in views.items()}
        self.flat = view(self._memory, 0, "U8", (len(self._memory),))
        self._begin = int(self.flat.data_ptr())
        _MADE.add(self)

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Where in the file some bytes at an address begin; None where they are elsewhere."""
        offset = address - self._begin
        return offset if 0 <= offset <= len(self._memory) - nbytes else None

    def close(self) -> None:
        """Unlink the file. The memory is freed with the last tensor."""
        self.path.unlink(missing_ok=True)
        _MADE.discard(self)


def place_of(tensor: Any) -> HostPlace:
    """Where a tensor of `SharedTensors` lies, or a contiguous part of one. Raises NotSharedError: it is none."""
    for made in _MADE:
        if (offset := made.offset_of(int(tensor.data_ptr()), tensor.nbytes)) is not None:
            return HostPlace(str(made.path), offset)
    if not tensor.nbytes:
        return HostPlace(os.devnull, 0)
    raise NotSharedError("it lies in this process's own memory: what is exported is on a GPU, or in SharedTensors")


def path_at(address: int) -> str | None:
    """The file of the `SharedTensors` that an address is in; None where it is in none."""
    return next((str(made.path) for made in _MADE if made.offset_of(address, 0) is not None), None)


class HostMemory:
    """Files of shared memory, opened once each, as the reader of an offer sees them."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def tensor(self, place: HostPlace, dtype: str, shape: tuple[int, ...]) -> Any:
        """A view of a tensor. Writes to it stay in this process. Raises OSError: the file is gone, or may not be read;
        ValueError: it is shorter than the tensor.
        """
        if not prod(shape):
            return sys.modules["torch"].empty(shape, dtype=getattr(sys.modules["torch"], TORCH_NAMES[dtype]))
        if place.path not in self._maps:
            fd = open_plain(place.path)
            try:
                self._maps[place.path] = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
            finally:
                os.close(fd)
        return view(self._maps[place.path], place.offset, dtype, shape)

    def keep(self, paths: Set[str]) -> None:
        """Close all others. Their memory is unmapped with the last view."""
        for path in self._maps.keys() - paths:
            del self._maps[path]


def view(memory: mmap.mmap, offset: int, dtype: str, shape: tuple[int, ...]) -> Any:
    """A tensor in mapped memory. Raises ValueError: it ends beyond the mapping."""
    torch: Any = sys.modules["torch"]
    kind, count = getattr(torch, TORCH_NAMES[dtype]), prod(shape)
    if offset + count * BITS[dtype] // 8 > len(memory):
        raise ValueError(f"{count} elements of {dtype} from byte {offset} on are more than the file has")
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=offset).reshape(shape)


class ImportedMemory:
    """The memory that one engine has opened. Kept from one offer to the next: a trainer's tensors seldom move."""

    def __init__(self) -> None:
        self._host, self._device = HostMemory(), DeviceMemory()

    def begin(self, layout: OfferLayout) -> None:
        """Close what this layout does not name. Nothing is opened yet. Raises OfferRefusedError: it is of another host,
        or from before a boot.
        """
        if (layout.host, layout.boot) != (host_name(), boot_id()):
            raise OfferRefusedError(f"the offer is of host {layout.host[:100]!a}, and this is {host_name()}")
        self.keep(layout)

    def tensors(self, offer: Offer) -> dict[str, Any]:
        """The tensors by name, in the offer's order. They are as offered while its lock is held. Raises
        OfferRefusedError: as `begin`; OSError, ValueError, DriverError: as `tensor`.
        """
        self.begin(offer.layout)
        return {each.name: self.tensor(each) for each in offer.layout.tensors}

    def tensor(self, tensor: OfferedTensor) -> Any:
        """A view of one tensor of a layout, after `begin`. Raises OSError, ValueError, DriverError: the memory is not
        there, or not as the offer says.
        """
        match tensor.place:
            case HostPlace() as place:
                return self._host.tensor(place, tensor.dtype, tensor.shape)
            case DevicePlace() as place:
                return self._device.tensor(place, tensor.dtype, tensor.shape)

    def addresses(self, ends: Mapping[Allocation, int], device: int) -> dict[Allocation, int]:
        """Where a GPU of this process sees allocations of a layout, after `begin`. `ends` are the bytes used of each.
        Raises DriverError: as `tensor`.
        """
        return self._device.addresses(ends, device)

    def keep(self, layout: OfferLayout | None) -> None:
        """Close what this layout does not name, or everything. Nothing may read there any more."""
        places = [] if layout is None else [piece.place for piece in layout.pieces]
        self._host.keep({place.path for place in places if isinstance(place, HostPlace)})
        self._device.keep({place.allocation for place in places if isinstance(place, DevicePlace)})


@dataclass(frozen=True, slots=True)
class _KnownLayout:
    """A layout, and what it holds for. `where` is name, address, dtype and shape of each tensor, `line` the layout as
    JSON. `memories` are the memories that the tensors lie in (a file's path or an allocation's number), by an address.
    """

    where: tuple[tuple[str, int, Any, Any], ...]
    layout: OfferLayout
    line: bytes
    memories: Mapping[int, int | str]


@dataclass(frozen=True, slots=True)
class PreparedOffer:
    """Tensors about to be offered. `scan` computes their fingerprints where they lie, and waits for them."""

    scan: Callable[[], list[Scan]]
    _known: _KnownLayout

    @property
    def layout(self) -> OfferLayout:
        """Where they lie: the same object as before where none of them has moved."""
        return self._known.layout

    def offer(self, version: str, fingerprints: Sequence[int]) -> Offer:
        return offer_with(self._known.layout, version, fingerprints, self._known.line)


class LayoutCache:
    """The layout of the tensors that were offered last: made anew only when one of them has moved."""

    def __init__(self) -> None:
        self._known: _KnownLayout | None = None
        self._fixed: tuple[_KnownLayout, FixedScan | None] | None = None

    def prepare(self, tensors: Mapping[str, Any], rules: Sequence[Rule]) -> PreparedOffer:
        """Describe tensors, to be scanned before they change. `tensors`: by name, all contiguous, as they are
        published. `rules`: their dtypes', for NaN and infinity; the same at each step. Raises DriverError,
        NotSharedError: the memory of one cannot be exported.
        """
        where = tuple((name, tensor.data_ptr(), tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        known = self._known
        # An address alone says nothing: memory may have been freed, and other memory be at its place.
        if known is None or known.where != where or any(_memory_at(at, it) != it for at, it in known.memories.items()):
            known = self._known = _described(tensors, where)
        inputs = [ScanInput(tensor, rule, True) for tensor, rule in zip(tensors.values(), rules, strict=True)]
        return PreparedOffer(partial(self._scan, known, inputs), known)

    def _scan(self, known: _KnownLayout, inputs: Sequence[ScanInput]) -> list[Scan]:
        from refitd_client.fingerprint.batch import FixedScan

        if self._fixed is None or self._fixed[0] is not known:
            self._fixed = known, FixedScan.of(inputs)
        fixed = self._fixed[1]
        return scan(inputs) if fixed is None else fixed.begin()()


def _described(tensors: Mapping[str, Any], where: tuple[tuple[str, int, Any, Any], ...]) -> _KnownLayout:
    offered: list[OfferedTensor] = []
    addresses: dict[int | str, int] = {}  # one for each memory
    for (name, address, _, _), tensor in zip(where, tensors.values(), strict=True):
        place = device.place_of(tensor) if tensor.device.type == "cuda" else place_of(tensor)
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        offered.append(OfferedTensor(name, dtype, tuple(tensor.shape), place))
        if tensor.nbytes:
            addresses.setdefault(place.path if isinstance(place, HostPlace) else place.serial, address)
    layout = OfferLayout(host=host_name(), boot=boot_id(), pid=os.getpid(), life=process_life(), tensors=tuple(offered))
    memories = {address: memory for memory, address in addresses.items()}
    return _KnownLayout(where, layout, msgspec.json.encode(layout), memories)


def _memory_at(address: int, known: int | str) -> int | str | None:
    """The memory of the same kind that is there now: a file, by its path, or an allocation, by its number."""
    return path_at(address) if isinstance(known, str) else device.serial_at(address)


class _ProcessLife:
    """A random text that no other process has, not even one with this one's pid in another container."""

    drawn = secrets.token_hex(8)

    @classmethod
    def draw(cls) -> None:
        cls.drawn = secrets.token_hex(8)


def process_life() -> str:
    return _ProcessLife.drawn


os.register_at_fork(after_in_child=_ProcessLife.draw)
