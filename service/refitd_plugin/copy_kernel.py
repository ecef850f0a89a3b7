# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN202, N803 - triton has constants in capitals, and reads annotations as its own
"""What `device_copies.py` does on an NVIDIA GPU: stretches of its memory copied to others, all by one launch."""

from typing import Any

import torch
import triton
import triton.language as tl

from refitd_plugin.device_copies import COLUMNS

_COPIED_WORDS = 4096  # words of 8 bytes that a program copies at a time: 128 bytes for each thread


def copy(table: Any) -> None:
    """Copy all stretches of a table along the current stream. Does not wait.

    Args:
        table: int64 on the GPU, a row for each stretch (`device_copies.py`). None may overlap what another one writes.
    """
    with torch.cuda.device(table.device):
        _copy[(table.shape[0],)](table, COLUMNS=COLUMNS, BLOCK=_COPIED_WORDS, num_warps=8)


@triton.jit
def _copy(table, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    line = table + tl.program_id(0).to(tl.int64) * COLUMNS
    target = tl.multiple_of(tl.load(line).to(tl.pointer_type(tl.int64)), 16)
    source = tl.multiple_of(tl.load(line + 1).to(tl.pointer_type(tl.int64)), 16)
    words = tl.load(line + 2)
    column = tl.arange(0, BLOCK)
    whole = words // BLOCK * BLOCK
    begin = words - words
    while begin < whole:  # without a mask, a thread moves 16 bytes at once
        tl.store(target + begin + column, tl.load(source + begin + column))
        begin += BLOCK
    inside = begin + column < words
    tl.store(target + begin + column, tl.load(source + begin + column, mask=inside, other=0), mask=inside)
