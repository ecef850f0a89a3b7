# pyright: basic
"""Fingerprints by torch's own operations, on any device: the reference that the triton kernel is tested against.

torch has no arithmetic for uint64, but int64 wraps around in the same way; only shifts to the right need a mask. Takes
about 0.4 GB beside the tensor. Imported only where the caller passes torch tensors.

Parts of many tensors on one GPU are one list of rows of `ROW` elements, for one launch of a kernel over all of them:

    table[part]    addresses, count, place in the tensor, rule for NaN, place in a larger tensor: `FIELDS` numbers, in
                   the order of `TensorPart.fields`
    owner[row]     the part that a row is of

A program that takes many rows finds the part of its first one by bisection of the table. Where each program takes one
row, it reads `owner`: 4 bytes a row on the GPU, 1/2048 of 16-bit tensors, for as long as the list is used.

`Listed` is numbers alone, so it can be kept for as long as tensors stay where they are, without keeping them alive;
`Rows` is the list on the device. Their users ensure that the memory at the addresses is there.

`count`, `report`, `take` and `column_keys` compare with torch's operations, and take the arguments of those in
`kernel.py`.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from refitd_client.checkpoint.finite import NO_RULE, Rule
from refitd_client.fingerprint.host import COLUMN_SEED, MIXES, ROW, ROW_SEED, SPLITMIX, WEYL
from refitd_client.fingerprint.tensors import ElementRows

_BLOCK_ROWS = 4096  # in a block: 16 M elements
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flat_bits(tensor: Any) -> Any:
    """A tensor's elements as integers of their width, one after the other; a view where the tensor is contiguous."""
    flat = tensor.detach()
    if not flat.is_contiguous() or flat.is_neg():
        flat = flat.resolve_neg().contiguous()
    flat = flat.view(-1)
    return flat.view(INTEGERS[flat.element_size()])


def add_scan(bits: Any, rule: Rule, out: Any) -> None:
    """Add the fingerprint of bits (from `flat_bits`), and how many elements are NaN or infinite, to `out`: two int64 on
    the same device.
    """
    out[0] += fingerprint(bits)
    out[1] += nonfinite(bits, rule).sum()


def nonfinite(bits: Any, rule: Rule) -> Any:
    """Which elements are NaN or infinite by the rule of their dtype, as booleans."""
    if rule == NO_RULE:
        return torch.zeros_like(bits, dtype=torch.bool)
    # The rule's numbers in a type of torch's, all of which but uint8 have a sign.
    largest, size = torch.iinfo(bits.dtype).max, 8 * bits.element_size()
    mask, pattern = (number if number <= largest else number - 2**size for number in rule)
    return (bits & mask) == pattern


def fingerprint(bits: Any) -> Any:
    """The fingerprint as an int64 scalar on the device of `bits` (from `flat_bits`). Does not wait for the GPU."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.numel(), _BLOCK_ROWS * ROW):
        part = bits[begin : begin + _BLOCK_ROWS * ROW]
        total += share(torch.arange(begin, begin + part.numel(), device=bits.device), part)
    return total


def share(indices: Any, bits: Any) -> Any:
    """What elements at some flat indices (int64) add to a fingerprint, as an int64 scalar on their device."""
    return terms(indices, bits).sum()


def terms(indices: Any, bits: Any) -> Any:
    """The same for each element: int64 of the shape of `bits`."""
    keys = _keys(COLUMN_SEED, torch.arange(ROW, device=bits.device))[indices % ROW]
    keys *= _keys(ROW_SEED, indices // ROW)
    width = bits.element_size()
    mix, size = MIXES[width], 8 * width
    mask = signed(2**size - 1)
    x = (bits.to(torch.int64) & mask) ^ signed(mix.seed)
    for shift, factor in mix.rounds:
        x = ((x ^ _shifted(x, shift, size)) * signed(factor)) & mask
    return keys * (x ^ _shifted(x, mix.last, size))


def signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _keys(seed: int, counts: Any) -> Any:
    x = (counts + 1) * signed(WEYL) + signed(seed)
    for shift, factor in SPLITMIX:
        x = (x ^ _shifted(x, shift, 64)) * signed(factor)
    return (x ^ _shifted(x, 31, 64)) | 1


def _shifted(x: Any, shift: int, size: int) -> Any:
    return (x >> shift) & (2 ** (size - shift) - 1)


FIELDS = 11
_BASE = 1  # of the fields
EVEN = 16  # bytes that a thread takes at a time, and elements of a count, where all addresses allow it
_SHORT_INDICES = 2**32  # elements whose flat indices take 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """`count` elements of `width` bytes of tensor `number`, from its element `first` on, a multiple of `ROW`.

    `now` is the address of their bits, `base` that of what to compare them with, if anything, on the same device.
    `elements` is how many the whole tensor has: all its parts go into the same list, in their order.

    Where the tensor is a part of a larger one itself, `first` counts from the begin of a `strip` of that one, which is
    the one whose `elements` count. `is_even`: all strips have as many elements as are read at once, or a multiple.
    """

    number: int
    now: int
    base: int = 0
    count: int
    width: int
    first: int = 0
    rule: Rule = NO_RULE
    elements: int
    strip: ElementRows | None = None
    is_even: bool = True

    @property
    def rows(self) -> int:
        return -(-self.count // ROW)

    @property
    def key(self) -> tuple[int, bool, bool, bool]:
        """Equal for parts that fit one list: width, whether indices take 64 bits, whether 16 bytes are read at once,
        and whether they are of larger tensors.
        """
        is_aligned = self.is_even and not (self.now % EVEN or self.base % EVEN or self.elements % EVEN)
        return self.width, self.elements > _SHORT_INDICES, is_aligned, self.strip is not None

    def fields(self, begin: int) -> tuple[int, ...]:
        """Its line of the table, if its first row is row `begin` of the list."""
        mask, pattern = (signed(number) for number in self.rule)
        strip = (0, 1, 0) if self.strip is None else (self.strip.begin, self.strip.width, self.strip.pitch)
        return self.now, self.base, self.count, self.first, begin, mask, pattern, self.number, *strip


def whole_tensor(number: int, bits: Any, rule: Rule = NO_RULE) -> TensorPart:
    """A whole tensor as one part. The caller keeps its bits (from `flat_bits`) alive."""
    count, width = bits.numel(), bits.element_size()
    return TensorPart(number=number, now=bits.data_ptr(), count=count, width=width, rule=rule, elements=count)


class Listed:
    """The list in host memory. `begins[part]` is the part's first row; the last is the number of all rows."""

    def __init__(self, parts: Sequence[TensorPart]) -> None:
        """All parts have elements, and the same `key`."""
        self.parts = parts
        self.width, self.has_long_index, self.is_aligned, self.has_strips = parts[0].key
        self.has_rules = any(part.rule != NO_RULE for part in parts)
        self.numbers = np.array([part.number for part in parts])
        self.begins: list[int] = [0, *np.cumsum([part.rows for part in parts]).tolist()]
        lines = [part.fields(begin) for part, begin in zip(parts, self.begins, strict=False)]
        self.table = np.array(lines, dtype=np.int64)


