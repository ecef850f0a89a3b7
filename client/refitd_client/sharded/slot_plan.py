"""What one rank copies into the files of a slot, in order; and which blocks of the files it digests.

Ranks go through the files alike, so that blocks which several of them write are whole early. The plan is worked out
once, and used as long as the rank's tensors stay in place.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from threading import Lock
from typing import Any

from refitd_client.contract.manifest import BLOCK, blocks
from refitd_client.fingerprint import Scan
from refitd_client.fingerprint.tensors import part_scans
from refitd_client.sharded.holdings import Holding, gpu_of
from refitd_client.sharded.layout import Claim, Location
from refitd_client.sharded.orders import RankTask
from refitd_client.sharded.parts import PartScanner, SentPart, add_scans, lying, part_input, sent_parts
from refitd_client.transport.schedule import Strip, cut


@dataclass(frozen=True, slots=True)
class SlotPiece:
    """Bytes of a part from byte `at` of the part on, which go to a `strip` of their file.

    When it is there, so are all others of this rank that begin before byte `reached` of the file.
    """

    at: int
    strip: Strip
    reached: int


@dataclass(frozen=True, slots=True)
class SlotPart:
    """A part, and its pieces. `file` is the file's number."""

    sent: SentPart
    file: int
    pieces: Sequence[SlotPiece]


def slot_parts(
    parts: Sequence[SentPart],
    locations: Mapping[str, Location],
    sizes: Sequence[int],
    *,
    made: Collection[str] = (),
    most: int = BLOCK,
) -> list[SlotPart]:
    """The parts of a rank in the order of the files, cut into pieces of at most `most` bytes.

    Args:
        made: tensors that come last, since they do not lie as they are published.
    """

    def turn(each: SentPart) -> tuple[bool, int, int]:
        where = locations[each.entry.name]
        return each.entry.name in made, where.file, where.offset

    placed = sorted(parts, key=turn)
    reached = list(sizes)
    found: list[SlotPart] = []
    for each in reversed(placed):
        where = locations[each.entry.name]
        strips: list[tuple[int, Strip]] = []
        at = 0
        for strip in each.strips:
            for piece in cut(strip, most):
                strips.append((at, piece._replace(begin=where.offset + piece.begin)))
                at += piece.nbytes
        pieces: list[SlotPiece] = []
        for at, piece in reversed(strips):
            pieces.append(SlotPiece(at, piece, reached[where.file]))
            reached[where.file] = min(reached[where.file], piece.begin)
        found.append(SlotPart(each, where.file, pieces[::-1]))
    return found[::-1]


def in_order_of_files(locations: Mapping[str, Location]) -> list[str]:
    """The tensors' names in the order in which they lie in the files."""
    return sorted(locations, key=lambda name: (locations[name].file, locations[name].offset))


@dataclass(frozen=True, slots=True)
class FileBlock:
    """Bytes `begin` to `end` of file number `file`, which are digested together."""

    file: int
    begin: int
    end: int


def blocks_of(sizes: Sequence[int]) -> list[FileBlock]:
    """The blocks of files of these sizes. Rank r of n digests every n-th, from the r-th on."""
    return [FileBlock(file, begin, end) for file, size in enumerate(sizes) for begin, end in blocks(size)]


def digests_of_files(sizes: Sequence[int], shares: Sequence[Sequence[bytes]]) -> list[list[bytes]]:
    """The digests of each file's blocks, from what each rank has of its own."""
    found: list[list[bytes]] = [[] for _ in sizes]
    for number, block in enumerate(blocks_of(sizes)):
        rank, place = number % len(shares), number // len(shares)
        found[block.file].append(shares[rank][place])
    return found


_MADE_BYTES = 2**28  # of casts that are there at a time to be scanned


@dataclass(frozen=True, eq=False)
class SlotPlan:
    """What is copied.

    `lying` are parts that lie on the GPU as they are published, with their addresses. `made` are the others, by name:
    cast, or redistributed, in the order of `made_names`, which have all tensors that ranks redistribute together.
    `first` is, for each file, the first byte that this rank writes; `device` is its GPU.
    """

    task: RankTask
    claims: Sequence[Claim]
    sizes: Sequence[int]
    lying: Sequence[tuple[SlotPart, int]]
    made: Mapping[str, Sequence[SlotPart]]
    made_names: Sequence[str]
    first: Sequence[int]
    device: Any

    def is_of(self, task: RankTask, claims: Sequence[Claim], sizes: Sequence[int]) -> bool:
        """Whether it holds for these: claims are the very same objects where no tensor has another place."""
        is_same = task is self.task and sizes == self.sizes and len(claims) == len(self.claims)
        return is_same and all(map(is_, claims, self.claims))

    def cast_groups(self, holdings: Mapping[str, Holding]) -> Iterator[list[SentPart]]:
        """The parts that are cast, so many that not too much of them is there at a time."""
        group, nbytes = list[SentPart](), 0
        for name, parts in self.made.items():
            for part in () if holdings[name].target is not None else parts:
                if group and nbytes + part.sent.nbytes > _MADE_BYTES:
                    yield group
                    group, nbytes = [], 0
                group.append(part.sent)
                nbytes += part.sent.nbytes
        if group:
            yield group

    @cached_property
    def sent(self) -> list[SentPart]:
        """The parts that lie as they are published."""
        return [part.sent for part, _ in self.lying]

    @cached_property
    def addresses(self) -> list[int]:
        return [address for _, address in self.lying]


@dataclass
class Scans:
    """What parts add to each tensor's fingerprint, and how many of their elements are not finite, by name."""

    is_wanted: bool
    check_finite: bool
    found: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    _turn: Lock = field(default_factory=Lock)

    def add(self, parts: Sequence[SentPart], flats: Sequence[Any]) -> None:
        """Scan parts, if that is wanted. `flats` are their elements in the published dtypes."""
        if self.is_wanted:
            pairs = zip(parts, flats, strict=True)
            inputs = [part_input(each, flat, check_finite=self.check_finite) for each, flat in pairs]
            self._put(parts, part_scans(inputs))

    def add_lying(self, plan: SlotPlan, scanner: PartScanner) -> None:
        """Scan the parts of a plan that lie as they are published."""
        self._put(plan.sent, scanner.scan(plan.sent, plan.addresses, plan.device))

    def _put(self, parts: Sequence[SentPart], scans: Sequence[Scan]) -> None:
        with self._turn:
            add_scans(self.found, parts, scans)


def made_plan(
    task: RankTask, claims: Sequence[Claim], sizes: Sequence[int], holdings: Mapping[str, Holding]
) -> SlotPlan:
    """Work it out."""
    sent = sent_parts(task.parts, claims)[0]
    places = {id(each): lying(holdings[each.entry.name], each) for each in sent}
    made = {each.entry.name for each in sent if places[id(each)] is None}
    together = {name for name, holding in holdings.items() if holding.target is not None}
    parts = slot_parts(sent, task.locations, sizes, made=made)
    first = list(sizes)
    by_name: dict[str, list[SlotPart]] = {}
    for part in parts:
        first[part.file] = min([first[part.file], *(piece.strip.begin for piece in part.pieces)])
        if part.sent.entry.name in made:
            by_name.setdefault(part.sent.entry.name, []).append(part)
    return SlotPlan(
        task=task,
        claims=claims,
        sizes=sizes,
        lying=[(part, places[id(part.sent)].data_ptr()) for part in parts if part.sent.entry.name not in made],
        made=by_name,
        made_names=[name for name in in_order_of_files(task.locations) if name in made | together],
        first=first,
        device=gpu_of(holdings),
    )
