# pyright: basic
"""Fingerprints by torch's own operations, on any device: the reference that the triton kernel is tested against.

torch has no arithmetic for uint64, but int64 wraps around in the same way; only shifts to the right need a mask. Takes
about 0.4 GB beside the tensor. Imported only where the caller passes torch tensors.
"""

from typing import Any

import torch

from refitd_client.checkpoint.finite import NO_RULE, Rule
from refitd_client.fingerprint.host import COLUMN_SEED, MIXES, ROW, ROW_SEED, SPLITMIX, WEYL

_BLOCK_ROWS = 4096  # in a block: 16 M elements
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flat_bits(tensor: Any) -> Any:
    """A tensor's elements as integers of their width, one after the other; a view where the tensor is contiguous."""
    flat = tensor.detach()
    if not flat.is_contiguous() or flat.is_neg():
        flat = flat.resolve_neg().contiguous()
    flat = flat.view(-1)
    return flat.view(INTEGERS[flat.element_size()])


def add_scan(bits: Any, rule: Rule, out: Any) -> None:
    """Add a tensor's fingerprint, and how many elements are NaN or infinite, to `out`.

    Args:
        bits: what `flat_bits` returned.
        rule: the dtype's, for NaN and infinity.
        out: two int64 on the same device.
    """
    out[0] += fingerprint(bits)
    out[1] += nonfinite(bits, rule).sum()


def nonfinite(bits: Any, rule: Rule) -> Any:
    """Which elements are NaN or infinite by the rule of their dtype, as booleans."""
    if rule == NO_RULE:
        return torch.zeros_like(bits, dtype=torch.bool)
    # The rule's numbers in a type of torch's, all of which but uint8 have a sign.
    largest, size = torch.iinfo(bits.dtype).max, 8 * bits.element_size()
    mask, pattern = (number if number <= largest else number - 2**size for number in rule)
    return (bits & mask) == pattern


def fingerprint(bits: Any) -> Any:
    """The fingerprint as an int64 scalar on the device of `bits` (from `flat_bits`). Does not wait for the GPU."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.numel(), _BLOCK_ROWS * ROW):
        part = bits[begin : begin + _BLOCK_ROWS * ROW]
        total += share(torch.arange(begin, begin + part.numel(), device=bits.device), part)
    return total


def share(indices: Any, bits: Any) -> Any:
    """What elements at some flat indices (int64) add to a fingerprint, as an int64 scalar on their device."""
    return terms(indices, bits).sum()


def terms(indices: Any, bits: Any) -> Any:
    """The same for each element: int64 of the shape of `bits`."""
    keys = _keys(COLUMN_SEED, torch.arange(ROW, device=bits.device))[indices % ROW]
    keys *= _keys(ROW_SEED, indices // ROW)
    width = bits.element_size()
    mix, size = MIXES[width], 8 * width
    mask = signed(2**size - 1)
    x = (bits.to(torch.int64) & mask) ^ signed(mix.seed)
    for shift, factor in mix.rounds:
        x = ((x ^ _shifted(x, shift, size)) * signed(factor)) & mask
    return keys * (x ^ _shifted(x, mix.last, size))


def signed(number: int) -> int:
    """The int64 with the bits of a number below 2^64."""
    return number - 2**64 if number >= 2**63 else number


def _keys(seed: int, counts: Any) -> Any:
    x = (counts + 1) * signed(WEYL) + signed(seed)
    for shift, factor in SPLITMIX:
        x = (x ^ _shifted(x, shift, 64)) * signed(factor)
    return (x ^ _shifted(x, 31, 64)) | 1


def _shifted(x: Any, shift: int, size: int) -> Any:
    return (x >> shift) & (2 ** (size - shift) - 1)
