"""A tensor's fingerprint as docs/delta-format.md defines it, element by element."""

from typing import Any

from refitd_client.fingerprint.host import COLUMN_SEED, MASK, MIXES, ROW, ROW_SEED, SPLITMIX, WEYL


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
    """What one element adds to F.

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


def to_int(fingerprint: Any) -> int:
    """The number. Waits for the device."""
    return int(fingerprint.item()) & MASK