class Rows:
    """The list on a device."""

    def __init__(self, listed: Listed, device: Any, begins: NDArray[np.int64] | None = None) -> None:
        """Send it, without waiting for work on the device. With `begins` each part's base is an offset from these."""
        self.listed = listed
        self.device = device
        table = listed.table
        if begins is not None:
            table = table.copy()
            table[:, _BASE] += begins
        self.table = on_device(table, device)

    @cached_property
    def owner(self) -> Any:
        """The part of each row, as int32, made along the current stream at the first use."""
        numbers = torch.arange(len(self.listed.parts), dtype=torch.int32, device=self.device)
        counts = on_device(np.diff(self.listed.begins), self.device)
        return numbers.repeat_interleave(counts, output_size=len(self))

    def __len__(self) -> int:
        return self.listed.begins[-1]


def grouped(parts: Iterable[TensorPart]) -> Iterator[Listed]:
    """Lists of the parts that have elements, by `key`."""
    found: dict[tuple[int, bool, bool, bool], list[TensorPart]] = {}
    for part in parts:
        if part.count:
            found.setdefault(part.key, []).append(part)
    for each in found.values():
        yield Listed(each)


def on_device(numbers: Any, device: Any) -> Any:
    """64-bit numbers, sent without waiting for work on the device."""
    here = torch.from_numpy(np.array(numbers, dtype=np.int64))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def bits_at(address: int, count: int, width: int, device: Any) -> Any:
    """A tensor of `count` integers of `width` bytes over memory at an address, for code that cannot follow an address
    itself.
    """
    if device.type != "cuda":
        memory = (ctypes.c_char * (count * width)).from_address(address)
        return torch.frombuffer(memory, dtype=INTEGERS[width])
    return torch.as_tensor(_DeviceArray(address, count, width), device=device)


class _DeviceArray:
    """Memory of a GPU: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""

    def __init__(self, address: int, count: int, width: int) -> None:
        kind = "|u1" if width == 1 else f"<i{width}"
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": kind, "data": (address, False), "version": 3}


def count(rows: Rows, begin: int, end: int, counts: Any) -> None:
    for _, low, high, new, old in _parts(rows, begin, end):
        flags = new != old
        padded = torch.nn.functional.pad(flags, (0, -flags.numel() % ROW))
        counts[low:high] = padded.reshape(-1, ROW).sum(1)


def report(starts: Any, begins: Any, out: Any) -> None:
    out.copy_(starts[begins])


def take(
    rows: Rows, begin: int, end: int, *, starts: Any, keys: Any, sums: Any, rooms: Sequence[Any], update: bool
) -> None:
    for number, low, high, new, old in _parts(rows, begin, end):
        part = rows.listed.parts[number]
        local = (new != old).nonzero().reshape(-1)
        at, after, before = local + part.first + (low - rows.listed.begins[number]) * ROW, new[local], old[local]
        if part.strip is not None:
            row = at // part.strip.width
            at = part.strip.begin + row * part.strip.pitch + at - row * part.strip.width
        sums[part.number, 0] += share(at, after) - share(at, before)
        sums[part.number, 1] += nonfinite(after, part.rule).sum()
        place = slice(*(starts[[low, high]] - starts[begin]).tolist())
        for room, found in zip(rooms, (at, after, before), strict=True):
            room[place] = found
        if update:
            old[local] = after


def column_keys(device: Any) -> Any:
    return None


def _parts(rows: Rows, begin: int, end: int) -> Iterator[tuple[int, int, int, Any, Any]]:
    """The parts that have some of the rows from `begin` to `end`: number, first and last row, bits there and before."""
    for number, (first, last) in enumerate(pairwise(rows.listed.begins)):
        if first < end and last > begin:
            part, low, high = rows.listed.parts[number], max(first, begin), min(last, end)
            skipped = (low - first) * ROW
            count = min((high - first) * ROW, part.count) - skipped
            places = rows.table[number, :2].tolist()
            new, old = (bits_at(place + skipped * part.width, count, part.width, rows.device) for place in places)
            yield number, low, high, new, old
