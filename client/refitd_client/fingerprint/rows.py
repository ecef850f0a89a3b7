# pyright: basic
"""Parts of many tensors on one GPU as one list of rows of `ROW` elements, for one launch of a kernel over all of them.

    table[part]    addresses, count, place in the tensor, rule for NaN: `FIELDS` numbers, in the order of `Part.fields`
    owner[row]     the part that a row is of

A program that takes many rows finds the part of its first one by bisection of the table. Where each program takes one,
it looks into `owner`: 4 bytes a row on the GPU, 1/2048 of 16-bit tensors, for as long as the list is used.

`Listed` is numbers alone, so it can be kept for as long as tensors stay where they are, without keeping them alive;
`Rows` is the list on the device. Whoever uses them sees to it that there is memory at the addresses.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from refitd_client.checkpoint.finite import NO_RULE, Rule
from refitd_client.fingerprint.definition import ROW

FIELDS = 8
_BASE = 1  # of the fields
_ALIGNMENT = 16  # bytes that a thread takes at a time, and elements of a count, where all addresses allow it
_SHORT = 2**32  # elements whose flat indices take 32 bits
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`count` elements of `width` bytes of tensor `number`, from its element `first` on, a multiple of `ROW`.

    `now` is the address of their bits, `base` that of what to compare them with, if anything, on the same device.
    `elements` is how many the whole tensor has: its parts are alike, so that they are looked at in their order.
    """

    number: int
    now: int
    base: int = 0
    count: int
    width: int
    first: int = 0
    rule: Rule = NO_RULE
    elements: int

    @property
    def rows(self) -> int:
        """How many rows, the last of which may be short."""
        return -(-self.count // ROW)

    @property
    def key(self) -> tuple[int, bool, bool]:
        """Parts with the same one can be in one list: width, width of indices, whether 16 bytes are read at a time."""
        is_aligned = not (self.now % _ALIGNMENT or self.base % _ALIGNMENT or self.elements % _ALIGNMENT)
        return self.width, self.elements > _SHORT, is_aligned

    def fields(self, begin: int) -> tuple[int, ...]:
        """Its line of the table, if its first row is row `begin` of the list."""
        mask, pattern = (_signed(number) for number in self.rule)
        return self.now, self.base, self.count, self.first, begin, mask, pattern, self.number


def whole(number: int, bits: Any, rule: Rule = NO_RULE) -> Part:
    """A tensor (from `twin.flat_bits`), which the caller keeps alive."""
    count = bits.numel()
    return Part(number=number, now=bits.data_ptr(), count=count, width=bits.element_size(), rule=rule, elements=count)


class Listed:
    """The list in host memory. `begins[part]` is the part's first row; the last is how many there are."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """All parts have elements, and the same `key`."""
        self.parts = parts
        self.width, self.has_long_index, self.is_aligned = parts[0].key
        self.has_rules = any(part.rule != NO_RULE for part in parts)
        self.numbers = np.array([part.number for part in parts])
        self.begins: list[int] = [0, *np.cumsum([part.rows for part in parts]).tolist()]
        lines = [part.fields(begin) for part, begin in zip(parts, self.begins, strict=False)]
        self.table = np.array(lines, dtype=np.int64)

    def table_from(self, begins: NDArray[np.int64]) -> NDArray[np.int64]:
        """The table, if each part's base is so many bytes behind an address."""
        table = self.table.copy()
        table[:, _BASE] += begins
        return table


class Rows:
    """The list on a device."""

    def __init__(self, listed: Listed, device: Any, begins: NDArray[np.int64] | None = None) -> None:
        """Send it, without waiting for what the device does. `begins`: what each part's base counts from, else 0."""
        self.listed = listed
        self.device = device
        self.table = on_device(listed.table if begins is None else listed.table_from(begins), device)

    @cached_property
    def owner(self) -> Any:
        """The part of each row, as int32, made along the current stream when it is first asked for."""
        numbers = torch.arange(len(self.listed.parts), dtype=torch.int32, device=self.device)
        counts = on_device(np.diff(self.listed.begins), self.device)
        return numbers.repeat_interleave(counts, output_size=len(self))

    def __len__(self) -> int:
        return self.listed.begins[-1]


def alike(parts: Iterable[Part]) -> Iterator[Listed]:
    """Parts that have elements, those that can be in one list together."""
    found: dict[tuple[int, bool, bool], list[Part]] = {}
    for part in parts:
        if part.count:
            found.setdefault(part.key, []).append(part)
    for each in found.values():
        yield Listed(each)


def on_device(numbers: Any, device: Any) -> Any:
    """64-bit numbers, sent without waiting for what the device does."""
    here = torch.from_numpy(np.array(numbers, dtype=np.int64))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def bits_at(address: int, count: int, width: int, device: Any) -> Any:
    """The elements at an address as a tensor of integers, for those who cannot follow an address themselves."""
    if device.type != "cuda":
        memory = (ctypes.c_char * (count * width)).from_address(address)
        return torch.frombuffer(memory, dtype=_INTEGERS[width])
    return torch.as_tensor(_There(address, count, width), device=device)


class _There:
    """Memory of a GPU, as numba and CuPy say it: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""

    def __init__(self, address: int, count: int, width: int) -> None:
        kind = "|u1" if width == 1 else f"<i{width}"
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": kind, "data": (address, False), "version": 3}


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
