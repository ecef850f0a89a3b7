# pyright: basic
"""Parts of many tensors on one GPU as one list of rows of `ROW` elements, for one launch of a kernel over all of them.

    table[part]    addresses, count, place in the tensor, rule for NaN, place in a larger tensor: `FIELDS` numbers, in
                   the order of `TensorPart.fields`
    owner[row]     the part that a row is of

A program that takes many rows finds the part of its first one by bisection of the table. Where each program takes one
row, it reads `owner`: 4 bytes a row on the GPU, 1/2048 of 16-bit tensors, for as long as the list is used.

`Listed` is numbers alone, so it can be kept for as long as tensors stay where they are, without keeping them alive;
`Rows` is the list on the device. Their users ensure that the memory at the addresses is there.
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
from refitd_client.fingerprint.host import ROW
from refitd_client.fingerprint.parts import ElementRows
from refitd_client.fingerprint.torch_ops import INTEGERS, signed

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
        """How many rows, the last of which may be short."""
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
    """A whole tensor as one part.

    Args:
        number: the tensor's.
        bits: from `torch_ops.flat_bits`. The caller keeps them alive.
        rule: its dtype's, for NaN and infinity.
    """
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
    """A tensor of integers over memory at an address, for code that cannot follow an address itself.

    Args:
        address: of the first element.
        count: how many elements.
        width: bytes of an element.
        device: where the memory is.
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
