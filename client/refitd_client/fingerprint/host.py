"""The definition of a tensor's fingerprint, and numpy's implementation.

The definition is the same for numpy, torch and triton (also in docs/delta-format.md):

    F = Σ K(i) · m(bits_i)  mod 2^64        over the elements i = 0, 1, 2, … in order of index (row-major)

    K(i) = Q(i div 4096) · R(i mod 4096)    an odd number for each index, out of two streams of splitmix64
    m                                        a bijection of the element's bits: two rounds of xor-shift and multiply

`bits_i` is the element's bits as an unsigned integer of its width: 8, 16, 32 or 64. Types below a byte are taken byte
by byte. It is a sum, so parts can be summed in any order, by any number of processors, and a change updates it by
subtracting what the old elements added and adding what the new ones add.

Its strength: K is odd, so one changed element always changes F. For tensors that differ in more, F is a multilinear
hash (Lemire, Kaser: "Strongly universal string hashing is fast", The Computer Journal 57, 2014): over random keys two
different tensors of 16-bit elements have the same F with a probability of about 2^-60, and of 2^-43 in the worst case.
It finds accidents (a lost, doubled or misplaced update). It does not keep out a forger, who knows the keys.

In host memory numpy does 0.6 GB/s and more of 16-bit elements on one core, with 10 MiB of memory a thread. The elements
go through in blocks. The bijection m of narrow elements is looked up in a list of all: that takes two calls, and to
compute it takes nine. numpy releases the interpreter's lock meanwhile, so threads can share out tensors. Larger blocks
release it less often, and wait for it less: with blocks of a quarter of the size 16 threads took twice as long, and one
thread a tenth less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from threading import Event, local
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.header import BITS
from refitd_client.lanes import in_lanes, lanes_for

MASK = 2**64 - 1
ROW = 4096
"""Elements that share a Q."""

WEYL = 0x9E3779B97F4A7C15
COLUMN_SEED = 0x243F6A8885A308D3
ROW_SEED = 0x13198A2E03707344


@dataclass(frozen=True, slots=True)
class Mix:
    """The bijection m for one width: x ^= seed; twice (x ^= x >> shift; x *= factor); x ^= x >> last."""

    seed: int
    rounds: tuple[tuple[int, int], tuple[int, int]]
    last: int


SPLITMIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
MIXES = {
    1: Mix(0xA7, ((4, 0x2D), (3, 0x95)), 4),
    2: Mix(0x5BD1, ((8, 0x88B5), (7, 0xDB2D)), 9),
    4: Mix(0x9E3779B9, ((16, 0x7FEB352D), (15, 0x846CA68B)), 16),
    8: Mix(WEYL, SPLITMIX, 31),
}
"""By the element's width in bytes. 2 and 4 are Wellons' (github.com/skeeto/hash-prospector), 8 is splitmix64's."""


