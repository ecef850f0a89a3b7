# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN202, N803 - triton has constants in capitals, and reads annotations as its own
"""Fingerprints on an NVIDIA GPU: one pass over the tensor, one addition to memory for each of a thousand programs.

Each program takes every thousandth row and keeps one sum for each column, Σ Q(row) · m(bits); the column's own key R
is multiplied in once, at the end. So an element costs one 64-bit multiply-add beside its bijection. Needs triton, which
comes with torch's builds for CUDA. `twin.py` says the same in torch's operations.
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
    width = bits.element_size()
    mix = MIXES[width]
    (shift_1, factor_1), (shift_2, factor_2) = mix.rounds
    with torch.cuda.device(bits.device):
        _sum_rows[(min(rows, _PROGRAMS),)](
            bits, out, bits.numel(), rows,
            BITS=_UNSIGNED[width], WORK=tl.uint64 if width == 8 else tl.uint32, SIZE=8 * width, ROW=ROW,
            SEED=mix.seed, SHIFT_1=shift_1, FACTOR_1=factor_1, SHIFT_2=shift_2, FACTOR_2=factor_2, LAST=mix.last,
            WEYL=WEYL, ROW_SEED=ROW_SEED, COLUMN_SEED=COLUMN_SEED, SPLIT_1=SPLITMIX[0][1], SPLIT_2=SPLITMIX[1][1],
            num_warps=8,
        )  # fmt: skip


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
        x ^= SEED
        x = _narrowed((x ^ (x >> SHIFT_1)) * FACTOR_1, SIZE)
        x = _narrowed((x ^ (x >> SHIFT_2)) * FACTOR_2, SIZE)
        x ^= x >> LAST
        wide = tl.where(inside, x.to(tl.uint64), tl.zeros([ROW], dtype=tl.uint64))
        sums += wide * _key(row.to(tl.uint64), ROW_SEED, WEYL, SPLIT_1, SPLIT_2)
        row += tl.num_programs(0)
    total = tl.sum(sums * _key(column.to(tl.uint64), COLUMN_SEED, WEYL, SPLIT_1, SPLIT_2), axis=0)
    tl.atomic_add(out, total.to(tl.int64, bitcast=True))


@triton.jit
def _narrowed(x, SIZE: tl.constexpr):
    """The low bits of a product; the types of 32 and 64 bits have no others."""
    if SIZE < 32:
        x &= (1 << SIZE) - 1
    return x


@triton.jit
def _key(number, SEED: tl.constexpr, WEYL: tl.constexpr, SPLIT_1: tl.constexpr, SPLIT_2: tl.constexpr):
    x = (number + 1) * WEYL + SEED
    x = (x ^ (x >> 30)) * SPLIT_1
    x = (x ^ (x >> 27)) * SPLIT_2
    return (x ^ (x >> 31)) | 1
