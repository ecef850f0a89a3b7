# pyright: basic
"""Memory of the host that a receiver's GPU reads and writes at the speed of the bus, and looks at what has arrived.

What is received over NCCL arrives on the GPU, and is copied from there. On an H200, for 3.09 GB, that took 180 ms into
pageable memory and 62 into this, and then the fingerprints 3 s by processors and 42 ms by the GPU, which had begun with
them meanwhile (docs/measurements.md).
"""

import logging
import mmap
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from refitd_client.fingerprint.batch import PROGRAMS_OVER_BUS, AddressScan
from refitd_client.fingerprint.device import flat_bits, whole_tensor
from refitd_client.fingerprint.tensors import Scan, has_triton
from refitd_client.transport.group.transfer import FlatLayout
from refitd_client.write.cuda import pin, unpin

_log = logging.getLogger("refitd_client")


class PinnedMemory:
    """Mapped memory, registered with the driver for the first GPU that this process sees."""

    def __init__(self, flat: Any) -> None:
        """Register it. Where the driver will not, as with a small limit of locked memory, it stays pageable.

        Args:
            flat: all of a mapping, as bytes.
        """
        pages = -(-flat.numel() // mmap.PAGESIZE) * mmap.PAGESIZE
        self._address = int(flat.data_ptr())
        error = pin(self._address, pages, 0)
        self.is_pinned = not error
        if error:
            _log.warning("the CUDA driver did not register %d bytes (error %d): they are received slowly", pages, error)

    def close(self) -> None:
        """End the registration, before the memory is unmapped."""
        if self.is_pinned:
            self.is_pinned = False
            unpin(self._address, 0)


class ArrivalScan:
    """Fingerprints of tensors in pinned memory, by the GPU: of each as soon as its last block has arrived."""

    def __init__(self, tensors: Sequence[Any], layout: FlatLayout, block: int) -> None:
        """Write down where they are.

        Args:
            tensors: in the layout's order. Their memory stays where it is.
            layout: where they lie in the bytes that arrive.
            block: the most bytes of a block.
        """
        ends = [end for _, end in layout.blocks(block)]
        self._of_block: list[list[int]] = [[] for _ in ends]
        places = zip(layout.offsets, layout.sizes, strict=True)
        for number, (offset, size) in enumerate(places):
            if size:
                self._of_block[bisect_left(ends, offset + size)].append(number)
        self._count, self._stream = len(tensors), torch.cuda.Stream()
        device = torch.device("cuda", torch.cuda.current_device())
        scan = partial(AddressScan, device=device, programs=PROGRAMS_OVER_BUS)
        self._scans = [
            scan([whole_tensor(at, flat_bits(tensors[number])) for at, number in enumerate(numbers)], len(numbers))
            for numbers in self._of_block
        ]
        self._begun: list[Any] = []

    @staticmethod
    def is_possible() -> bool:
        """Whether this torch has the kernel."""
        return has_triton()

    def restart(self) -> None:
        """Begin with another version."""
        self._stream.synchronize()
        self._begun = []

    def arrived(self, number: int) -> None:
        """Begin with the tensors that end in a block. Blocks come in turn, each when what this process's stream does
        next sees it.
        """
        if number < len(self._begun):
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._begun.append(self._scans[number].begin())

    def finish(self) -> list[Scan]:
        """Begin with the others, now that all has arrived, and wait for all. In the order of the tensors."""
        for number in range(len(self._scans)):
            self.arrived(number)
        self._stream.synchronize()
        found = [Scan(0, 0)] * self._count
        for numbers, results in zip(self._of_block, self._begun, strict=True):
            for number, each in zip(numbers, results(), strict=True):
                found[number] = each
        return found
