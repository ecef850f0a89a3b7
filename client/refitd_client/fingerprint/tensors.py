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
_LONG = 2**16  # elements from which on the kernel, numpy's faster way or a sum of its own is worth its start


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


class _Piece(NamedTuple):
    """Elements `begin` to `begin + len(bits)` of the rows of one part."""

    number: int
    bits: Any
    rows: ElementRows
    begin: int


def _parts_on_device(parts: Sequence[PartInput]) -> list[Scan]:
    import torch

    from refitd_client.fingerprint.batch import AddressScan
    from refitd_client.fingerprint.device import TensorPart

    device = parts[0].bits.device
    out = torch.zeros((len(parts), 2), dtype=torch.int64, device=device)
    long: list[TensorPart] = []
    pieces: dict[tuple[int, Rule], list[_Piece]] = {}
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
            pieces.setdefault((width, part.rule), []).extend(
                _Piece(number, bits[begin : min(begin + _AT_ONCE, head)], rows, begin)
                for begin in range(0, head, _AT_ONCE)
            )
            at += rows.count
    results = AddressScan(long, len(parts), device).begin() if long else list[Scan]
    for (_, rule), some in pieces.items():
        for few in _few_at_once(some):
            _add(out, few, rule)
    found = scans_in(out)
    for number, each in enumerate(results()):
        found[number] = both(found[number], each)
    return found


def _few_at_once(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """All of them: long ones alone, the others in groups of so many elements as can be there at a time."""
    group, count = list[_Piece](), 0
    for piece in pieces:
        if piece.bits.numel() >= _LONG:
            yield [piece]
            continue
        if group and count + piece.bits.numel() > _AT_ONCE:
            yield group
            group, count = [], 0
        group.append(piece)
        count += piece.bits.numel()
    if group:
        yield group


def _add(out: Any, pieces: Sequence[_Piece], rule: Rule) -> None:
    """Add what elements add, to the row of `out` of each one's part: for all pieces together, because a call of torch
    takes as long for a few elements as for many. Many that are added to one row wait for each other: a long piece is
    summed first.
    """
    import torch

    from refitd_client.fingerprint.device import nonfinite, terms

    if len(pieces) == 1:
        number, bits, _, _ = pieces[0]
        out[number, 0] += terms(_indices(pieces[0]), bits).sum()
        if rule != NO_RULE:
            out[number, 1] += nonfinite(bits, rule).sum()
        return
    bits, device = torch.cat([piece.bits for piece in pieces]), out.device
    counts = torch.tensor([piece.bits.numel() for piece in pieces], device=device)
    owners = torch.tensor([piece.number for piece in pieces], device=device).repeat_interleave(counts)
    out[:, 0].index_add_(0, owners, terms(torch.cat([_indices(piece) for piece in pieces]), bits))
    if rule != NO_RULE:
        out[:, 1].index_add_(0, owners, nonfinite(bits, rule).to(torch.int64))


def _indices(piece: _Piece) -> Any:
    import torch

    rows, end = piece.rows, piece.begin + piece.bits.numel()
    if rows.rows == 1:
        return torch.arange(rows.begin + piece.begin, rows.begin + end, device=piece.bits.device)
    place = torch.arange(piece.begin, end, device=piece.bits.device)
    row = place // rows.width
    return rows.begin + row * rows.pitch + place - row * rows.width
