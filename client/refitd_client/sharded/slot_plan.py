"""What a rank copies into each slot in the same way: worked out once, and used as long as its tensors stay in place."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from threading import Lock
from typing import Any

from refitd_client.fingerprint import Scan
from refitd_client.fingerprint.tensors import part_scans
from refitd_client.sharded.holdings import Holding
from refitd_client.sharded.layout import Claim
from refitd_client.sharded.part_scanner import PartScanner
from refitd_client.sharded.parts import SentPart, sent_parts
from refitd_client.sharded.rank_group import RankTask
from refitd_client.sharded.reading import add_scans, lying, part_input
from refitd_client.sharded.slot_gpu import gpu_of
from refitd_client.sharded.slot_pieces import SlotPart, in_order_of_files, slot_parts

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
        """Where they lie."""
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
    """Work it out.

    Args:
        task: what this rank writes.
        claims: what it holds.
        sizes: of the files.
        holdings: its tensors.
    """
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
