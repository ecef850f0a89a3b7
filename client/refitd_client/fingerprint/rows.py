# pyright: basic
"""Parts of many tensors on one GPU as one list of rows of `ROW` elements, for one launch of a kernel over all of them.

    table[part]    addresses, count, place in the tensor, rule for NaN: `FIELDS` numbers, in the order of `Part.fields`
    owner[row]     the part that a row is of

A program that takes many rows finds the part of its first one by bisection of the table. Where each program takes one,
it looks into `owner`: 4 bytes a row on the GPU, 1/2048 of 16-bit tensors, for as long as the list is used.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from refitd_client.fingerprint.definition import ROW
from refitd_client.finite import NO_RULE, Rule

FIELDS = 8
_ALIGNMENT = 16  # bytes that a thread takes at a time, and elements of a count, where all addresses allow it
_SHORT = 2**32  # elements whose flat indices take 32 bits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Elements of tensor `number` from its element `first` on, which is a multiple of `ROW`.

    `now` are their bits (from `twin.flat_bits`), `base` those to compare them with, if any, on the same device.
    `elements` is how many the whole tensor has: its parts are alike, so that they are looked at in their order.
    """

    number: int
    now: Any
    base: Any = None
    first: int = 0
    rule: Rule = NO_RULE
    elements: int

    @property
    def count(self) -> int:
        """How many elements."""
        return self.now.numel()

    @property
    def rows(self) -> int:
        """How many rows, the last of which may be short."""
        return -(-self.count // ROW)

    @property
    def key(self) -> tuple[int, bool, bool]:
        """Parts with the same one can be in one list: width, width of indices, whether 16 bytes are read at a time."""
        is_aligned = not any(each % _ALIGNMENT for each in (*self._addresses, self.elements))
        return self.now.element_size(), self.elements > _SHORT, is_aligned

    @property
    def _addresses(self) -> tuple[int, int]:
        return self.now.data_ptr(), 0 if self.base is None else self.base.data_ptr()

    def fields(self, begin: int) -> tuple[int, ...]:
        """Its line of the table, if its first row is row `begin` of the list."""
        mask, pattern = (_signed(number) for number in self.rule)
        return *self._addresses, self.count, self.first, begin, mask, pattern, self.number


class Rows:
    """The list, on the parts' device. `begins[part]` is the part's first row; the last is how many there are."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """All parts have elements, and the same `key`."""
        self.parts = parts
        self.width, self.has_long_index, self.is_aligned = parts[0].key
        self.has_rules = any(part.rule != NO_RULE for part in parts)
        self.device = parts[0].now.device
        self.begins = [0, *np.cumsum([part.rows for part in parts]).tolist()]
        self.table = on_device([part.fields(begin) for part, begin in zip(parts, self.begins, strict=False)], self)

    @cached_property
    def owner(self) -> Any:
        """The part of each row, as int32, made along the current stream when it is first asked for."""
        numbers = torch.arange(len(self.parts), dtype=torch.int32, device=self.device)
        return numbers.repeat_interleave(on_device(np.diff(self.begins), self), output_size=len(self))

    def let_go(self) -> None:
        """Forget the tensors: their memory is not kept, and whoever goes over the list knows that it is there."""
        self.parts = [replace(part, now=None, base=None) for part in self.parts]

    def __len__(self) -> int:
        return self.begins[-1]


def alike(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Parts that have elements, those that can be in one list together."""
    found: dict[tuple[int, bool, bool], list[Part]] = {}
    for part in parts:
        if part.count:
            found.setdefault(part.key, []).append(part)
    yield from found.values()


def on_device(numbers: Any, rows: Rows) -> Any:
    """64-bit numbers, sent without waiting for what the device does."""
    here = torch.from_numpy(np.array(numbers, dtype=np.int64))
    return here.pin_memory().to(rows.device, non_blocking=True) if rows.device.type == "cuda" else here


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
