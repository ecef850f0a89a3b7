# pyright: basic
"""What parts of tensors add to the tensors' fingerprints, wherever the parts lie.

A fingerprint is a sum over all elements, so what several processes find in their parts adds up to the fingerprint of
the whole, without any of them having it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from refitd_client.checkpoint.finite import NO_RULE, Rule
from refitd_client.fingerprint import host
from refitd_client.fingerprint.tensors import Scan, has_triton

_AT_ONCE = 2**22  # elements whose indices are there at a time: they take 32 MiB, and what is made of them as much again
_LONG = 2**16  # elements of a run from which on the kernel, or numpy's faster way, is worth its start


@dataclass(frozen=True, slots=True)
class ElementRows:
    """`rows` rows of `width` elements, which begin at flat index `begin` of the tensor, `pitch` elements apart."""

    begin: int
    width: int
    rows: int = 1
    pitch: int = 0

    @property
    def count(self) -> int:
        """How many elements."""
        return self.width * self.rows


@dataclass(frozen=True, slots=True)
class PartInput:
    """Elements of one tensor, and where they belong. `bits` are integers of their width, in the order of `rows`."""

    bits: Any
    rows: Sequence[ElementRows]
    rule: Rule = NO_RULE


def part_scans(parts: Sequence[PartInput]) -> list[Scan]:
    """What each part adds to its tensor's fingerprint, and how many of its elements are NaN or infinite, in order.

    Waits for the GPU once for all parts that lie on it.
    """
    on_gpu = [number for number, part in enumerate(parts) if part.bits.device.type != "cpu"]
    found = dict(zip(on_gpu, _on_device([parts[number] for number in on_gpu]), strict=True)) if on_gpu else {}
    return [found[number] if number in found else _in_host_memory(part) for number, part in enumerate(parts)]


def _in_host_memory(part: PartInput) -> Scan:
    bits = part.bits.numpy().view(f"u{part.bits.element_size()}")
    total = at = 0
    for rows in part.rows:
        total += _share(bits[at : at + rows.count], rows)
        at += rows.count
    mask, pattern = part.rule
    bad = 0 if part.rule == NO_RULE else int(np.count_nonzero((bits & bits.dtype.type(mask)) == pattern))
    return Scan(total & host.MASK, bad)


def _share(bits: host.Bits, rows: ElementRows) -> int:
    """What some rows add."""
    if rows.rows == 1 and rows.width >= _LONG:
        head = -rows.begin % host.ROW
        first = np.arange(rows.begin, rows.begin + head, dtype=np.uint64)
        return host.share(first, bits[:head]) + host.fingerprint(bits[head:], first=rows.begin + head)
    total, some = 0, max(1, _AT_ONCE // rows.width)
    for row in range(0, rows.rows, some):
        count = min(some, rows.rows - row)
        indices = (rows.begin + (row + np.arange(count, dtype=np.uint64))[:, None] * np.uint64(rows.pitch)) + np.arange(
            rows.width, dtype=np.uint64
        )
        total += host.share(indices.reshape(-1), bits[row * rows.width : (row + count) * rows.width])
    return total


def _on_device(parts: Sequence[PartInput]) -> list[Scan]:
    import torch

    from refitd_client.fingerprint.batch import AddressScan
    from refitd_client.fingerprint.rows import TensorPart
    from refitd_client.fingerprint.torch_ops import nonfinite

    device = parts[0].bits.device
    out = torch.zeros((len(parts), 2), dtype=torch.int64, device=device)
    long: list[TensorPart] = []
    for number, part in enumerate(parts):
        at, width = 0, part.bits.element_size()
        for rows in part.rows:
            bits, head = part.bits[at : at + rows.count], rows.count
            if rows.rows == 1 and rows.width >= _LONG and has_triton():
                head = -rows.begin % host.ROW
                body = TensorPart(
                    number=number,
                    now=bits.data_ptr() + head * width,
                    count=rows.width - head,
                    width=width,
                    first=rows.begin + head,
                    rule=part.rule,
                    elements=rows.begin + rows.width,
                )
                long.append(body)
            _add(out[number], bits[:head], rows)
            if part.rule != NO_RULE and head:
                out[number, 1] += nonfinite(bits[:head], part.rule).sum()
            at += rows.count
    if long:
        for number, each in enumerate(AddressScan(long, len(parts), device).begin()()):
            out[number] += torch.tensor([_signed(each.fingerprint), each.nonfinite], dtype=torch.int64, device=device)
    prints, bad = out.cpu().numpy().T.copy()
    return [Scan(*each) for each in zip(prints.view(np.uint64).tolist(), bad.tolist(), strict=True)]


def _add(out: Any, bits: Any, rows: ElementRows) -> None:
    """Add what the first elements of some rows add."""
    import torch

    from refitd_client.fingerprint.torch_ops import share

    for begin in range(0, bits.numel(), _AT_ONCE):
        place = torch.arange(begin, min(begin + _AT_ONCE, bits.numel()), device=bits.device)
        row = place // rows.width
        out[0] += share(rows.begin + row * rows.pitch + place - row * rows.width, bits[begin : begin + _AT_ONCE])


def _signed(number: int) -> int:
    from refitd_client.fingerprint.torch_ops import signed

    return signed(number)
