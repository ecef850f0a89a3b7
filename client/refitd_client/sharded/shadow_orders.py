"""What rank 0 asks the others for where a delta is looked for, and what they answer (`rank_group.py`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from refitd_client.delta.change import Indices
from refitd_client.fingerprint import Bits
from refitd_client.sharded.layout import WritePart


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOrder:
    """Copy these parts, as shadow `number`. Boxes are those that the rank holds (`Claim.held_boxes`)."""

    number: int
    parts: list[WritePart]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOrder:
    """Compare your parts with shadow `number`. If more than `most` elements changed, how many is enough."""

    number: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatherOrder:
    """Say what is in shadow `number` at these flat indices of whole tensors, of which the rank has some."""

    number: int
    wanted: Mapping[str, Indices]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedChanges:
    """Elements of many tensors with the same types, one after the other: few large arrays are sent faster.

    Piece `i` is `counts[i]` elements of tensor `names[i]`: their flat indices in the whole tensor, in strict order, and
    their bits. A tensor may have several pieces.
    """

    names: Sequence[str]
    counts: Sequence[int]
    indices: Indices
    values: Bits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChangesReply:
    """What a rank has found in its parts: `count` elements that changed, and, unless they are too many, which.

    `shifts` are what to add to the tensors' fingerprints.
    """

    count: int = 0
    shifts: dict[str, int] = field(default_factory=dict[str, int])
    packed: Sequence[PackedChanges] = ()


ShadowOrder = KeepOrder | CompareOrder | GatherOrder
