"""Weights on a GPU into the files of a version, at the speed of the bus.

A recycled file on a tmpfs is mapped and registered with the driver once; from then on the GPU's copy engine writes into
the page cache itself. Other files are filled through two pinned buffers, one being copied while the other is written.

Nothing here makes a CUDA context: what is done is done in that of the GPU that a tensor lives on.
"""

import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from refitd_client.tensors.source import TensorSource
from refitd_client.write import bus, pinning
from refitd_client.write.staged_shard import StagedShard

_PIECE = 32 * 2**20

_log = logging.getLogger("refitd_client")


class DeviceCopies:
    """The copies of one publication, on a stream of their own on each GPU: they wait for what the trainer computes."""

    def __init__(self) -> None:
        """None yet."""
        self._torch: Any = sys.modules["torch"]
        self._streams: dict[str, Any] = {}
        self._there: dict[str, Any] = {}
        self._buffers: list[_Buffer] = []
        self._is_by_address = bus.has_driver()

    def copy(self, source: TensorSource, begin: int, end: int, file: StagedShard, offset: int) -> None:
        """Begin to copy bytes of a tensor to a place in a file. It must not change before `synchronize`."""
        stream = self._stream_of(source.place)
        with self._there[source.place]:
            mapped = file.mapped if self._is_registered(file, source.place) else None
            if mapped is not None and source.is_view and self._is_by_address:
                bus.copy("down", mapped.address + offset, source.address + begin, end - begin, stream)
                return
            with self._torch.cuda.stream(stream):  # a cast, too, is made and let go of there
                flat = source.tensor().contiguous().view(-1).view(self._torch.uint8)[begin:end]
                if mapped is not None:
                    mapped.tensor[offset : offset + flat.numel()].copy_(flat, non_blocking=True)
                else:
                    self._through_buffers(flat, file, offset)

    def mark(self) -> Callable[[], None]:
        """What waits until all copies that were begun have arrived. Partly filled buffers are written for it."""
        self._flush()
        events: list[Any] = []
        for place, stream in self._streams.items():
            with self._there[place]:
                event = self._torch.cuda.Event(blocking=True)
                event.record(stream)
                events.append(event)
        return lambda: _await(events)

    def synchronize(self) -> None:
        """Wait until all has arrived, and nothing is being written any more."""
        for stream in self._streams.values():
            stream.synchronize()

    def _is_registered(self, file: StagedShard, place: str) -> bool:
        """Whether a GPU writes into a file by itself. The first time, that takes registering it."""
        device = self._torch.device(place)
        return file.mapped is not None and file.mapped.register(lambda memory: register(memory, device))

    def _stream_of(self, place: str) -> Any:
        if place not in self._streams:
            device = self._torch.device(place)
            stream = self._torch.cuda.Stream(device)
            stream.wait_stream(self._torch.cuda.current_stream(device))  # from here on this thread has a context
            self._streams[place] = stream
            is_current = device.index == self._torch.cuda.current_device()
            self._there[place] = nullcontext() if is_current else self._torch.cuda.device(device)
        return self._streams[place]

    def _through_buffers(self, flat: Any, file: StagedShard, offset: int) -> None:
        if not self._buffers:
            self._buffers = [_Buffer(self._torch) for _ in range(2)]
        for begin in range(0, flat.numel(), _PIECE):
            self._buffers.reverse()
            self._buffers[0].take(flat[begin : begin + _PIECE], file, offset + begin)

    def _flush(self) -> None:
        for buffer in self._buffers:
            buffer.flush()


class _Buffer:
    """Pinned memory that a piece of a tensor goes through."""

    def __init__(self, torch: Any) -> None:
        self._memory = pinned(_PIECE)
        self._torch = torch
        self._arrived: Any = None
        self._write: Callable[[], None] | None = None

    def take(self, piece: Any, file: StagedShard, offset: int) -> None:
        """Write what is in it to its file, then begin to copy the next piece."""
        self.flush()
        memory = self._memory[: piece.numel()]
        memory.copy_(piece, non_blocking=True)
        self._arrived = self._torch.cuda.Event(blocking=True)  # a new one: the next piece may be another GPU's
        self._arrived.record()
        self._write = lambda: file.put(offset, memory.numpy())

    def flush(self) -> None:
        """Write what is in it."""
        if self._write is not None:
            self._arrived.synchronize()
            self._write()
            self._write = None


def pinned(count: int) -> Any:
    """Memory that a GPU copies to without a detour."""
    torch: Any = sys.modules["torch"]
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)


def is_direct(file: StagedShard) -> bool:
    """Whether a tensor from a GPU went into a file by itself, as all others will."""
    return file.mapped is not None and file.mapped.tensor is not None


def register(memory: Any, device: Any) -> tuple[Any, Callable[[], None]] | None:
    """Have the driver pin mapped memory, so that copies to it need no staging: a tensor over it, and what undoes it.

    `device` is a GPU that a tensor is on. None where the driver will not, as with too small a limit of locked memory.
    """
    torch: Any = sys.modules["torch"]
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    address = tensor.data_ptr()
    error = pinning.pin(address, tensor.numel(), device.index)
    if error:
        _log.warning("memory cannot be registered with CUDA (error %d): copies to it go through a buffer", error)
        return None
    return tensor, partial(pinning.unpin, address, device.index)


def _await(events: list[Any]) -> None:
    for event in events:
        event.synchronize()
