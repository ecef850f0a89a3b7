"""Fingerprints beside the copies: while the bus is busy with one part of a model, the processors look at another.

Copies over the bus are made in parts. What a part overwrites is fingerprinted before it, for what has to be put back if
the update fails, and what is written for the last time in it is fingerprinted after it: that is what is served.

To begin all that is a matter of a few ms, in which no processor of the GPU has waited. The engine goes on with its own
part of the load meanwhile, along the same stream: what it does to the weights comes after the last fingerprint.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch

from refitd_client.fingerprint.batch import Begun, FingerprintBatch
from refitd_plugin.spans import Span

FROM_HOST = 8  # parts of copies that take the bus tens of ms
WITHIN_DEVICES = 1  # copies of 1 to 2 ms: to begin each further part takes as long as it could save


@dataclass(frozen=True, slots=True)
class OverlapPart:
    """Some of the writes, and the numbers of the watched tensors that no earlier part writes, and no later one."""

    writes: slice
    first: Sequence[int]
    last: Sequence[int]


def parts_of(writes: Sequence[tuple[int, Span]], watched: Sequence[Span], count: int = FROM_HOST) -> list[OverlapPart]:
    """Share writes out into parts of about the same size, in their order. Pure.

    Args:
        writes: the bytes and the stretch of memory of each.
        watched: stretches whose contents are fingerprinted; those that nothing writes belong to the first part.
        count: how many parts.
    """
    total = sum(size for size, _ in writes)
    part_of: list[int] = []
    done = 0
    for size, _ in writes:
        part_of.append(min(count - 1, done * count // max(total, 1)))
        done += size
    begins = [bisect_left(part_of, part) for part in range(count)]
    touched = [
        [part_of[number] for number, (_, (begin, end)) in enumerate(writes) if begin < span[1] and span[0] < end] or [0]
        for span in watched
    ]
    return [
        OverlapPart(
            slice(begin, end),
            [number for number, parts in enumerate(touched) if min(parts) == part],
            [number for number, parts in enumerate(touched) if max(parts) == part],
        )
        for part, (begin, end) in enumerate(pairwise([*begins, None]))
    ]


class Overlap:
    """Tensors of one GPU that are watched while parts are written. Used again for each version."""

    def __init__(self, parts: Sequence[OverlapPart], watched: Sequence[torch.Tensor]) -> None:
        self.parts = parts
        self._count = len(watched)
        self._device = watched[0].device
        self._streams = [torch.cuda.Stream(self._device) for _ in range(2)]  # each has memory of its own: no new ones
        self._first = [FingerprintBatch([watched[number] for number in part.first]) for part in parts]
        self._last = [FingerprintBatch([watched[number] for number in part.last]) for part in parts]

    def begin(self, steps: Sequence[Callable[[], object]], seen: "SeenContents") -> None:
        """Begin to write all parts along the current stream, which then waits for the fingerprints.

        Args:
            steps: the writes, in the order in which they were shared out. Where there is one part, they may be fewer.
            seen: gets what was there before, and what is there now, when it is waited for. Where a write cannot be
                begun, it has what was there before.
        """
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            early, late = self._streams
            early.wait_stream(current)
            before: list[Begun] = []
            after: list[Begun] = []
            try:
                for part, first, last in zip(self.parts, self._first, self._last, strict=True):
                    with torch.cuda.stream(early):
                        before.append(first.begin())
                    current.wait_stream(early)
                    for step in steps[part.writes]:
                        step()
                    late.wait_stream(current)
                    with torch.cuda.stream(late):
                        after.append(last.begin())
            except BaseException:
                torch.cuda.synchronize(self._device)
                before += [batch.begin() for batch in self._first[len(before) :]]  # these are not written yet
                seen.before = self._gathered([part.first for part in self.parts], self._first, before)
                raise
            current.wait_stream(late)
        seen.ends.append(partial(self._end, seen, before, after))

    def _end(self, seen: "SeenContents", before: Sequence[Begun], after: Sequence[Begun]) -> None:
        torch.cuda.synchronize(self._device)
        seen.before = self._gathered([part.first for part in self.parts], self._first, before)
        seen.after = self._gathered([part.last for part in self.parts], self._last, after)

    def _gathered(
        self, places: Sequence[Sequence[int]], batches: Sequence[FingerprintBatch], begun: Sequence[Begun]
    ) -> list[int]:
        found = [0] * self._count
        for some, batch, each in zip(places, batches, begun, strict=True):
            for place, number in zip(some, batch.end(each), strict=True):
                found[place] = number
        return found


@dataclass(slots=True)
class SeenContents:
    """The fingerprints of watched tensors, in their order; None where they were not taken. `ends` are what `wait` has
    to wait for.
    """

    before: list[int] | None = None
    after: list[int] | None = None
    ends: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    def wait(self) -> None:
        """Wait for the writes that were begun, and for their fingerprints."""
        while self.ends:
            self.ends.pop()()
