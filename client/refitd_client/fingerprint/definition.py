"""The definition of a tensor's fingerprint, the same for numpy, torch and triton (also in docs/delta-format.md).

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
"""

from collections.abc import Mapping
from dataclasses import dataclass

from refitd_client.checkpoint.header import BITS

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


def width_of(dtype: str) -> int:
    """Bytes that are one element of a safetensors `dtype` here: types below a byte are taken byte by byte."""
    return max(1, BITS[dtype] // 8)


def key_of_column(column: int) -> int:
    """R: the key of a column."""
    return _splitmix(COLUMN_SEED, column) | 1


def key_of_row(row: int) -> int:
    """Q: the key of a row."""
    return _splitmix(ROW_SEED, row) | 1


def mixed(bits: int, width: int) -> int:
    """The bijection m."""
    mix, mask = MIXES[width], 2 ** (8 * width) - 1
    bits ^= mix.seed
    for shift, factor in mix.rounds:
        bits = ((bits ^ (bits >> shift)) * factor) & mask
    return bits ^ (bits >> mix.last)


def share_of(index: int, bits: int, width: int) -> int:
    """What one element adds to F. Slow: it is the definition that tests compare the fast implementations with.

    Args:
        index: the element's flat index.
        bits: its bits as an unsigned integer.
        width: its bytes.
    """
    return (key_of_row(index // ROW) * key_of_column(index % ROW) * mixed(bits, width)) & MASK


def _splitmix(seed: int, count: int) -> int:
    """The `count`th number of splitmix64 from a seed on (https://prng.di.unimi.it/splitmix64.c)."""
    x = (seed + (count + 1) * WEYL) & MASK
    for shift, factor in SPLITMIX:
        x = ((x ^ (x >> shift)) * factor) & MASK
    return x ^ (x >> 31)


def to_text(fingerprint: int) -> str:
    """A fingerprint in manifests and deltas: 16 hexadecimal digits."""
    return f"{fingerprint:016x}"


def to_texts(fingerprints: Mapping[str, int]) -> dict[str, str]:
    """The fingerprints of many tensors in manifests, in order of their names."""
    return {name: to_text(found) for name, found in sorted(fingerprints.items())}
