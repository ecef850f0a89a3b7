"""A rank's GPU: copies of its tensors into the pages of a slot's files, along a stream of their own, and scans beside.

What is made for a copy, as a cast, is made and freed along that stream: its memory is used again only behind the copy.
"""

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

from refitd_client import tensors as torch_tensors
from refitd_client.files.durable import Mapped
from refitd_client.sharded.holdings import Holding
from refitd_client.sharded.slot_pieces import SlotPiece
from refitd_client.write import cuda
from refitd_client.write.cuda import register


def gpu_of(holdings: Mapping[str, Holding]) -> Any:
    """The one GPU that all of a rank's tensors are on; None where there is no such."""
    tensors = [each.tensor for each in holdings.values() if each.tensor.numel()]
    devices = {tensor.device for tensor in tensors}
    return devices.pop() if len(devices) == 1 and all(torch_tensors.on_gpu(tensor) for tensor in tensors) else None


class SlotGpu:
    """One publication's streams. Copies have arrived, and scans ended, when it is left."""

    def __init__(self, device: Any) -> None:
        """`device` is the GPU. What its current stream computes is waited for."""
        self._torch: Any = sys.modules["torch"]
        self._device = device
        self._is_by_address = cuda.has_driver()
        self._streams = [self._torch.cuda.Stream(device) for _ in range(2)]
        for stream in self._streams:
            stream.wait_stream(self._torch.cuda.current_stream(device))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams:
            stream.synchronize()

    @contextmanager
    def copying(self) -> Generator[None]:
        """The stream that copies go along, for this thread."""
        with self._torch.cuda.device(self._device), self._torch.cuda.stream(self._streams[0]):
            yield

    @contextmanager
    def scanning(self) -> Generator[None]:
        """The stream that scans go along, for this thread."""
        with self._torch.cuda.device(self._device), self._torch.cuda.stream(self._streams[1]):
            yield

    def copy(self, address: int, file: Mapped, piece: SlotPiece) -> None:
        """Begin to copy a piece of a part. In `copying`.

        Args:
            address: of the part's first byte on the GPU. What was made along this stream may be freed when this
                returns.
            file: the file.
            piece: which bytes of the part go where.
        """
        is_registered = file.register(partial(register, device=self._device))
        strip, source = piece.strip, address + piece.at
        if is_registered and self._is_by_address:
            if strip.rows == 1:
                cuda.copy("down", file.address + strip.begin, source, strip.width, self._streams[0])
            else:
                target = file.address + strip.begin
                cuda.copy_rows_down(target, strip.pitch, source, strip.width, strip.rows, self._streams[0])
            return
        from refitd_client.fingerprint.device import bits_at

        there = file.tensor if is_registered else self._torch.from_numpy(file.bytes)
        data = bits_at(source, strip.nbytes, 1, self._device).view(self._torch.uint8).view(strip.rows, strip.width)
        for row in range(strip.rows):
            begin = strip.begin + row * strip.pitch
            there[begin : begin + strip.width].copy_(data[row], non_blocking=is_registered)

    def mark(self) -> Callable[[], None]:
        """Return what waits until all copies that were begun have arrived."""
        event = self._torch.cuda.Event(blocking=True)
        event.record(self._streams[0])
        arrived: Callable[[], None] = event.synchronize
        return arrived
