"""What each rank says it holds: names, dtypes, shapes and boxes of the whole tensors, without any of their bytes."""

from dataclasses import dataclass
from math import prod

from refitd_client.checkpoint.header import Entry
from refitd_client.errors import InvalidWeightsError
from refitd_client.sharded.boxes import Box, tile
from refitd_client.tensors.source import entry_of, refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A rank's part of one tensor.

    `name` and `dtype` (torch's name) are those of the published tensor, `shape` is the whole tensor's. `memory` is the
    first of this rank's names for the same memory, None where the rank's part is empty. `second` says that the module
    declares the name to be a second one of a tied weight.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    memory: str | None
    second: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Who holds a box: rank, and the box's number in that rank's claim."""

    rank: int
    box: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A tensor that the claims of all ranks make up: every box of it, with those who hold it.

    `memories` are the ranks' names for its memory, which two names of a tied weight have in common.
    """

    entry: Entry
    shape: tuple[int, ...]
    holders: dict[Box, list[Place]]
    memories: tuple[str | None, ...]
    second: bool

    @property
    def item(self) -> int:
        """Bytes of one element, as torch counts elements."""
        count = prod(self.shape)
        return self.entry.nbytes // count if count else 0


def unite(claims: list[list[Claim]]) -> list[Whole]:
    """Put the claims of all ranks together, in order of rank 0's names and then of the others'.

    Raises:
        InvalidWeightsError: ranks disagree about a tensor, or hold no whole one together.
    """
    by_name: dict[str, list[tuple[int, Claim]]] = {}
    for rank, own in enumerate(claims):
        for claim in own:
            by_name.setdefault(claim.name, []).append((rank, claim))
    return [_united(found, len(claims)) for found in by_name.values()]


def _united(found: list[tuple[int, Claim]], ranks: int) -> Whole:
    first_rank, first = found[0]
    holders: dict[Box, list[Place]] = {}
    memories: list[str | None] = [None] * ranks
    for rank, claim in found:
        if (claim.dtype, claim.shape) != (first.dtype, first.shape):
            raise _disagreement(first_rank, first, rank, claim)
        memories[rank] = claim.memory
        for number, box in enumerate(claim.boxes):
            holders.setdefault(box, []).append(Place(rank, number))
    if not tile(holders, first.shape):
        raise refused(
            first.name,
            f"of shape {list(first.shape)} is not whole: the parts of ranks {[rank for rank, _ in found]} leave holes "
            "or overlap; is a rank missing from the process group, or a Sharded(...) wrong?",
        )
    return Whole(
        entry=entry_of(first.name, first.dtype, first.shape),
        shape=first.shape,
        holders=holders,
        memories=tuple(memories),
        second=any(claim.second for _, claim in found),
    )


def _disagreement(one_rank: int, one: Claim, other_rank: int, other: Claim) -> InvalidWeightsError:
    return refused(
        one.name,
        f"is {one.dtype} of shape {list(one.shape)} on rank {one_rank} and {other.dtype} of shape {list(other.shape)} "
        f"on rank {other_rank}: if these are parts of one tensor, pass DTensors or say so with "
        "sharded={name: Sharded(dim, index, count)}",
    )
