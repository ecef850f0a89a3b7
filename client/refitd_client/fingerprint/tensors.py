# pyright: basic
"""Fingerprints of torch tensors, and their NaN and infinite elements, where they are: on the GPU or in host memory.

No tensor leaves its device. Nothing is imported that the process does not have: a caller with a tensor has torch, and
one with a tensor on a GPU has a CUDA context.

A fingerprint is a sum over all elements (`part_scans`), so what several processes find in their parts adds up to the
fingerprint of the whole, without any of them having it.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from refitd_client.checkpoint.finite import NO_RULE, Rule
from refitd_client.fingerprint import host

CASTS_BYTES = 2**28  # bytes of casts' results that are there at a time
_LAUNCH_BYTES = 2**30  # bytes of tensors that one launch reads: it takes 1/2048 of them beside the tensors


class ScanInput(NamedTuple):
    """A dense tensor, and its dtype's rule for NaN and infinity. `is_view`: it takes no memory of its own."""

    tensor: Any
    rule: Rule = NO_RULE
    is_view: bool = False


class Scan(NamedTuple):
    """A tensor's fingerprint, and how many elements are NaN or infinite by the given rule."""

    fingerprint: int
    nonfinite: int


def scans_in(out: Any) -> list[Scan]:
    """The results in two int64 for each tensor. Waits for the device that they are on."""
    prints, bad = out.cpu().numpy().T.copy()
    return [Scan(*each) for each in zip(prints.view(np.uint64).tolist(), bad.tolist(), strict=True)]


def both(one: Scan, other: Scan) -> Scan:
    return Scan((one.fingerprint + other.fingerprint) & host.MASK, one.nonfinite + other.nonfinite)


def fingerprints(tensors: Iterable[Any]) -> list[int]:
    return [found.fingerprint for found in scan(ScanInput(tensor) for tensor in tensors)]


def scan(inputs: Iterable[ScanInput]) -> list[Scan]:
    """Scan tensors. The results are in their order.

    Every byte is read once. Waits for the GPU once, however many tensors there are. A tensor is taken from `inputs`
    when it is its turn, and released soon.
    """
    return begin_scan(inputs)()


def begin_scan(inputs: Iterable[ScanInput]) -> Callable[[], list[Scan]]:
    """As `scan`. The function that is returned waits for the GPU. Call it before the tensors change."""
    found: dict[int, Scan] = {}
    sums: list[tuple[Sequence[int], Any]] = []
    for batch in _batches(inputs):
        for device in dict.fromkeys(bits.device for _, bits, _ in batch):
            here = [(number, bits, rule) for number, bits, rule in batch if bits.device == device]
            if device.type != "cpu":
                sums.append(([number for number, _, _ in here], _on_device([each[1:] for each in here])))
                continue
            for number, bits, rule in here:
                elements: host.Bits = bits.numpy().view(f"u{bits.element_size()}")
                found[number] = Scan(host.fingerprint(elements), _nonfinite(elements, rule))

    def results() -> list[Scan]:
        for numbers, out in sums:
            found.update(zip(numbers, scans_in(out), strict=True))
        return [found[number] for number in range(len(found))]

    return results


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _batches(inputs: Iterable[ScanInput]) -> Iterator[list[tuple[int, Any, Rule]]]:
    """Numbered bits, of `_LAUNCH_BYTES` together or little more, and of `CASTS_BYTES` that take memory of their own."""
    from refitd_client.fingerprint import device

    batch: list[tuple[int, Any, Rule]] = []
    size = made = 0
    for number, (tensor, rule, is_view) in enumerate(inputs):
        bits: Any = device.flat_bits(tensor)
        batch.append((number, bits, rule))
        size += bits.nbytes
        made += 0 if is_view else bits.nbytes
        if size >= _LAUNCH_BYTES or made >= CASTS_BYTES:
            yield batch
            batch, size, made = [], 0, 0
    yield batch


