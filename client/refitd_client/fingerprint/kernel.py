# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN201, ANN202, N803 - triton has constants in capitals, and reads annotations as its own
"""Fingerprints on an NVIDIA GPU, and how many elements are NaN or infinite: one pass, one launch for many tensors.

Each program takes some rows that follow each other and keeps one sum for each column, Σ Q(row) · m(bits); the column's
own key R is multiplied in at the end of a tensor. So an element costs one 64-bit multiply-add beside its bijection.
Fingerprints alone are computed by a variant without the count, which needs fewer registers. Slices, whose rows are
short and apart, are read in tiles (`add_strips`): the key of each element is put together from a row's and a column's.
Needs triton, which comes with torch's builds for CUDA. `device.py` does the same with torch's operations.

A comparison (`delta/compare.py`) is a count for each row (`count`), then the changes of all rows, close together and in
order (`take`). Between the two, the counts are summed up, so that each row knows where its changes go. Both read what
is compared, at the memory's speed, and no more: what changes do to the fingerprints is computed from the changes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from refitd_client.fingerprint.batch import STRIP_FIELDS, TALL, TILE_COLUMNS, TILE_ROWS, StripList
from refitd_client.fingerprint.device import FIELDS, Rows
from refitd_client.fingerprint.host import COLUMN_SEED, MIXES, ROW, ROW_SEED, SPLITMIX, WEYL

_MOST_PROGRAMS = 1056  # eight for each of an H200's 132 processors
_MOST_ROWS = 64  # rows of one program, 512 KiB of 16-bit elements: so that none is late when the others are done

UNSIGNED = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


def add_scan(rows: Rows, out: Any, programs: int | None = None) -> None:
    """Add fingerprints of parts, and how many of their elements are not finite, to `out[number]`: two int64.

    Does not wait. Allocates nothing on the GPU.

    `rows` are in memory that the GPU reads: its own, or the host's that is registered with the driver. `programs` share
    the rows: by default as many as read the GPU's memory at its full speed; far fewer read as fast as a bus brings
    bytes, and leave room for other work.
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


_SPAN, _WARPS = 256, 1  # elements that a program takes at a time, and by how many warps: others take 1/6 longer or more
_FOUND = 64  # changes that a program takes at a time: a row of 4096 elements has 41 when 1 % did


def count(rows: Rows, begin: int, end: int, counts: Any) -> None:
    """Write how many elements changed in each row from `begin` to `end` to `counts`, an integer for each row."""
    taken = {name: value for name, value in constants(rows.listed.width).items() if name in {"BITS", "ROW"}}
    with torch.cuda.device(rows.device):
        _count[(end - begin,)](
            rows.table, rows.owner, counts, begin, FIELDS=FIELDS, ALIGNED=rows.listed.is_aligned, **taken, num_warps=8
        )


def report(starts: Any, begins: Any, out: Any) -> None:
    """Write `starts` at the places `begins`, both int64 on the GPU, to `out`, page-locked host memory. A kernel does
    not queue behind copies to the host.
    """
    with torch.cuda.device(starts.device):
        _report[(triton.cdiv(len(begins), 256),)](starts, begins, out, len(begins), BLOCK=256)


def take(
    rows: Rows, begin: int, end: int, *, starts: Any, keys: Any, sums: Any, rooms: Sequence[Any], update: bool
) -> None:
    """Extract the changes of some rows.

    Args:
        rows: what is compared.
        begin: the first row.
        end: the row after the last.
        starts: where the changes of each row of `rows` go, and where the last row's end: int64.
        keys: R of each column (`column_keys`).
        sums: two int64 for each tensor; what changes add to its fingerprint, and how many changed elements are NaN or
            infinite, are added to them.
        rooms: for what is from `starts[begin]` on: flat indices as int32 or int64, of parts of larger tensors those in
            these; the bits that are there now, and those that were.
        update: make the base what is there now.
    """
    indices, values, olds = rooms
    shape = {name: value for name, value in constants(rows.listed.width).items() if name in {"BITS", "ROW"}}
    with torch.cuda.device(rows.device):
        _take[(end - begin,)](
            rows.table, rows.owner, starts, indices, values, olds, begin, FIELDS=FIELDS, ALIGNED=rows.listed.is_aligned,
            UPDATE=update, INDEX=tl.int64 if indices.dtype == torch.int64 else tl.int32, SPAN=_SPAN, num_warps=_WARPS,
            **shape,
        )  # fmt: skip
        _add[(end - begin,)](
            rows.table, rows.owner, starts, keys, sums, indices, values, olds, begin, FIELDS=FIELDS, FOUND=_FOUND,
            STRIPS=rows.listed.has_strips, LONG=indices.dtype == torch.int64,
            num_warps=1, **constants(rows.listed.width),
        )  # fmt: skip


