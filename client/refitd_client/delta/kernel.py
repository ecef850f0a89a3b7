# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN202, N803 - triton has constants in capitals, and reads annotations as its own
"""Comparison on an NVIDIA GPU: a count for each row, then the changes of all rows, close together and in order.

Between the two, the counts are summed up, so that each row knows where its changes go. Both read what is compared, at
the memory's speed; the second does all the rest in the same pass. `twin.py` says the same in torch's operations.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from refitd_client.fingerprint.definition import COLUMN_SEED, ROW, SPLITMIX, WEYL
from refitd_client.fingerprint.kernel import constants, key, mixed
from refitd_client.fingerprint.rows import FIELDS, Rows

_SPAN, _WARPS = 512, 4  # elements that a program takes at a time, and by how many: more take registers from others


def count(rows: Rows, begin: int, end: int, counts: Any) -> None:
    """Write how many elements changed in each of the rows from `begin` to `end` to `counts` (int32 a row)."""
    taken = {name: value for name, value in constants(rows.width).items() if name in {"BITS", "ROW", "num_warps"}}
    with torch.cuda.device(rows.device):
        _count[(end - begin,)](rows.table, rows.owner, counts, begin, FIELDS=FIELDS, ALIGNED=rows.is_aligned, **taken)


def take(
    rows: Rows, begin: int, end: int, *, starts: Any, keys: Any, sums: Any, indices: Any, values: Any, update: bool
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
        indices: has room for the flat indices from `starts[begin]` on, as int32 or int64; None to write none.
        values: the same for the bits that are there now.
        update: make the base what is there now.
    """
    has_output = indices is not None
    with torch.cuda.device(rows.device):
        _take[(end - begin,)](
            rows.table, rows.owner, starts, keys, sums, indices if has_output else sums, values if has_output else sums,
            begin, FIELDS=FIELDS, ALIGNED=rows.is_aligned, OUTPUT=has_output, UPDATE=update,
            INDEX=tl.int64 if has_output and indices.dtype == torch.int64 else tl.int32,
            SPAN=_SPAN, **constants(rows.width) | {"num_warps": _WARPS},
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


@triton.jit
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
def _take(
    table, owner, starts, keys, sums, indices, values, first,
    FIELDS: tl.constexpr, ALIGNED: tl.constexpr, OUTPUT: tl.constexpr, UPDATE: tl.constexpr, INDEX: tl.constexpr,
    SPAN: tl.constexpr,
    BITS: tl.constexpr, WORK: tl.constexpr, SIZE: tl.constexpr, ROW: tl.constexpr,
    SEED: tl.constexpr, SHIFT_1: tl.constexpr, FACTOR_1: tl.constexpr,
    SHIFT_2: tl.constexpr, FACTOR_2: tl.constexpr, LAST: tl.constexpr,
    WEYL: tl.constexpr, ROW_SEED: tl.constexpr, COLUMN_SEED: tl.constexpr,
    SPLIT_1: tl.constexpr, SPLIT_2: tl.constexpr,
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
        first_element = tl.load(line + 3) + here
        mask = tl.load(line + 5).to(WORK)
        pattern = tl.load(line + 6).to(WORK)
        room = start - tl.load(starts + first)
        place = 0
        shifts = tl.zeros([SPAN], dtype=tl.uint64)
        bad = tl.zeros([SPAN], dtype=tl.int32)
        for begin in range(0, ROW, SPAN):
            column = begin + tl.arange(0, SPAN)
            inside = column < elements
            new = tl.load(now + column, mask=inside, other=0)
            old = tl.load(base + column, mask=inside, other=0)
            changed = new != old
            if UPDATE:
                tl.store(base + column, new, mask=changed)
            if OUTPUT:
                count = changed.to(tl.int32)
                target = place + tl.cumsum(count, axis=0) - 1
                tl.store(indices + room + target, first_element.to(INDEX) + column, mask=changed)
                tl.store(values + room + target, new.to(values.dtype.element_ty, bitcast=True), mask=changed)
                place += tl.sum(count, axis=0)
            wide = new.to(WORK)
            bad += (changed & ((wide & mask) == pattern)).to(tl.int32)
            after = mixed(wide, SIZE, SEED, SHIFT_1, FACTOR_1, SHIFT_2, FACTOR_2, LAST).to(tl.uint64)
            before = mixed(old.to(WORK), SIZE, SEED, SHIFT_1, FACTOR_1, SHIFT_2, FACTOR_2, LAST).to(tl.uint64)
            # The bijection is one: what did not change, or is outside, differs by 0.
            shifts += (after - before) * tl.load(keys + column).to(tl.uint64, bitcast=True)
        row_key = key((first_element // ROW).to(tl.uint64), ROW_SEED, WEYL, SPLIT_1, SPLIT_2)
        sums += 2 * tl.load(line + 7)
        tl.atomic_add(sums, (tl.sum(shifts, axis=0) * row_key).to(tl.int64, bitcast=True))
        wrong = tl.sum(bad, axis=0)
        if wrong > 0:
            tl.atomic_add(sums + 1, wrong.to(tl.int64))
