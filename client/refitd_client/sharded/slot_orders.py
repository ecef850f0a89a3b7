"""What rank 0 asks of the ranks whose GPUs copy into a slot, and what they answer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refitd_client.sharded.rank_group import RankTask


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOrder:
    """Have your GPU copy your parts into the slot that is this staging folder of the run, and begin to digest your
    blocks of it. `task` as for `WriteOrder`; `fingerprints` says whether these are wanted.
    """

    staging: str
    task: "RankTask | None"
    fingerprints: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksOrder:
    """All ranks have copied their parts: say what your blocks' digests are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksReply:
    """The digests of this rank's blocks (`slot_pieces.blocks_of`), in their order."""

    digests: list[bytes]


SlotOrder = CopyOrder | BlocksOrder
