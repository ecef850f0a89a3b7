"""The shadow of a version that several ranks hold, as rank 0 sees it: each rank has that of its own parts.

Rank 0 numbers each shadow. Every opening says which one a rank has, and every outcome which one stands: so a rank that
has lost its copy, or kept one of a version that was given up, is never asked to compare with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.delta.change import Indices
from refitd_client.delta.shadow import OTHERS, ChangedElements, ShadowDiff
from refitd_client.errors import PublishError
from refitd_client.fingerprint import Bits
from refitd_client.fingerprint.host import MASK
from refitd_client.lanes import in_lanes, lanes_for
from refitd_client.sharded.compared import compared_parts, join
from refitd_client.sharded.parts import entries_of
from refitd_client.sharded.rank_errors import error_of_rank, ranks_named
from refitd_client.sharded.rank_group import FailedReply, RankOrder
from refitd_client.sharded.rank_shadow import unpacked
from refitd_client.sharded.shadow_orders import ChangesReply, CompareOrder, GatherOrder, KeepOrder

if TYPE_CHECKING:
    from refitd_client.sharded.shared_shards import SharedShards


@dataclass(slots=True)
class ShadowCount:
    """How many shadows rank 0 has had, and the number of the one that stands: 0 where none does."""

    made: int = 0
    number: int = 0

    def begin(self) -> int:
        """Count another one. It does not stand yet."""
        self.made, self.number = self.made + 1, 0
        return self.made


class SharedShadows:
    """One of them (`delta.shadow.VersionShadows`). `fingerprints` are those of the whole tensors."""

    def __init__(self, shards: "SharedShards") -> None:
        """Have every rank copy its parts.

        Raises:
            PublishError: a rank could not, or is lost.
        """
        self._shards, self._count = shards, shards.shadow_count
        self._layout = shards.agreed.number
        parts = compared_parts(shards.agreed.claims, shards.agreed.layout)
        self._names = [frozenset(part.name for part in own) for own in parts]
        self._number = self._count.begin()
        orders = [KeepOrder(number=self._number, parts=own) for own in parts]
        self.fingerprints = {entry.name: 0 for entry in entries_of(shards.agreed.layout)}
        self._add(self._asked(orders, "copy what it compares"))
        self._count.number = self._number

    def unfit(self, shards: "SharedShards") -> str | None:
        """Why the ranks cannot compare; None where every rank has the copy, and holds the same parts as then."""
        if shards.agreed.number != self._layout:
            return OTHERS
        without = [rank for rank, number in enumerate(shards.shadow_numbers) if number != self._number]
        if not without:
            return None
        has = "has" if len(without) == 1 else "have"
        return f"nothing to compare with: {ranks_named(without)} {has} no copy of the last version"

    def find(self, shards: "SharedShards", most: int) -> ShadowDiff:
        """As `Shadow.find`, of all ranks. A value that is not finite is refused by the rank that has it.

        Raises:
            PublishError: a rank could not, or is lost.
        """
        self._shards = shards
        orders = [CompareOrder(number=self._number, most=most)] * len(self._names)
        replies = self._asked(orders, "compare its part")
        self._add(replies)
        count = sum(reply.count for reply in replies)
        if count > most:
            return ShadowDiff(count=count)
        return ShadowDiff(count=count, found=_joined(replies))

    def gather(self, wanted: Mapping[str, Indices]) -> dict[str, Bits]:
        """As `Shadow.gather`, of all ranks.

        Raises:
            PublishError: a rank could not, or is lost.
        """
        if not wanted:
            return {}
        orders = [
            GatherOrder(number=self._number, wanted={name: at for name, at in wanted.items() if name in names})
            for names in self._names
        ]
        found = _joined(self._asked(orders, "read its copy"))
        if any(name not in found or len(found[name].indices) != len(at) for name, at in wanted.items()):
            raise PublishError("the ranks' copies together are not those of whole tensors")
        return {name: found[name].values for name in wanted}

    def close(self) -> None:
        """Say that it does not stand any more. Ranks free their copies when they hear how the publication ended."""
        if self._count.number == self._number:
            self._count.number = 0

    def _add(self, replies: Sequence[ChangesReply]) -> None:
        for reply in replies:
            for name, shift in reply.shifts.items():
                self.fingerprints[name] = (self.fingerprints[name] + shift) & MASK

    def _asked(self, orders: Sequence[RankOrder], doing: str) -> list[ChangesReply]:
        found: list[ChangesReply] = []
        for rank, reply in enumerate(self._shards.ask(orders, doing)):
            match reply:
                case ChangesReply():
                    found.append(reply)
                case FailedReply(error=error):
                    raise error_of_rank(rank, error) from error
                case other:
                    raise PublishError(f"rank {rank} says {other!r}: do all ranks run one refitd?")
        return found


def _joined(replies: Sequence[ChangesReply]) -> dict[str, ChangedElements]:
    """The changes of whole tensors, in order of name: one behind the other, so that they are written in few pieces."""
    pieces: dict[str, list[tuple[Indices, Bits]]] = {}
    for reply in replies:
        for name, indices, values in unpacked(reply.packed):
            pieces.setdefault(name, []).append((indices, values))
    kinds: dict[tuple[Any, Any], list[str]] = {}
    for name in sorted(pieces):
        indices, values = pieces[name][0]
        kinds.setdefault((indices.dtype, values.dtype), []).append(name)
    found: dict[str, ChangedElements] = {}
    for types, names in kinds.items():
        ends = [0, *accumulate(sum(len(indices) for indices, _ in pieces[name]) for name in names)]
        rooms: list[NDArray[Any]] = [np.empty(ends[-1], kind) for kind in types]
        for name, (begin, end) in zip(names, pairwise(ends), strict=True):
            indices, values = (room[begin:end] for room in rooms)
            found[name] = ChangedElements(indices=indices, values=values)

    def put_together(name: str, _: Event) -> None:
        join(pieces[name], found[name].indices, found[name].values)

    jobs = [partial(put_together, name) for name in sorted(pieces, key=lambda name: -len(found[name].indices))]
    in_lanes(jobs, lanes=lanes_for(len(jobs)))
    return {name: found[name] for name in sorted(found)}
