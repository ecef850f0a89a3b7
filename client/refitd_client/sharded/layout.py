"""Who writes what where: decided once, by rank 0, from the claims of all ranks. Pure.

Files are cut by the same code as those of a gathered save, so they have the same names, headers and order of tensors.
A box that several ranks hold is shared out over them: a large one in equal parts, a small one to the rank that has
least to write. So a replicated model is written by all its ranks at once, and an HSDP model by all its replicas.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from refitd_client.sharded.boxes import Box
from refitd_client.sharded.claims import Claim, Place, Whole, unite
from refitd_client.tensors.source import TensorSource
from refitd_client.tensors.tied import without_second_names
from refitd_client.write import plan as shard
from refitd_client.write.shards import TensorShards

# Below this a box is not split: opening another range costs more than writing it.
_SPLIT_BYTES = 2**18
# Parts end at whole pages as seen from the box, so that two ranks seldom write to one page.
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `begin` to `end` of a rank's box `box` of tensor `name`."""

    name: str
    box: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Location:
    """Where a tensor lies: in which file (by number), and from which byte on."""

    file: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A version's files, where each tensor lies in them, and the parts that each rank writes."""

    shards: TensorShards
    locations: dict[str, Location]
    parts: list[list[Part]]
    shared: dict[str, list[list[int]]] = field(default_factory=dict[str, list[list[int]]])
    """Which ranks hold the same box, so that they can be held against each other."""


def lay_out(
    claims: list[list[Claim]],
    *,
    inventory: Callable[[], frozenset[str] | None],
    max_shard_bytes: int | None,
    check_finite: bool,
) -> Layout:
    """Decide a version's layout.

    `inventory` gives the names in the base model's checkpoint, None if there is none.

    Raises:
        InvalidWeightsError: the claims are no version.
    """
    wholes = {whole.entry.name: whole for whole in unite(claims)}
    sources = [TensorSource(entry=whole.entry, read=_unread, memory=_memory(whole)) for whole in wholes.values()]
    second = [f"^{re.escape(name)}$" for name, whole in wholes.items() if whole.second]
    sources = without_second_names(sources, inventory=inventory, second=second)
    cut = TensorShards(shards=shard.cut(sources, max_shard_bytes=max_shard_bytes), check_finite=check_finite)
    kept = [wholes[source.entry.name] for source in sources]
    return Layout(
        shards=cut,
        locations=_locations(cut),
        parts=_shared_out(kept, len(claims)),
        shared={whole.entry.name: groups for whole in kept if (groups := _groups(whole))},
    )


def spread(sizes: dict[str, int], ranks: int) -> list[list[str]]:
    """Files for each rank to digest: the largest first, each to the rank that has least."""
    load = [0] * ranks
    spread: list[list[str]] = [[] for _ in range(ranks)]
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        rank = load.index(min(load))
        load[rank] += size
        spread[rank].append(name)
    return spread


def _memory(whole: Whole) -> tuple[str | None, ...] | None:
    """Equal for names of the same memory on every rank that has a part of it. An empty part has no memory."""
    return whole.memories if any(whole.memories) else None


def _locations(cut: TensorShards) -> dict[str, Location]:
    locations: dict[str, Location] = {}
    for number, file in enumerate(cut.shards):
        offset = len(file.header)
        for entry in file.entries:
            locations[entry.name] = Location(number, offset)
            offset += entry.nbytes
    return locations


def _shared_out(wholes: Sequence[Whole], ranks: int) -> list[list[Part]]:
    load = [0] * ranks
    parts: list[list[Part]] = [[] for _ in range(ranks)]
    for whole in wholes:
        for box, places in whole.holders.items():
            for place, begin, end in _split(box, places, whole, load):
                load[place.rank] += (end - begin) * whole.item
                parts[place.rank].append(Part(whole.entry.name, place.box, begin, end))
    return parts


def _split(box: Box, places: Sequence[Place], whole: Whole, load: Sequence[int]) -> list[tuple[Place, int, int]]:
    if len(places) == 1 or box.count * whole.item < _SPLIT_BYTES:
        return [(min(places, key=lambda place: (load[place.rank], place.rank)), 0, box.count)]
    step = -(-box.count // len(places))
    step = -(-step // _PAGE) * _PAGE
    cuts = [(place, step * number, min(box.count, step * (number + 1))) for number, place in enumerate(places)]
    return [(place, begin, end) for place, begin, end in cuts if begin < end]


def _groups(whole: Whole) -> list[list[int]]:
    return [[place.rank for place in places] for places in whole.holders.values() if len(places) > 1]


def _unread() -> NDArray[np.uint8]:
    raise NotImplementedError("a layout has no bytes")
