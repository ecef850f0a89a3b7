# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN201, ANN202, N803 - triton has constants in capitals, and reads annotations as its own
"""Fingerprints on an NVIDIA GPU: one pass over the tensor, one addition to memory for each of a thousand programs.

Each program takes every thousandth row and keeps one sum for each column, Σ Q(row) · m(bits); the column's own key R
is multiplied in once, at the end. So an element costs one 64-bit multiply-add beside its bijection. Needs triton, which
comes with torch's builds for CUDA. `twin.py` says the same in torch's operations.

For many tensors at once a program finds what it has to do in a table (`batch.py`).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from refitd_client.fingerprint.definition import COLUMN_SEED, MIXES, ROW, ROW_SEED, SPLITMIX, WEYL

_PROGRAMS = 1056  # eight for each of an H200's 132 processors

_UNSIGNED = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


def add_fingerprint(bits: Any, out: Any) -> None:
    """Add the fingerprint of `bits` (from `twin.flat_bits`, on a GPU) to the int64 at `out`. Does not wait."""
    if bits.numel() == 0:
        return
    rows = triton.cdiv(bits.numel(), ROW)
    with torch.cuda.device(bits.device):
        _sum_rows[(min(rows, _PROGRAMS),)](
            bits, out, bits.numel(), rows, **constants(bits.element_size()), ROW=ROW, num_warps=8
        )


def add_fingerprints(table: Any, out: Any, width: int, *, aligned: bool) -> None:
    """Add the fingerprints of the tensors in `table` (`batch.units`, on a GPU) to their slots in `out`. Does not wait.

    `width` is that of all their elements in bytes; `aligned` says that all addresses are multiples of 16.
    """
    with torch.cuda.device(out.device):
        _sum_units[(table.shape[0],)](table, out, **constants(width), ROW=ROW, IS_ALIGNED=aligned, num_warps=8)


def constants(width: int) -> dict[str, Any]:
    """What a kernel has to know of the definition, for elements of a width in bytes."""
    mix = MIXES[width]
    (shift_1, factor_1), (shift_2, factor_2) = mix.rounds
    return {
        "BITS": _UNSIGNED[width], "WORK": tl.uint64 if width == 8 else tl.uint32, "SIZE": 8 * width,
        "SEED": mix.seed, "SHIFT_1": shift_1, "FACTOR_1": factor_1, "SHIFT_2": shift_2, "FACTOR_2": factor_2,
        "LAST": mix.last, "WEYL": WEYL, "ROW_SEED": ROW_SEED, "COLUMN_SEED": COLUMN_SEED,
        "SPLIT_1": SPLITMIX[0][1], "SPLIT_2": SPLITMIX[1][1],
    }  # fmt: skip


@triton.jit
def _sum_rows(
    bits, out, count, rows,
    BITS: tl.constexpr, WORK: tl.constexpr, SIZE: tl.constexpr, ROW: tl.constexpr,
    SEED: tl.constexpr, SHIFT_1: tl.constexpr, FACTOR_1: tl.constexpr,
    SHIFT_2: tl.constexpr, FACTOR_2: tl.constexpr, LAST: tl.constexpr,
    WEYL: tl.constexpr, ROW_SEED: tl.constexpr, COLUMN_SEED: tl.constexpr,
    SPLIT_1: tl.constexpr, SPLIT_2: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, ROW)
    sums = tl.zeros([ROW], dtype=tl.uint64)
    row = tl.program_id(0).to(tl.int64)  # 32 bits are too few for the elements of large tensors
    while row < rows:
        at = row * ROW + column
        inside = at < count
        x = tl.load(bits + at, mask=inside, other=0).to(BITS, bitcast=True).to(WORK)
        x = mixed(x, SIZE, SEED, SHIFT_1, FACTOR_1, SHIFT_2, FACTOR_2, LAST)
        wide = tl.where(inside, x.to(tl.uint64), tl.zeros([ROW], dtype=tl.uint64))
        sums += wide * key(row.to(tl.uint64), ROW_SEED, WEYL, SPLIT_1, SPLIT_2)
        row += tl.num_programs(0)
    total = tl.sum(sums * key(column.to(tl.uint64), COLUMN_SEED, WEYL, SPLIT_1, SPLIT_2), axis=0)
    tl.atomic_add(out, total.to(tl.int64, bitcast=True))


@triton.jit
def _sum_units(
    table, out,
    BITS: tl.constexpr, WORK: tl.constexpr, SIZE: tl.constexpr, ROW: tl.constexpr, IS_ALIGNED: tl.constexpr,
    SEED: tl.constexpr, SHIFT_1: tl.constexpr, FACTOR_1: tl.constexpr,
    SHIFT_2: tl.constexpr, FACTOR_2: tl.constexpr, LAST: tl.constexpr,
    WEYL: tl.constexpr, ROW_SEED: tl.constexpr, COLUMN_SEED: tl.constexpr,
    SPLIT_1: tl.constexpr, SPLIT_2: tl.constexpr,
):  # fmt: skip
    unit = table + tl.program_id(0) * 5
    bits = tl.load(unit).to(tl.pointer_type(BITS))
    if IS_ALIGNED:
        bits = tl.multiple_of(bits, 16)
    count = tl.load(unit + 1)
    end = tl.load(unit + 3)
    column = tl.arange(0, ROW)
    sums = tl.zeros([ROW], dtype=tl.uint64)
    row = tl.load(unit + 2)
    while row < tl.minimum(end, count // ROW):  # without a mask, a thread loads 16 bytes at once
        x = tl.load(bits + row * ROW + column).to(WORK)
        x = mixed(x, SIZE, SEED, SHIFT_1, FACTOR_1, SHIFT_2, FACTOR_2, LAST)
        sums += x.to(tl.uint64) * key(row.to(tl.uint64), ROW_SEED, WEYL, SPLIT_1, SPLIT_2)
        row += 1
    if row < end:
        inside = row * ROW + column < count
        x = tl.load(bits + row * ROW + column, mask=inside, other=0).to(WORK)
        x = mixed(x, SIZE, SEED, SHIFT_1, FACTOR_1, SHIFT_2, FACTOR_2, LAST)
        wide = tl.where(inside, x.to(tl.uint64), tl.zeros([ROW], dtype=tl.uint64))
        sums += wide * key(row.to(tl.uint64), ROW_SEED, WEYL, SPLIT_1, SPLIT_2)
    total = tl.sum(sums * key(column.to(tl.uint64), COLUMN_SEED, WEYL, SPLIT_1, SPLIT_2), axis=0)
    tl.atomic_add(out + tl.load(unit + 4), total.to(tl.int64, bitcast=True))


@triton.jit
def mixed(
    x, SIZE: tl.constexpr, SEED: tl.constexpr, SHIFT_1: tl.constexpr, FACTOR_1: tl.constexpr,
    SHIFT_2: tl.constexpr, FACTOR_2: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The bijection m, for bits in a type that holds them."""
    x ^= SEED
    x = _narrowed((x ^ (x >> SHIFT_1)) * FACTOR_1, SIZE)
    x = _narrowed((x ^ (x >> SHIFT_2)) * FACTOR_2, SIZE)
    return x ^ (x >> LAST)


@triton.jit
def _narrowed(x, SIZE: tl.constexpr):
    """The low bits of a product; the types of 32 and 64 bits have no others."""
    if SIZE < 32:
        x &= (1 << SIZE) - 1
    return x


@triton.jit
def key(number, SEED: tl.constexpr, WEYL: tl.constexpr, SPLIT_1: tl.constexpr, SPLIT_2: tl.constexpr):
    """R of columns, Q of rows, by their seed."""
    x = (number + 1) * WEYL + SEED
    x = (x ^ (x >> 30)) * SPLIT_1
    x = (x ^ (x >> 27)) * SPLIT_2
    return (x ^ (x >> 31)) | 1
