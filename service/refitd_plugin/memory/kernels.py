# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN202, N803 - triton has constants in capitals, and reads annotations as its own
"""Single elements looked at and written on an NVIDIA GPU (`delta.in_place`, whose `HostPatch` does the same in numpy).
Imported where a GPU is.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from refitd_client.fingerprint.kernel import constants, key, mixed
from refitd_plugin.delta.in_place import BLOCK
from refitd_plugin.delta.layout import COLUMNS

_INTS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def look(
    table: Any, begin: int, indices: Any, values: Any, olds: Any, sums: Any, holders: int, width: int
) -> None:  # fmt: skip
    """Read the bits of a chunk's elements into `olds`, and add what the new ones change to `sums`. Does not wait.
    `begin`: the table's element that `indices` (in the checkpoint's tensors) and `values` begin with. `sums`: one for
    each piece, and from `holders` on one for each holder. `width`: bytes of an element.
    """
    with torch.cuda.device(sums.device):
        _look[(table.shape[0],)](
            table, begin, indices, values, olds, sums, holders,
            **constants(width), INT=_INTS[width], BLOCK=BLOCK, COLUMNS=COLUMNS,
        )  # fmt: skip


def put(table: Any, begin: int, indices: Any, values: Any, width: int) -> None:
    """Write `values` to the elements of a chunk. Does not wait. Arguments are those of `look`."""
    with torch.cuda.device(table.device):
        _put[(table.shape[0],)](table, begin, indices, values, INT=_INTS[width], BLOCK=BLOCK, COLUMNS=COLUMNS)


@triton.jit(do_not_specialize=["begin"])  # a variant for each alignment would be compiled in a pause
def _look(
    table, begin, indices, values, olds, sums, holders,
    BITS: tl.constexpr, INT: tl.constexpr, WORK: tl.constexpr, SIZE: tl.constexpr, ROW: tl.constexpr,
    SEED: tl.constexpr, SHIFT_1: tl.constexpr, FACTOR_1: tl.constexpr,
    SHIFT_2: tl.constexpr, FACTOR_2: tl.constexpr, LAST: tl.constexpr,
    WEYL: tl.constexpr, ROW_SEED: tl.constexpr, COLUMN_SEED: tl.constexpr,
    SPLIT_1: tl.constexpr, SPLIT_2: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    unit = table + tl.program_id(0) * COLUMNS
    at = tl.load(unit) - begin + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < tl.load(unit + 1)
    index = _wide(tl.load(indices + at, mask=inside, other=0))
    place = _place(unit, index)
    old = tl.load(tl.load(unit + 2).to(tl.pointer_type(INT)) + place, mask=inside, other=0)
    new = tl.load(values + at, mask=inside, other=0)
    tl.store(olds + at, old, mask=inside)
    was = mixed(old.to(BITS, bitcast=True).to(WORK), SIZE, SEED, SHIFT_1, FACTOR_1, SHIFT_2, FACTOR_2, LAST)
    comes = mixed(new.to(BITS, bitcast=True).to(WORK), SIZE, SEED, SHIFT_1, FACTOR_1, SHIFT_2, FACTOR_2, LAST)
    change = tl.where(inside, comes.to(tl.uint64) - was.to(tl.uint64), tl.zeros([BLOCK], dtype=tl.uint64))
    there = key((index // ROW).to(tl.uint64), ROW_SEED, WEYL, SPLIT_1, SPLIT_2)
    there *= key((index % ROW).to(tl.uint64), COLUMN_SEED, WEYL, SPLIT_1, SPLIT_2)
    here = key((place // ROW).to(tl.uint64), ROW_SEED, WEYL, SPLIT_1, SPLIT_2)
    here *= key((place % ROW).to(tl.uint64), COLUMN_SEED, WEYL, SPLIT_1, SPLIT_2)
    tl.atomic_add(sums + tl.load(unit + 8), tl.sum(change * there, axis=0).to(tl.int64, bitcast=True))
    tl.atomic_add(sums + holders + tl.load(unit + 9), tl.sum(change * here, axis=0).to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["begin"])
def _put(table, begin, indices, values, INT: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    unit = table + tl.program_id(0) * COLUMNS
    at = tl.load(unit) - begin + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < tl.load(unit + 1)
    place = _place(unit, _wide(tl.load(indices + at, mask=inside, other=0)))
    tl.store(
        tl.load(unit + 2).to(tl.pointer_type(INT)) + place, tl.load(values + at, mask=inside, other=0), mask=inside
    )


@triton.jit
def _wide(index):
    """Unsigned indices of 32 bits come as signed ones. Those of 64 bits are below 2^63."""
    wide = index.to(tl.int64)
    if index.dtype.primitive_bitwidth == 32:
        wide &= 0xFFFFFFFF
    return wide


@triton.jit
def _place(unit, index):
    element = index - tl.load(unit + 3)
    row_index = tl.load(unit + 5)
    row = element // row_index
    column = element - row * row_index
    return tl.load(unit + 4) + row * tl.load(unit + 6) + column * tl.load(unit + 7)