def _nonfinite(elements: host.Bits, rule: Rule) -> int:
    mask, pattern = rule
    return 0 if rule == NO_RULE else int(np.count_nonzero((elements & elements.dtype.type(mask)) == pattern))


def _on_device(items: Sequence[tuple[Any, Rule]]) -> Any:
    """Two int64 for each tensor, on the device."""
    torch: Any = sys.modules["torch"]
    device = items[0][0].device
    out = torch.zeros((len(items), 2), dtype=torch.int64, device=device)
    if device.type == "cuda" and has_triton():
        from refitd_client.fingerprint import kernel
        from refitd_client.fingerprint.device import Rows, grouped, whole_tensor

        for listed in grouped(whole_tensor(number, *item) for number, item in enumerate(items)):
            kernel.add_scan(Rows(listed, device), out)
    else:
        from refitd_client.fingerprint import device

        for number, (bits, rule) in enumerate(items):
            device.add_scan(bits, rule, out[number])
    return out


_AT_ONCE = 2**22  # elements whose indices are there at a time: they take 32 MiB, and what is made of them as much again
_LONG = 2**16  # elements from which on numpy's faster way is worth its start


@dataclass(frozen=True, slots=True)
class ElementRows:
    """`rows` rows of `width` elements, which begin at flat index `begin` of the tensor, `pitch` elements apart."""

    begin: int
    width: int
    rows: int = 1
    pitch: int = 0

    @property
    def count(self) -> int:
        return self.width * self.rows


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Where the elements of a part lie in its tensor, which has so many: `strips` follow each other in the part."""

    strips: Sequence[ElementRows]
    elements: int


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
    found = dict(zip(on_gpu, _parts_on_device([parts[number] for number in on_gpu]), strict=True)) if on_gpu else {}
    return [found[number] if number in found else _in_host_memory(part) for number, part in enumerate(parts)]


def _in_host_memory(part: PartInput) -> Scan:
    bits = part.bits.numpy().view(f"u{part.bits.element_size()}")
    total = at = 0
    for rows in part.rows:
        total += _share(bits[at : at + rows.count], rows)
        at += rows.count
    return Scan(total & host.MASK, _nonfinite(bits, part.rule))


def _share(bits: host.Bits, rows: ElementRows) -> int:
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


def _parts_on_device(parts: Sequence[PartInput]) -> list[Scan]:
    import torch

    from refitd_client.fingerprint import device as by_torch

    device = parts[0].bits.device
    if has_triton():
        return _strips_on_gpu(parts, device)
    out = torch.zeros((len(parts), 2), dtype=torch.int64, device=device)
    for number, part in enumerate(parts):
        at = 0
        for rows in part.rows:
            for begin in range(0, rows.count, _AT_ONCE):
                bits = part.bits[at + begin : at + min(begin + _AT_ONCE, rows.count)]
                place = torch.arange(begin, begin + bits.numel(), device=device)
                row = place // rows.width
                indices = rows.begin + row * rows.pitch + place - row * rows.width
                out[number, 0] += by_torch.share(indices, bits)
                out[number, 1] += by_torch.nonfinite(bits, part.rule).sum()
            at += rows.count
    return scans_in(out)


def _strips_on_gpu(parts: Sequence[PartInput], device: Any) -> list[Scan]:
    """The same by a kernel, for all parts together."""
    from refitd_client.fingerprint.batch import MemoryStrip, StripScan

    strips: list[MemoryStrip] = []
    owners: list[int] = []
    for number, part in enumerate(parts):
        address, width = part.bits.data_ptr(), part.bits.element_size()
        for rows in part.rows:
            strips.append(MemoryStrip(address, width, rows, rows.width, 1, part.rule))
            owners.append(number)
            address += rows.count * width
    found = [Scan(0, 0)] * len(parts)
    for number, each in zip(owners, StripScan(strips, device).begin()(), strict=True):
        found[number] = both(found[number], each)
    return found
