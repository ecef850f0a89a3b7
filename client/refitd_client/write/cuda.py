"""Weights on a GPU into the files of a version, at the speed of the bus.

A recycled file on a tmpfs is mapped and registered with the driver once; from then on the GPU's copy engine writes into
the page cache itself. Other files are filled through two pinned buffers, one being copied while the other is written.

Nothing here makes a CUDA context: all is done in that of the GPU that a tensor lives on.
"""

import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from refitd_client.tensors import TensorSource
from refitd_client.write import cuda_driver
from refitd_client.write.version_folder import StagedShard

_CUDA_PIECE = 32 * 2**20

_log = logging.getLogger("refitd_client")


class DeviceCopies:
    """The copies of one publication, on a stream of their own on each GPU: they wait for what the trainer computes."""

    def __init__(self) -> None:
        self._torch: Any = sys.modules["torch"]
        self._streams: dict[str, Any] = {}
        self._there: dict[str, Any] = {}  # by device: the context in which its stream is used
        self._buffers: list[_Buffer] = []
        self._is_by_address = cuda_driver.has_driver()

    def copy(self, source: TensorSource, begin: int, end: int, file: StagedShard, offset: int) -> None:
        """Begin to copy bytes of a tensor into a file. The tensor must not change before `synchronize`.

        Args:
            source: the tensor.
            begin: its first byte to copy.
            end: the byte after the last.
            file: the file.
            offset: where the first byte goes.
        """
        stream = self._stream_of(source.place)
        with self._there[source.place]:
            mapped = file.mapped
            if mapped is not None and not mapped.register(partial(register, device=self._torch.device(source.place))):
                mapped = None  # the GPU cannot write into it by itself
            if mapped is not None and source.is_view and self._is_by_address:
                cuda_driver.copy("down", mapped.address + offset, source.address + begin, end - begin, stream)
                return
            with self._torch.cuda.stream(stream):  # a cast, too, is made and freed there
                flat = source.tensor().contiguous().view(-1).view(self._torch.uint8)[begin:end]
                if mapped is not None:
                    mapped.tensor[offset : offset + flat.numel()].copy_(flat, non_blocking=True)
                    return
                self._buffers = self._buffers or [_Buffer(self._torch), _Buffer(self._torch)]
                for start in range(0, flat.numel(), _CUDA_PIECE):
                    self._buffers.reverse()
                    self._buffers[0].take(flat[start : start + _CUDA_PIECE], file, offset + start)

    def mark(self) -> Callable[[], None]:
        """Return what waits until all copies that were begun have arrived. Partly filled buffers are written for it."""
        for buffer in self._buffers:
            buffer.flush()
        events: list[Any] = []
        for place, stream in self._streams.items():
            with self._there[place]:
                event = self._torch.cuda.Event(blocking=True)
                event.record(stream)
                events.append(event)

        def arrived() -> None:
            for event in events:
                event.synchronize()

        return arrived

    def synchronize(self) -> None:
        """Wait until all has arrived, and nothing is being written any more."""
        for stream in self._streams.values():
            stream.synchronize()

    def _stream_of(self, place: str) -> Any:
        if place not in self._streams:
            device = self._torch.device(place)
            stream = self._torch.cuda.Stream(device)
            stream.wait_stream(self._torch.cuda.current_stream(device))  # from here on this thread has a context
            self._streams[place] = stream
            is_current = device.index == self._torch.cuda.current_device()
            self._there[place] = nullcontext() if is_current else self._torch.cuda.device(device)
        return self._streams[place]


class _Buffer:
    """Pinned memory that a piece of a tensor goes through."""

    def __init__(self, torch: Any) -> None:
        self._memory = pinned(_CUDA_PIECE)
        self._torch = torch
        self._arrived: Any = None
        self._write: Callable[[], None] | None = None

    def take(self, piece: Any, file: StagedShard, offset: int) -> None:
        """Write the last piece to its file, then begin to copy this one, which goes to `offset` of `file`."""
        self.flush()
        memory = self._memory[: piece.numel()]
        memory.copy_(piece, non_blocking=True)
        self._arrived = self._torch.cuda.Event(blocking=True)  # a new one: the next piece may be another GPU's
        self._arrived.record()
        self._write = lambda: file.put(offset, memory.numpy())

    def flush(self) -> None:
        """Write the last piece to its file."""
        if self._write is not None:
            self._arrived.synchronize()
            self._write()
            self._write = None


def pinned(count: int) -> Any:
    """`count` bytes of page-locked host memory, as a torch tensor: a GPU copies to it without another buffer."""
    torch: Any = sys.modules["torch"]
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)


def is_direct(file: StagedShard) -> bool:
    """Whether the GPU wrote a tensor into the file by itself, as it will all others."""
    return file.mapped is not None and file.mapped.tensor is not None


def register(memory: Any, device: Any) -> tuple[Any, Callable[[], None]] | None:
    """Have the driver pin mapped memory, so that copies to it need no buffer.

    Returns a tensor over the memory and the function that undoes it, or None if the driver will not, as with too small
    a limit of locked memory. `device` is a GPU that a tensor is on.
    """
    torch: Any = sys.modules["torch"]
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    address = tensor.data_ptr()
    error = cuda_driver.pin(address, tensor.numel(), device.index)
    if error:
        _log.warning("memory cannot be registered with CUDA (error %d): copies to it go through a buffer", error)
        return None
    return tensor, partial(cuda_driver.unpin, address, device.index)
