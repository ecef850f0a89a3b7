# pyright: basic
"""The fingerprints of many tensors that stay where they are, computed again and again: on a GPU in one launch.

A launch for each of a model's hundreds of tensors takes longer than to read them. So the addresses of all tensors are
written down once, in lists of rows on the device (`rows.py`), and the kernel goes over these each time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from refitd_client.fingerprint.rows import Rows, TensorPart, grouped, whole_tensor
from refitd_client.fingerprint.tensors import Scan, ScanInput, fingerprints, has_triton
from refitd_client.fingerprint.torch_ops import flat_bits

PROGRAMS_OVER_BUS = 32  # that share the reading over a bus: as fast as hundreds, and little of the GPU


class AddressScan:
    """The addresses of tensors as the kernel reads them, on one GPU. The caller ensures that the memory is there."""

    def __init__(
        self, parts: Sequence[TensorPart], count: int, device: torch.device, programs: int | None = None
    ) -> None:
        """Write them down. Waits for the current stream, so that any stream may use it.

        Args:
            parts: the tensors, each whole or in parts.
            count: how many tensors there are, those without elements as well.
            device: the GPU that reads them.
            programs: as `kernel.add_scan`.
        """
        self._count, self._device, self._programs = count, device, programs
        self._lists = [Rows(each, device) for each in grouped(parts)]
        self._spare: Any = None  # results' memory, once it was read
        torch.cuda.current_stream(device).synchronize()

    def begin(self) -> Callable[[], list[Scan]]:
        """As `tensors.begin_scan`: along the current stream, which the next scan takes as well or waits for."""
        from refitd_client.fingerprint import kernel

        out, self._spare = self._spare, None
        if out is None:
            out = torch.zeros((self._count, 2), dtype=torch.int64, device=self._device)
        else:
            # Freed memory would be given back to the driver by SGLang's load, which empties torch's cache: that waits
            # for the GPU, in the pause, and so does asking for it again.
            out.zero_()
        for rows in self._lists:
            kernel.add_scan(rows, out, self._programs)

        def results() -> list[Scan]:
            prints, bad = out.cpu().numpy().T.copy()
            self._spare = out
            return [Scan(*each) for each in zip(prints.view(np.uint64).tolist(), bad.tolist(), strict=True)]

        return results


class FixedScan(AddressScan):
    """The addresses of torch tensors on one GPU. Tensors are not kept alive: the caller does that.

    `of` makes one.
    """

    def __init__(self, inputs: Sequence[ScanInput], device: torch.device) -> None:
        """Waits for the current stream, so that any stream may use it. All tensors are `_is_read_in_place`."""
        parts = [whole_tensor(number, flat_bits(each.tensor), each.rule) for number, each in enumerate(inputs)]
        super().__init__(parts, len(inputs), device)

    @classmethod
    def of(cls, inputs: Sequence[ScanInput]) -> "FixedScan | None":
        """None where a kernel cannot read all tensors in place on one GPU: use `scan` then."""
        if not inputs or len({each.tensor.device for each in inputs}) > 1:
            return None
        if not all(_is_read_in_place(each.tensor) for each in inputs):
            return None
        return cls(inputs, inputs[0].tensor.device)


@dataclass(frozen=True, slots=True)
class Begun:
    """Fingerprints under way: what waits for each device's, and those that were computed at once."""

    ends: Sequence[Callable[[], list[Scan]]]
    rest: Sequence[int]


class FingerprintBatch:
    """Tensors whose memory stays where it is. They are kept alive; their contents may change between calls."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        """Write down the addresses. Waits for each GPU's current stream, so that any stream may be used later."""
        self._tensors = list(tensors)
        groups: dict[Any, list[int]] = {}
        self._rest: list[int] = []
        for number, tensor in enumerate(self._tensors):
            (groups.setdefault(tensor.device, []) if _is_read_in_place(tensor) else self._rest).append(number)
        self._groups = [
            (numbers, FixedScan([ScanInput(self._tensors[number]) for number in numbers], device))
            for device, numbers in groups.items()
        ]

    def fingerprints(self) -> list[int]:
        """The fingerprints now, in order. Waits for each GPU once."""
        return self.end(self.begin())

    def begin(self) -> Begun:
        """Begin along each GPU's current stream. Does not wait for the GPU where kernels compute them."""
        ends = [scan.begin() for _, scan in self._groups]
        return Begun(ends, fingerprints(self._tensors[number] for number in self._rest))

    def end(self, begun: Begun) -> list[int]:
        """Wait for the GPUs. Returns the fingerprints in order."""
        found = dict(zip(self._rest, begun.rest, strict=True))
        for (numbers, _), end in zip(self._groups, begun.ends, strict=True):
            found |= {number: each.fingerprint for number, each in zip(numbers, end(), strict=True)}
        return [found[number] for number in range(len(self._tensors))]


def _is_read_in_place(tensor: Any) -> bool:
    return has_triton() and bool(tensor.is_cuda and tensor.is_contiguous() and not tensor.is_neg())
