# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN202, N803 - triton has constants in capitals, and reads annotations as its own
"""Comparison on an NVIDIA GPU: a count for each row, then the changes of all rows, close together and in order.

Between the two, the counts are summed up, so that each row knows where its changes go. Both read what is compared, at
the memory's speed, and no more: what changes do to the fingerprints is computed from the changes. `torch_ops.py` does
the same with torch's operations.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from refitd_client.fingerprint.host import COLUMN_SEED, ROW, SPLITMIX, WEYL
from refitd_client.fingerprint.kernel import constants, key, mixed
from refitd_client.fingerprint.rows import FIELDS, Rows

_SPAN, _WARPS = 256, 1  # elements that a program takes at a time, and by how many warps: others take 1/6 longer or more
_FOUND = 64  # changes that a program takes at a time: a row of 4096 elements has 41 when 1 % did


def count(rows: Rows, begin: int, end: int, counts: Any) -> None:
    """Write how many elements changed in each row.

    Args:
        rows: what is compared.
        begin: the first row.
        end: the row after the last.
        counts: an integer for each row of `rows`, where the results go.
    """
    taken = {name: value for name, value in constants(rows.listed.width).items() if name in {"BITS", "ROW"}}
    with torch.cuda.device(rows.device):
        _count[(end - begin,)](
            rows.table, rows.owner, counts, begin, FIELDS=FIELDS, ALIGNED=rows.listed.is_aligned, **taken, num_warps=8
        )


def report(starts: Any, begins: Any, out: Any) -> None:
    """Write `starts` at the places `begins` to `out`. A kernel does not queue behind copies to the host.

    Args:
        starts: int64 numbers on the GPU.
        begins: places among them, int64 on the GPU.
        out: page-locked host memory, int64.
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