@cache
def width_of(dtype: str) -> int:
    """Bytes that are one element of a safetensors `dtype` here: types below a byte are taken byte by byte."""
    return max(1, BITS[dtype] // 8)


Bits = NDArray[np.unsignedinteger[Any]]

_LISTED_BYTES = 2  # bytes of an element at most, of which a list has all that m gives
_LISTED_ROWS = 256  # in a block: 2 MiB of 16-bit elements, and 8 MiB of their places in that list
_blocks = local()  # a thread's blocks: allocating them for each call costs as much as the computation
_TYPES: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits_of(data: NDArray[np.uint8], width: int) -> Bits:
    """Bytes as the unsigned integers that are their elements' bits, without a copy."""
    return data.view(_TYPES[width])


def fingerprint(bits: Bits, *, first: int = 0) -> int:
    """The fingerprint of a tensor, given as the bits of all its elements in row-major order.

    Of a part of a tensor it is what the part adds: the elements from `first` on, which is a multiple of `ROW`.

    Raises:
        ValueError: `first` is no multiple of `ROW`.
    """
    if first % ROW:
        raise ValueError(f"first is {first}: parts begin at a multiple of {ROW} elements")
    if not hasattr(_blocks, "room"):
        _blocks.room = np.empty((2, _LISTED_ROWS * ROW), np.uint64)
    out, spare = cast("NDArray[np.uint64]", _blocks.room)
    table = _all_mixed(bits.itemsize) if bits.itemsize <= _LISTED_BYTES else None
    keys, rows, total = column_keys(), len(bits) // ROW, 0
    for row in range(0, rows, _LISTED_ROWS):
        count = min(_LISTED_ROWS, rows - row)
        block = bits[row * ROW : (row + count) * ROW]
        mixed = out.view(bits.dtype)[: len(block)]
        if table is None:
            mix(block, mixed, spare.view(bits.dtype)[: len(block)])
        else:
            places = spare.view(np.intp)[: len(block)]
            places[:] = block
            table.take(places, out=mixed, mode="wrap")  # the other modes make a copy
        sums = np.einsum("ij,j->i", mixed.reshape(count, ROW), keys)  # widens a few thousand elements at a time
        begin = first // ROW + row
        total += int(sums @ keys_of_rows(np.arange(begin, begin + count, dtype=np.uint64)))
    rest = bits[rows * ROW :]
    if len(rest):
        total += int(share(np.arange(first + rows * ROW, first + len(bits), dtype=np.uint64), rest))
    return total & MASK


@cache
def _all_mixed(width: int) -> Bits:
    bits = np.arange(2 ** (8 * width), dtype=np.uint32).astype(_TYPES[width])
    return mix(bits, np.empty_like(bits), np.empty_like(bits))


def share(indices: NDArray[np.unsignedinteger[Any]], bits: Bits) -> int:
    """What the elements at some flat indices add to a tensor's fingerprint."""
    total = 0
    for begin in range(0, len(indices), _LISTED_ROWS * ROW):
        part = slice(begin, begin + _LISTED_ROWS * ROW)
        total += int(terms(indices[part], bits[part]).sum())
    return total & MASK


def terms(indices: NDArray[np.unsignedinteger[Any]], bits: Bits) -> NDArray[np.uint64]:
    """What each element adds to its tensor's fingerprint, mod 2^64. `indices` are flat ones in the tensors, which may
    be several.
    """
    at = indices.astype(np.uint64)
    values = mix(bits, np.empty_like(bits), np.empty_like(bits)).astype(np.uint64)
    values *= column_keys()[at % ROW]
    rows = at // ROW
    values *= keys_of_rows(rows) if rows.any() else _FIRST_ROW
    return values


def fingerprints_together(bits: Bits, sizes: NDArray[np.int64]) -> list[int]:
    """The fingerprints of small tensors that lie one after the other.

    A numpy call takes microseconds, and a tensor's fingerprint takes a dozen: this takes them for all tensors.

    `sizes` are how many elements each has, none 0.
    """
    ends = np.cumsum(sizes)
    begins = (ends - sizes).astype(np.int64)
    local = np.arange(len(bits), dtype=np.uint64) - np.repeat(begins.astype(np.uint64), sizes)
    return np.add.reduceat(terms(local, bits), begins).tolist()


def updated(before: int, indices: NDArray[np.unsignedinteger[Any]], old: Bits, new: Bits) -> int:
    """The fingerprint after elements at some flat indices, each named once, changed from `old` to `new`."""
    return (before - share(indices, old) + share(indices, new)) & MASK


@cache
def column_keys() -> NDArray[np.uint64]:
    """R, of all columns."""
    keys = _keys(COLUMN_SEED, np.arange(ROW, dtype=np.uint64))
    keys.flags.writeable = False
    return keys


def keys_of_rows(rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Q, of rows."""
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


_FIRST_ROW = keys_of_rows(np.zeros(1, dtype=np.uint64))[0]


def mix(bits: Bits, out: Bits, spare: Bits) -> Bits:
    """The bijection m of a block, written to `out`, which is returned. `spare` is memory of the same shape and type to
    work in.
    """
    mix, kind = MIXES[bits.dtype.itemsize], bits.dtype.type
    np.bitwise_xor(bits, kind(mix.seed), out=out)
    for shift, factor in mix.rounds:
        np.right_shift(out, kind(shift), out=spare)
        np.bitwise_xor(out, spare, out=out)
        np.multiply(out, kind(factor), out=out)
    np.right_shift(out, kind(mix.last), out=spare)
    return np.bitwise_xor(out, spare, out=out)


_SHIFTED = 2**18  # elements that a thread takes at a time


def shifts_of(counts: Sequence[int], indices: NDArray[Any], after: Bits, before: Bits) -> list[int]:
    """What the changes of each piece add to its tensor's fingerprint.

    `counts` are how many elements each piece has, none 0; pieces lie one after the other in the arrays. `indices` are
    flat ones in the tensors.
    """
    if not counts:
        return []
    begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    blocks = [(first, min(first + _SHIFTED, len(indices))) for first in range(0, len(indices), _SHIFTED)]
    found: list[NDArray[np.uint64]] = [np.empty(0, np.uint64)] * len(blocks)
    places = [_pieces(begins, *block) for block in blocks]

    def work(number: int, stop: Event) -> None:
        if not stop.is_set():
            here = slice(*blocks[number])
            moved = terms(indices[here], after[here]) - terms(indices[here], before[here])
            found[number] = np.add.reduceat(moved, places[number][1])

    jobs = [partial(work, number) for number in range(len(blocks))]
    in_lanes(jobs, lanes=lanes_for(len(jobs)))
    totals = np.zeros(len(counts), np.uint64)
    for (first, starts), sums in zip(places, found, strict=True):
        totals[first : first + len(starts)] += sums
    return totals.tolist()


def _pieces(begins: NDArray[np.int64], first: int, end: int) -> tuple[int, NDArray[np.int64]]:
    """The first piece that a block has some of, and where the pieces begin in the block."""
    low = int(np.searchsorted(begins, first, side="right")) - 1
    high = int(np.searchsorted(begins, end, side="left"))
    return low, np.maximum(begins[low:high], first) - first
