"""Fingerprints in host memory, by numpy: 1.5 GB/s and more of 16-bit elements on one core, 3 MB of memory a thread.

The elements go through in blocks that fit the processor's cache. In a block the narrow work (the bijection m) is done
at the element's own width, where one instruction takes 32 elements, and only the sum is 64 bits wide. numpy lets go of
the interpreter's lock meanwhile, so that threads can share out tensors. Larger blocks
let them do so less often, and wait for it less: with a quarter of the size 16 threads took more than twice as long.
"""

from functools import cache
from threading import local
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.fingerprint.definition import COLUMN_SEED, MASK, MIXES, ROW, ROW_SEED, SPLITMIX, WEYL

Bits = NDArray[np.unsignedinteger[Any]]

_ROWS = 64  # in a block: 512 KiB of 16-bit elements, and 2 MiB of products
_memory = local()  # a thread's blocks: to have them anew for each call costs as much as what is done in them
_TYPES: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits_of(data: NDArray[np.uint8], width: int) -> Bits:
    """Bytes as the unsigned integers that are their elements' bits, without a copy."""
    return data.view(_TYPES[width])


def fingerprint(bits: Bits, *, first: int = 0) -> int:
    """The fingerprint of a tensor, given as the bits of all its elements in order of index.

    Or what a part of it adds to that: the elements from `first` on, which is a multiple of `ROW`.
    """
    if first % ROW:
        raise ValueError(f"first is {first}: parts begin at a multiple of {ROW} elements")
    keys = column_keys()
    narrow, spare, wide = _blocks(bits.dtype)
    whole = len(bits) // ROW
    total = 0
    for row in range(0, whole, _ROWS):
        count = min(_ROWS, whole - row)
        block = bits[row * ROW : (row + count) * ROW].reshape(count, ROW)
        wide[:count] = mix(block, narrow[:count], spare[:count])
        sums = np.einsum("ij,j->i", wide[:count], keys)
        total += int(sums @ row_keys(first // ROW + row, count))
    rest = bits[whole * ROW :]
    if len(rest):
        total += int(share(np.arange(first + whole * ROW, first + len(bits), dtype=np.uint64), rest))
    return total & MASK


def _blocks(dtype: np.dtype[Any]) -> tuple[Bits, Bits, NDArray[np.uint64]]:
    """Two blocks of elements of a type, and one of products, of this thread."""
    if getattr(_memory, "dtype", None) != dtype:
        narrow, spare = np.empty((_ROWS, ROW), dtype), np.empty((_ROWS, ROW), dtype)
        _memory.dtype, _memory.blocks = dtype, (narrow, spare, np.empty((_ROWS, ROW), np.uint64))
    return _memory.blocks


def share(indices: NDArray[np.unsignedinteger[Any]], bits: Bits) -> int:
    """What elements at some flat indices add to a tensor's fingerprint."""
    total = 0
    for begin in range(0, len(indices), _ROWS * ROW):
        part = slice(begin, begin + _ROWS * ROW)
        at = indices[part].astype(np.uint64)
        values = mix(bits[part], np.empty_like(bits[part]), np.empty_like(bits[part])).astype(np.uint64)
        values *= column_keys()[at % ROW]
        total += int(keys_of_rows(at // ROW) @ values)
    return total & MASK


def updated(before: int, indices: NDArray[np.unsignedinteger[Any]], old: Bits, new: Bits) -> int:
    """The fingerprint after the elements at some indices, each named once, went from `old` to `new` bits."""
    return (before - share(indices, old) + share(indices, new)) & MASK


@cache
def column_keys() -> NDArray[np.uint64]:
    """R, for all columns."""
    keys = _keys(COLUMN_SEED, np.arange(ROW, dtype=np.uint64))
    keys.flags.writeable = False
    return keys


def row_keys(first: int, count: int) -> NDArray[np.uint64]:
    """Q, for rows that follow each other."""
    return keys_of_rows(np.arange(first, first + count, dtype=np.uint64))


def keys_of_rows(rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Q, for any rows."""
    return _keys(ROW_SEED, rows)


def _keys(seed: int, counts: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = counts + np.uint64(1)
    x *= np.uint64(WEYL)
    x += np.uint64(seed)
    for shift, factor in SPLITMIX:
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    x |= np.uint64(1)
    return x


def mix(bits: Bits, out: Bits, spare: Bits) -> Bits:
    """m, for a block. `out` and `spare` are of its shape and type; `out` is returned."""
    mix, kind = MIXES[bits.dtype.itemsize], bits.dtype.type
    np.bitwise_xor(bits, kind(mix.seed), out=out)
    for shift, factor in mix.rounds:
        np.right_shift(out, kind(shift), out=spare)
        np.bitwise_xor(out, spare, out=out)
        np.multiply(out, kind(factor), out=out)
    np.right_shift(out, kind(mix.last), out=spare)
    return np.bitwise_xor(out, spare, out=out)
