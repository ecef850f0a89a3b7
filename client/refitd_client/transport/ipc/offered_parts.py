"""Tensors that several ranks of a trainer lend in parts: are the parts the tensor, and what are pieces called? Pure.

A piece is a part as a tensor of its own, of one dimension. Its name is the tensor's with a zero byte and the part's
number, which no tensor of a checkpoint has.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from refitd_client.checkpoint.header import BITS
from refitd_client.transport.shards.strips import Strip, common

if TYPE_CHECKING:
    from refitd_client.transport.ipc.offer import OfferedPart, OfferedTensor

_MARK = "\0"
_LENDER_LOCK = re.compile(r"\.lender-[0-9a-f]{16}\.lock")


def piece_name(tensor: str, number: int) -> str:
    """The name of a part."""
    return f"{tensor}{_MARK}{number}"


def is_lock_name(name: str) -> bool:
    """Whether a rank of a trainer could have given its lock this name."""
    return _LENDER_LOCK.fullmatch(name) is not None


def strips_of(parts: "Sequence[OfferedPart]") -> list[Strip]:
    """The bytes of a tensor that each part has."""
    return [Strip(part.begin, part.width, part.rows, part.pitch) for part in parts]


def fault_of_parts(tensor: "OfferedTensor") -> str | None:
    """Why the parts of a tensor are not the tensor, each of its bytes once; None where they are."""
    if _MARK in tensor.name:
        return "its name has a zero byte"
    item = max(1, BITS[tensor.dtype] // 8)
    for part in tensor.parts:
        numbers = part.begin, part.width, part.pitch
        if part.begin < 0 or part.width < 1 or part.rows < 1 or (part.rows > 1 and part.pitch < part.width):
            return "a part has no bytes, or rows that overlap"
        if any(number % item for number in numbers):
            return "a part begins or ends within an element"
        if part.end > tensor.nbytes:
            return "a part ends beyond it"
    if sum(part.nbytes for part in tensor.parts) != tensor.nbytes:
        return "its parts have not as many bytes as it has"
    return "two of its parts overlap" if _overlap(strips_of(tensor.parts)) else None


def _overlap(strips: Sequence[Strip]) -> bool:
    """Whether any byte is in two strips."""
    waiting = list[Strip]()  # those that may reach the next one
    for each in sorted(strips):
        waiting = [before for before in waiting if before.end > each.begin]
        if any(common(before, each) for before in waiting):
            return True
        waiting.append(each)
    return False
