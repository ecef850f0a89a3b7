"""Tensors on one GPU that are looked at again and again and are somebody else's: where they lie is written down, once.

As `batch.Batch`, but the tensors are not kept alive: whoever calls knows that they are there, and where they were.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from refitd_client.fingerprint.rows import Part, Rows, alike, whole
from refitd_client.fingerprint.tensors import Look, Scan, has_triton
from refitd_client.fingerprint.twin import flat_bits


class Placed:
    """Where tensors lie, as the kernel reads it. `of` makes one."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        """Waits for the current stream, so that any stream may follow."""
        self._count, self._device = len(parts), device
        self._lists = [Rows(each, device) for each in alike(parts)]
        torch.cuda.current_stream(device).synchronize()

    @classmethod
    def of(cls, looks: Sequence[Look]) -> "Placed | None":
        """None where a kernel cannot read them all as they lie on one GPU: then `scan` is the way."""
        if not looks or not has_triton() or len({look.tensor.device for look in looks}) > 1:
            return None
        if not all(_is_read_in_place(look.tensor) for look in looks):
            return None
        parts = [whole(number, flat_bits(look.tensor), look.rule) for number, look in enumerate(looks)]
        return cls(parts, looks[0].tensor.device)

    def begin(self) -> Callable[[], list[Scan]]:
        """As `tensors.begin_scan`."""
        from refitd_client.fingerprint import kernel

        out = torch.zeros((self._count, 2), dtype=torch.int64, device=self._device)
        for rows in self._lists:
            kernel.add_scan(rows, out)
        return lambda: _results(out)


def _results(out: Any) -> list[Scan]:
    prints, bad = out.cpu().numpy().T.copy()
    return [Scan(*each) for each in zip(prints.view(np.uint64).tolist(), bad.tolist(), strict=True)]


def _is_read_in_place(tensor: Any) -> bool:
    return bool(tensor.is_cuda and tensor.is_contiguous() and not tensor.is_neg())
