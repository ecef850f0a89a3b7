# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN201, ANN202, N803 - triton has constants in capitals, and reads annotations as its own
"""Fingerprints on an NVIDIA GPU, and how many elements are NaN or infinite: one pass, one launch for many tensors.

Each program takes some rows that follow each other and keeps one sum for each column, Σ Q(row) · m(bits); the column's
own key R is multiplied in at the end of a tensor. So an element costs one 64-bit multiply-add beside its bijection.
Fingerprints alone are computed by a variant without the count, which needs fewer registers. Slices, whose rows are
short and apart, are read in tiles (`add_strips`): the key of each element is put together from a row's and a column's.
Needs triton, which comes with torch's builds for CUDA. `torch_ops.py` does the same with torch's operations.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from refitd_client.fingerprint.host import COLUMN_SEED, MIXES, ROW, ROW_SEED, SPLITMIX, WEYL
from refitd_client.fingerprint.rows import FIELDS, Rows
from refitd_client.fingerprint.strips import STRIP_FIELDS, TALL, TILE_COLUMNS, TILE_ROWS, StripList

_MOST_PROGRAMS = 1056  # eight for each of an H200's 132 processors
_MOST_ROWS = 64  # rows of one program, 512 KiB of 16-bit elements: so that none is late when the others are done

UNSIGNED = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


def add_scan(rows: Rows, out: Any, programs: int | None = None) -> None:
    """Add fingerprints of parts, and how many of their elements are not finite, to `out[number]`: two int64.

    Does not wait. Allocates nothing on the GPU.

    Args:
        rows: the parts, in memory that the GPU reads: its own, or the host's that is registered with the driver.
        out: two int64 for each number, on the GPU.
        programs: how many share the rows. By default as many as read the GPU's memory at its full speed; far fewer read
            as fast as a bus brings bytes, and leave room for other work.
    """
    programs = programs or max(min(len(rows), _MOST_PROGRAMS), triton.cdiv(len(rows), _MOST_ROWS))
    with torch.cuda.device(rows.device):
        _scan[(programs,)](
            rows.table, out, len(rows.listed.parts), len(rows),
            FIELDS=FIELDS, ALIGNED=rows.listed.is_aligned, COUNTED=rows.listed.has_rules,
            **constants(rows.listed.width), num_warps=8,
        )  # fmt: skip


def add_strips(strips: StripList, out: Any) -> None:
    """Add what strips add to fingerprints, and how many of their elements are not finite, to `out[number]`: two int64
    for each number, on the GPU.

    Does not wait. Allocates nothing on the GPU.
    """
    with torch.cuda.device(strips.device):
        _strips[(strips.programs,)](
            strips.table, strips.keys, out, strips.count,
            FIELDS=STRIP_FIELDS, TILE_ROWS=TILE_ROWS, TILE_COLUMNS=TILE_COLUMNS, TALL=TALL, COUNTED=strips.has_rules,
            **constants(strips.width), num_warps=8,
        )  # fmt: skip


def constants(width: int) -> dict[str, Any]:
    """Constants that kernels are compiled with: the bijection and keys of elements of a width in bytes."""
    mix = MIXES[width]
    (shift_1, factor_1), (shift_2, factor_2) = mix.rounds
    return {
        "BITS": UNSIGNED[width], "WORK": tl.uint64 if width == 8 else tl.uint32, "SIZE": 8 * width, "ROW": ROW,
        "SEED": mix.seed, "SHIFT_1": shift_1, "FACTOR_1": factor_1, "SHIFT_2": shift_2, "FACTOR_2": factor_2,
        "LAST": mix.last, "WEYL": WEYL, "ROW_SEED": ROW_SEED, "COLUMN_SEED": COLUMN_SEED,
        "SPLIT_1": SPLITMIX[0][1], "SPLIT_2": SPLITMIX[1][1],
    }  # fmt: skip


@triton.jit(do_not_specialize=["parts", "rows"])  # else variants for multiples of 16 are compiled in an engine's pause
def _scan(
    table, out, parts, rows, FIELDS: tl.constexpr, ALIGNED: tl.constexpr, COUNTED: tl.constexpr,
    BITS: tl.constexpr, WORK: tl.constexpr, SIZE: tl.constexpr, ROW: tl.constexpr,
    SEED: tl.constexpr, SHIFT_1: tl.constexpr, FACTOR_1: tl.constexpr,
    SHIFT_2: tl.constexpr, FACTOR_2: tl.constexpr, LAST: tl.constexpr,
    WEYL: tl.constexpr, ROW_SEED: tl.constexpr, COLUMN_SEED: tl.constexpr,
    SPLIT_1: tl.constexpr, SPLIT_2: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, ROW)
    each = tl.cdiv(rows, tl.num_programs(0))
    row = tl.program_id(0).to(tl.int64) * each  # 32 bits are too few for the elements of large tensors
    end = tl.minimum(row + each, rows)
    part = _part(table, parts, row, FIELDS)
    while row < end:
        line = table + part * FIELDS
        part += 1
        now = tl.load(line).to(tl.pointer_type(BITS))
        count = tl.load(line + 2)
        if ALIGNED:
            now = tl.multiple_of(now, 16)
            count = tl.multiple_of(count, 16)
        first_row = tl.load(line + 3) // ROW
        begin = tl.load(line + 4)
        mask = tl.load(line + 5).to(WORK)
        pattern = tl.load(line + 6).to(WORK)
        number = tl.load(line + 7)
        stop = tl.minimum(end, begin + tl.cdiv(count, ROW))
        sums = tl.zeros([ROW], dtype=tl.uint64)
        bad = tl.zeros([ROW], dtype=tl.int32)
        whole = tl.minimum(stop, begin + count // ROW)
        while row < whole:  # without a mask, a thread loads 16 bytes at once
            x = tl.load(now + (row - begin) * ROW + column).to(WORK)
            if COUNTED:
                bad += ((x & mask) == pattern).to(tl.int32)
            x = mixed(x, SIZE, SEED, SHIFT_1, FACTOR_1, SHIFT_2, FACTOR_2, LAST)
            sums += x.to(tl.uint64) * key((row - begin + first_row).to(tl.uint64), ROW_SEED, WEYL, SPLIT_1, SPLIT_2)
            row += 1
        if row < stop:
            at = (row - begin) * ROW + column
            inside = at < count
            x = tl.load(now + at, mask=inside, other=0).to(WORK)
            if COUNTED:
                bad += (inside & ((x & mask) == pattern)).to(tl.int32)
            x = mixed(x, SIZE, SEED, SHIFT_1, FACTOR_1, SHIFT_2, FACTOR_2, LAST)
            wide = tl.where(inside, x.to(tl.uint64), tl.zeros([ROW], dtype=tl.uint64))
            sums += wide * key((row - begin + first_row).to(tl.uint64), ROW_SEED, WEYL, SPLIT_1, SPLIT_2)
            row += 1
        total = tl.sum(sums * key(column.to(tl.uint64), COLUMN_SEED, WEYL, SPLIT_1, SPLIT_2), axis=0)
        tl.atomic_add(out + 2 * number, total.to(tl.int64, bitcast=True))
        if COUNTED:
            tl.atomic_add(out + 2 * number + 1, tl.sum(bad, axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["strips"])
def _strips(
    table, keys, out, strips,
    FIELDS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TALL: tl.constexpr,
    COUNTED: tl.constexpr,
    BITS: tl.constexpr, WORK: tl.constexpr, SIZE: tl.constexpr, ROW: tl.constexpr,
    SEED: tl.constexpr, SHIFT_1: tl.constexpr, FACTOR_1: tl.constexpr,
    SHIFT_2: tl.constexpr, FACTOR_2: tl.constexpr, LAST: tl.constexpr,
    WEYL: tl.constexpr, ROW_SEED: tl.constexpr, COLUMN_SEED: tl.constexpr,
    SPLIT_1: tl.constexpr, SPLIT_2: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    line = table + _part(table, strips, tile, FIELDS) * FIELDS
    now = tl.load(line).to(tl.pointer_type(BITS))
    begin = tl.load(line + 1)
    width = tl.load(line + 2)
    rows = tl.load(line + 3)
    pitch = tl.load(line + 5)
    row_place = tl.load(line + 6)
    column_place = tl.load(line + 7)
    across = tl.load(line + 8)
    number = tl.load(line + 9)
    mask = tl.load(line + 10).to(WORK)
    pattern = tl.load(line + 11).to(WORK)
    tile -= tl.load(line + 4)
    step = tl.arange(0, TILE_COLUMNS)
    side = (tile % across) * TILE_COLUMNS
    column = side + step
    row = (tile // across) * TALL
    stop = tl.minimum(row + TALL, rows)
    sums = tl.zeros([TILE_ROWS, TILE_COLUMNS], dtype=tl.uint64)
    bad = tl.zeros([TILE_ROWS, TILE_COLUMNS], dtype=tl.int32)
    while row < stop:
        here = row + tl.arange(0, TILE_ROWS)
        inside = (here < stop)[:, None] & (column < width)[None, :]
        x = tl.load(now + here[:, None] * row_place + column[None, :] * column_place, mask=inside, other=0).to(WORK)
        if COUNTED:
            bad += (inside & ((x & mask) == pattern)).to(tl.int32)
        x = mixed(x, SIZE, SEED, SHIFT_1, FACTOR_1, SHIFT_2, FACTOR_2, LAST)
        first = begin + here * pitch + side  # flat indices: the elements of a row have this one's Q, or the next one
        above = (first // ROW).to(tl.uint64)
        near = key(above, ROW_SEED, WEYL, SPLIT_1, SPLIT_2)
        far = key(above + 1, ROW_SEED, WEYL, SPLIT_1, SPLIT_2)
        place = (first % ROW).to(tl.int32)[:, None] + step[None, :]
        is_far = place >= ROW
        q = tl.where(is_far, far[:, None], near[:, None])
        r = tl.load(keys + tl.where(is_far, place - ROW, place)).to(tl.uint64, bitcast=True)
        sums += tl.where(inside, x.to(tl.uint64) * q * r, tl.zeros([TILE_ROWS, TILE_COLUMNS], dtype=tl.uint64))
        row += TILE_ROWS
    total = tl.sum(tl.sum(sums, axis=1), axis=0)
    tl.atomic_add(out + 2 * number, total.to(tl.int64, bitcast=True))
    if COUNTED:
        tl.atomic_add(out + 2 * number + 1, tl.sum(tl.sum(bad, axis=1), axis=0).to(tl.int64))


@triton.jit
def _part(table, parts, row, FIELDS: tl.constexpr):
    """The last part that begins with this row or before it: parts have no fewer rows than one."""
    low = parts * 0  # a tensor of the same type, as a loop wants
    high = parts
    while high - low > 1:
        middle = (low + high) // 2
        is_after = tl.load(table + middle * FIELDS + 4) > row
        high = tl.where(is_after, middle, high)
        low = tl.where(is_after, low, middle)
    return low


@triton.jit
def mixed(
    x, SIZE: tl.constexpr, SEED: tl.constexpr, SHIFT_1: tl.constexpr, FACTOR_1: tl.constexpr,
    SHIFT_2: tl.constexpr, FACTOR_2: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The bijection m. `x` are bits in a type of at least 32; the constants are those of `constants`."""
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
    """Q of a row or R of a column, by the seed; the constants are those of `constants`."""
    x = (number + 1) * WEYL + SEED
    x = (x ^ (x >> 30)) * SPLIT_1
    x = (x ^ (x >> 27)) * SPLIT_2
    return (x ^ (x >> 31)) | 1