def column_keys(device: Any) -> Any:
    """R of each column, as int64."""
    keys = torch.empty(ROW, dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        _keys[(1,)](keys, ROW=ROW, SEED=COLUMN_SEED, WEYL=WEYL, SPLIT_1=SPLITMIX[0][1], SPLIT_2=SPLITMIX[1][1])
    return keys


@triton.jit
def _keys(out, ROW: tl.constexpr, SEED: tl.constexpr, WEYL: tl.constexpr, SPLIT_1: tl.constexpr, SPLIT_2: tl.constexpr):
    column = tl.arange(0, ROW)
    tl.store(out + column, key(column.to(tl.uint64), SEED, WEYL, SPLIT_1, SPLIT_2).to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["first"])  # else variants are compiled in mid-step
def _count(
    table, owner, counts, first, FIELDS: tl.constexpr, ALIGNED: tl.constexpr, BITS: tl.constexpr, ROW: tl.constexpr
):
    row = tl.program_id(0) + first
    line = table + tl.load(owner + row) * FIELDS
    now = tl.load(line).to(tl.pointer_type(BITS))
    base = tl.load(line + 1).to(tl.pointer_type(BITS))
    elements = tl.load(line + 2)
    if ALIGNED:
        now = tl.multiple_of(now, 16)
        base = tl.multiple_of(base, 16)
        elements = tl.multiple_of(elements, 16)
    at = (row - tl.load(line + 4)) * ROW + tl.arange(0, ROW)
    inside = at < elements
    changed = tl.load(now + at, mask=inside, other=0) != tl.load(base + at, mask=inside, other=0)
    tl.store(counts + row, tl.sum(changed.to(tl.int32), axis=0))


@triton.jit
def _report(starts, begins, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(starts + tl.load(begins + at, mask=inside, other=0), mask=inside), mask=inside)


@triton.jit(do_not_specialize=["first"])  # else variants are compiled in mid-step
def _take(
    table, owner, starts, indices, values, olds, first,
    FIELDS: tl.constexpr, ALIGNED: tl.constexpr, UPDATE: tl.constexpr, INDEX: tl.constexpr,
    BITS: tl.constexpr, ROW: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) + first
    start = tl.load(starts + row)
    if tl.load(starts + row + 1) > start:  # else nothing of it is read
        line = table + tl.load(owner + row) * FIELDS
        here = (row - tl.load(line + 4)).to(tl.int64) * ROW
        now = tl.load(line).to(tl.pointer_type(BITS)) + here
        base = tl.load(line + 1).to(tl.pointer_type(BITS)) + here
        elements = tl.minimum(tl.load(line + 2) - here, ROW).to(tl.int32)  # 32 bits do from here on
        if ALIGNED:
            now = tl.multiple_of(now, 16)
            base = tl.multiple_of(base, 16)
            elements = tl.multiple_of(elements, 16)
        first_element = (tl.load(line + 3) + here).to(INDEX)
        room = start - tl.load(starts + first)
        place = 0
        for begin in range(0, ROW, SPAN):
            column = begin + tl.arange(0, SPAN)
            inside = column < elements
            new = tl.load(now + column, mask=inside, other=0)
            old = tl.load(base + column, mask=inside, other=0)
            changed = new != old
            found = changed.to(tl.int32)
            target = place + tl.cumsum(found, axis=0) - 1
            tl.store(indices + room + target, first_element + column, mask=changed)
            tl.store(values + room + target, new.to(values.dtype.element_ty, bitcast=True), mask=changed)
            tl.store(olds + room + target, old.to(values.dtype.element_ty, bitcast=True), mask=changed)
            if UPDATE:
                tl.store(base + column, new, mask=changed)
            place += tl.sum(found, axis=0)


@triton.jit(do_not_specialize=["first"])  # else variants are compiled in mid-step
def _add(
    table, owner, starts, keys, sums, indices, values, olds, first, FIELDS: tl.constexpr, FOUND: tl.constexpr,
    STRIPS: tl.constexpr, LONG: tl.constexpr,
    BITS: tl.constexpr, WORK: tl.constexpr, SIZE: tl.constexpr, ROW: tl.constexpr,
    SEED: tl.constexpr, SHIFT_1: tl.constexpr, FACTOR_1: tl.constexpr,
    SHIFT_2: tl.constexpr, FACTOR_2: tl.constexpr, LAST: tl.constexpr,
    WEYL: tl.constexpr, ROW_SEED: tl.constexpr, COLUMN_SEED: tl.constexpr,
    SPLIT_1: tl.constexpr, SPLIT_2: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) + first
    start = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    if end > start:
        line = table + tl.load(owner + row) * FIELDS
        number = tl.load(line + 3) // ROW + row - tl.load(line + 4)
        mask = tl.load(line + 5).to(WORK)
        pattern = tl.load(line + 6).to(WORK)
        room = start - tl.load(starts + first)
        count = (end - start).to(tl.int32)
        strip_begin, width, pitch = tl.load(line + 8), tl.load(line + 9), tl.load(line + 10)
        shifts = tl.zeros([FOUND], dtype=tl.uint64)
        bad = tl.zeros([FOUND], dtype=tl.int32)
        begin = 0
        while begin < count:
            at = begin + tl.arange(0, FOUND)
            inside = at < count
            begin += FOUND
            # Not %: as int32, an index from 2^31 on is negative, and a remainder would be so, too.
            index = tl.load(indices + room + at, mask=inside, other=0)
            if STRIPS:
                place = index if LONG else index.to(tl.uint32, bitcast=True).to(tl.int64)
                strip_row = place // width
                place += strip_begin + strip_row * (pitch - width)
                index = place if LONG else place.to(tl.int32)
                tl.store(indices + room + at, index, mask=inside)
                row_keys = key((place // ROW).to(tl.uint64), ROW_SEED, WEYL, SPLIT_1, SPLIT_2)
            column = index & (ROW - 1)
            new = tl.load(values + room + at, mask=inside, other=0).to(BITS, bitcast=True).to(WORK)
            old = tl.load(olds + room + at, mask=inside, other=0).to(BITS, bitcast=True).to(WORK)
            bad += (inside & ((new & mask) == pattern)).to(tl.int32)
            after = mixed(new, SIZE, SEED, SHIFT_1, FACTOR_1, SHIFT_2, FACTOR_2, LAST).to(tl.uint64)
            before = mixed(old, SIZE, SEED, SHIFT_1, FACTOR_1, SHIFT_2, FACTOR_2, LAST).to(tl.uint64)
            # What is outside differs by 0.
            moved = (after - before) * tl.load(keys + column, mask=inside, other=0).to(tl.uint64, bitcast=True)
            if STRIPS:
                moved *= row_keys
            shifts += moved
        shift = tl.sum(shifts, axis=0)
        if not STRIPS:  # all of them are in one row of the tensor
            shift *= key(number.to(tl.uint64), ROW_SEED, WEYL, SPLIT_1, SPLIT_2)
        sums += 2 * tl.load(line + 7)
        tl.atomic_add(sums, shift.to(tl.int64, bitcast=True))
        wrong = tl.sum(bad, axis=0)
        if wrong > 0:
            tl.atomic_add(sums + 1, wrong.to(tl.int64))
