"""Tensors in a file of shared memory, and the identity of this host. One file for all tensors.

It is to the CPU what `device` is to a GPU: the same offers, the same lock, the same transaction, other addresses.
"""

import mmap
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence, Set
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakSet

from refitd_client.checkpoint.header import BITS
from refitd_client.files.plain_file import open_plain
from refitd_client.tensors import TORCH_NAMES
from refitd_client.transport.ipc.offer import HostPlace, side_by_side


def host_name() -> str:
    """The kernel's name for this host. Containers with names of their own are hosts of their own."""
    return socket.gethostname()


def boot_id() -> str:
    """The kernel's random id of this boot (proc(5)). Empty where the kernel has none, as with gVisor."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        return ""


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
    """Where a tensor of `SharedTensors` lies, or a contiguous part of one.

    Raises:
        NotSharedError: it is none.
    """
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
        """A view of a tensor. Writes to it stay in this process.

        Args:
            place: where it lies.
            dtype: safetensors' name.
            shape: its shape.

        Raises:
            OSError: the file is gone, or may not be read.
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
    """A tensor in mapped memory.

    Args:
        memory: the mapping.
        offset: of the first byte.
        dtype: safetensors' name.
        shape: the tensor's.

    Raises:
        ValueError: it ends beyond the mapping.
    """
    torch: Any = sys.modules["torch"]
    kind, count = getattr(torch, TORCH_NAMES[dtype]), prod(shape)
    if offset + count * BITS[dtype] // 8 > len(memory):
        raise ValueError(f"{count} elements of {dtype} from byte {offset} on are more than the file has")
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=offset).reshape(shape)
