# pyright: basic
"""What changed in tensors on a device since a base that is there as well: a few launches, and one wait for the counts.

    count     how many elements changed in each row (`fingerprint/rows.py`)
    sum up    where the changes of each row go; the totals come to the host, which makes room for them
    take      indices and values, close together and in order; what they add to fingerprints; which are not finite

Indices and values are gathered on the device in rooms of at most `_ROOM` bytes, and sent to page-locked host memory on
a stream of their own, so that nothing that is computed waits behind them.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from refitd_client.delta import twin
from refitd_client.delta.arena import Arena, Span
from refitd_client.delta.shadow import Changes, Found
from refitd_client.fingerprint.rows import Part, Rows, on_device
from refitd_client.fingerprint.tensors import has_triton

_ROOM = 2**26
LONGEST = 2**23
"""Elements of a part, so that its changes fit a room whatever changed."""


class Comparison:
    """Of some tensors, by number. Nothing is taken any more when more than `most` elements changed."""

    def __init__(self, device: Any, tensors: int, most: int, *, expected: int = 0) -> None:
        """`expected` changes are made room for at once."""
        self.count = 0
        self.out = Side(device)
        self._most = most
        self.kernels: Any = twin
        if device.type == "cuda" and has_triton():
            from refitd_client.delta import kernel

            self.kernels = kernel
        self._keys = self.kernels.column_keys(device)
        self._sums = torch.zeros((tensors, 2), dtype=torch.int64, device=device)
        self._indices, self._values = (Arena(expected, is_pinned=device.type == "cuda") for _ in range(2))
        self._found: dict[int, list[tuple[Span, Span]]] = {}

    @property
    def is_too_much(self) -> bool:
        """Whether more elements changed than anybody wants to know of: the base is not up to date then."""
        return self.count > self._most

    def run(self, tally: "Tally", begin: int, end: int, *, update: bool) -> list[int]:
        """Compare the parts from `begin` to `end` of a list; say how many elements changed in each.

        With `update` their base becomes what is there now.
        """
        rows = tally.rows
        counts = tally.totals(begin, end, self.kernels)
        self.count += sum(counts)
        if any(counts) and not self.is_too_much:
            index, value = _types(rows)
            self._indices.reserve(sum(counts), index)
            self._values.reserve(sum(counts), value)
            for low, high in _groups(counts, _ROOM // (index.itemsize + value.itemsize)):
                self._extract(tally, begin + low, begin + high, counts[low:high], update=update)
        return counts

    def changes(self, names: Sequence[str]) -> Changes:
        """All that was found, by the names of the tensors. Waits until it is there."""
        sums = self._sums.cpu().numpy()
        self.out.wait()
        shifts, bad = sums[:, 0].view(np.uint64), sums[:, 1]
        return Changes(
            count=self.count,
            found={names[number]: _joined(spans) for number, spans in self._found.items()},
            shifts={names[number]: int(shifts[number]) for number in np.flatnonzero(shifts).tolist()},
            nonfinite={names[number]: int(bad[number]) for number in np.flatnonzero(bad).tolist()},
        )

    def _extract(self, tally: "Tally", begin: int, end: int, counts: Sequence[int], *, update: bool) -> None:
        """Take the changes of some parts that fit a room."""
        total = sum(counts)
        if total == 0:
            return
        rows = tally.rows
        index, value = _types(rows)
        rooms = [torch.empty(total, dtype=kind, device=rows.device) for kind in (index, value, value)]
        self.kernels.take(
            rows, rows.begins[begin], rows.begins[end], starts=tally.starts, keys=self._keys, sums=self._sums,
            rooms=rooms, update=update,
        )  # fmt: skip
        with self.out.after_this(rooms[:2]):
            indices, values = self._indices.fill(rooms[0]), self._values.fill(rooms[1])
        ends = np.cumsum(counts).tolist()
        for part, low, high in zip(rows.parts[begin:end], [0, *ends], ends, strict=False):
            if low < high:
                self._keep(part, indices.part(low, high), values.part(low, high))

    def _keep(self, part: Part, indices: Span, values: Span) -> None:
        spans = self._found.setdefault(part.number, [])
        if spans and spans[-1][0].leads_to(indices) and spans[-1][1].leads_to(values):
            before = spans.pop()
            indices, values = before[0].and_on(indices), before[1].and_on(values)
        spans.append((indices, values))


class Side:
    """A stream beside the current one. Without a GPU everything happens at once."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def after_this(self, used: Sequence[Any] = ()) -> Any:
        """A block on this stream, after what the current one has been given. `used` may be let go of meanwhile."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in used:
            tensor.record_stream(self._stream)
        return torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._stream is not None:
            self._stream.synchronize()


class Tally:
    """Where the changes of each row of a list begin: 12 bytes a row on the device."""

    def __init__(self, rows: Rows) -> None:
        """Nothing is counted."""
        self.rows = rows
        self.starts = torch.zeros(len(rows) + 1, dtype=torch.int64, device=rows.device)
        self._counts = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
        self._begins = on_device(rows.begins, rows)
        self._here = torch.empty(len(rows.begins), dtype=torch.int64, pin_memory=rows.device.type == "cuda")

    def totals(self, begin: int, end: int, kernels: Any) -> list[int]:
        """Count the changes of the parts from `begin` to `end`. Those before have been counted."""
        low, high = self.rows.begins[begin], self.rows.begins[end]
        kernels.count(self.rows, low, high, self._counts)
        torch.cumsum(self._counts[low:high], 0, out=self.starts[low + 1 : high + 1])
        if begin:
            self.starts[low + 1 : high + 1] += self.starts[low]
        here = self._here[begin : end + 1]
        kernels.report(self.starts, self._begins[begin : end + 1], here)
        if self.starts.is_cuda:
            torch.cuda.current_stream(self.starts.device).synchronize()
        return here.diff().tolist()


def _types(rows: Rows) -> tuple[Any, Any]:
    """Of indices and of values."""
    return (torch.int64 if rows.has_long_index else torch.int32), rows.parts[0].now.dtype


def _groups(counts: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Spans of parts with at most `most` changes together, or of one part."""
    cuts, together = [0], 0
    for number, count in enumerate(counts):
        if together + count > most and number > cuts[-1]:
            cuts.append(number)
            together = 0
        together += count
    return pairwise([*cuts, len(counts)])


def _joined(spans: Sequence[tuple[Span, Span]]) -> Found:
    indices, values = zip(*spans, strict=True)
    return Found(indices=_together(indices), values=_together(values))


def _together(spans: Sequence[Span]) -> Any:
    arrays = [span.array() for span in spans]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
