"""Whether the changes of a whole file are in order, looked at in stretches of some megabytes and not tensor by tensor.

A thread that looks at hundreds of tensors beside busy Python threads waits for the interpreter's lock at each numpy
operation, and sixteen such threads wait for each other. Entries of one kind lie together in a file, so the same is
found across tensors, while the bytes are read for their digest.

"No" means that something is wrong or that the file is laid out otherwise: only a look at each tensor says what.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from threading import Event, Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.finite import any_nonfinite, kind_of
from refitd_client.delta.change import elements_of, index_type
from refitd_client.delta.head import Head
from refitd_client.delta.layout import INDICES, VALUES, Compression
from refitd_client.fingerprint import width_of
from refitd_client.lanes import in_lanes, lanes_for

_CHECK_PIECE = 2**22  # bytes that one thread looks at at a time
_Span = tuple[int, int, int]  # where a tensor's indices begin and end in the file, and how many elements it has


def in_order(head: Head, file: NDArray[np.uint8]) -> bool:
    """Whether the indices of all tensors of a file in memory are in strict order and in range, found together."""
    search = ChangesSearch(head, values=False)

    def look(begin: int, end: int, _: Event) -> None:
        search.look(file[begin:end].data, begin)

    edges = [search.boundary(at) for at in range(search.begin, search.end, _CHECK_PIECE)]
    pieces = list(pairwise([*edges, search.end]))
    in_lanes([partial(look, *piece) for piece in pieces], lanes=lanes_for(len(pieces)))
    return search.is_sound


class ChangesSearch:
    """Searches one delta's file for indices that are out of order or range, and new values that are not finite.

    Stretches may come in any order, and from several threads at once; `is_sound` counts when all have come.
    """

    def __init__(self, head: Head, *, values: bool = True) -> None:
        """`values`: whether those are looked at."""
        indices = _index_runs(head)
        self._is_known = indices is not None
        found: list[_IndexRun | _ValueRun] = [*(indices or ())]
        if values and self._is_known:
            found += _value_runs(head)
        self._runs = sorted(found, key=lambda run: run.begin)
        self._ends = [run.end for run in self._runs]
        self._is_odd = False

    @property
    def begin(self) -> int:
        """The first byte that is looked at."""
        return self._runs[0].begin if self._runs else 0

    @property
    def end(self) -> int:
        """The end of the last."""
        return self._ends[-1] if self._runs else 0

    @property
    def is_sound(self) -> bool:
        """Whether all indices are in strict order and in range, and all new values finite (scales: above 0)."""
        return self._is_known and not self._is_odd and all(run.is_joined for run in self._runs)

    def boundary(self, position: int) -> int:
        """The last place at or before byte `position` of the file at which no index or value is cut in two."""
        at = bisect_right(self._ends, position)
        if at == len(self._runs) or position <= self._runs[at].begin:
            return position
        return position - (position - self._runs[at].begin) % self._runs[at].width

    def look(self, data: memoryview, position: int) -> None:
        """Look at `data`, which is at byte `position` of the file and begins and ends at boundaries."""
        at, end = bisect_right(self._ends, position), position + len(data)
        while at < len(self._runs) and self._runs[at].begin < end and not self._is_odd:
            run = self._runs[at]
            begin, stop = max(run.begin, position), min(run.end, end)
            block = np.frombuffer(data[begin - position : stop - position], np.uint8)
            if not run.is_sound(block, begin):
                self._is_odd = True
            at += 1


class _IndexRun:
    """The indices of one type: those of one tensor behind those of another."""

    def __init__(self, spans: Sequence[_Span], kind: np.dtype[Any]) -> None:
        self.begin, self.end, self.width, self._kind = spans[0][0], spans[-1][1], kind.itemsize, kind
        # Each counted in indices from the begin: where a tensor's last index is, and how many elements it has.
        self._lasts = np.array([(end - self.begin) // kind.itemsize - 1 for _, end, _ in spans], np.int64)
        self._elements = np.array([elements for *_, elements in spans], np.uint64)
        self._edges: dict[int, int] = {}  # the first and the last index of each stretch, by their number
        self._seen = 0
        self._turn = Lock()

    def is_sound(self, block: NDArray[np.uint8], begin: int) -> bool:
        """Whether a stretch of them is in order by itself: only a tensor's first index may be below the one before."""
        indices, first = block.view(self._kind), (begin - self.begin) // self.width
        end = first + len(indices)
        with self._turn:
            self._edges |= {first: int(indices[0]), end - 1: int(indices[-1])}
            self._seen += len(indices)
        falls = np.flatnonzero(indices[1:] <= indices[:-1]) + first  # the last ones before a fall
        at = np.searchsorted(self._lasts, falls)  # below the number of tensors: a fall is before the run's last index
        if not bool((self._lasts[at] == falls).all()):
            return False
        some = slice(*np.searchsorted(self._lasts, (first, end)))
        last = indices[self._lasts[some] - first].astype(np.uint64)
        return bool((last < self._elements[some]).all())

    @property
    def is_joined(self) -> bool:
        """Whether all stretches were looked at, and are in order where one follows another."""
        lasts = set(self._lasts.tolist())
        return self._seen * self.width == self.end - self.begin and all(
            before < after or number in lasts
            for (number, before), (following, after) in pairwise(sorted(self._edges.items()))
            if following == number + 1
        )


class _ValueRun:
    """The new values of neighbours of one dtype."""

    is_joined = True

    def __init__(self, begin: int, end: int, kind: str, width: int) -> None:
        self.begin, self.end, self.kind, self.width = begin, end, kind, width

    def is_sound(self, block: NDArray[np.uint8], _: int) -> bool:
        """Whether a stretch of them is finite."""
        return not any_nonfinite(self.kind, block)


def _index_runs(head: Head) -> list[_IndexRun] | None:
    """None where indices are not as they are in memory, or do not lie together."""
    if head.metadata.compression is not Compression.NONE:
        return None
    kinds: dict[type[Any], list[_Span]] = {}
    for name, row in head.rows.items():
        elements = elements_of(row.dtype, row.shape)
        kinds.setdefault(index_type(elements), []).append((*head.places[INDICES + name], elements))
    runs: list[_IndexRun] = []
    for kind, found in kinds.items():
        spans = sorted(found)
        if any(one[1] != other[0] for one, other in pairwise(spans)):
            return None
        runs.append(_IndexRun(spans, np.dtype(kind)))
    return runs


def _value_runs(head: Head) -> Iterator[_ValueRun]:
    """Neighbours of one dtype together."""
    run: _ValueRun | None = None
    for name, row in sorted(head.rows.items(), key=lambda item: head.places[VALUES + item[0]]):
        (begin, end), kind, width = head.places[VALUES + name], kind_of(name, row.dtype), width_of(row.dtype)
        if run is not None and (run.end, run.kind, run.width) == (begin, kind, width):
            run.end = end
            continue
        if run is not None:
            yield run
        run = _ValueRun(begin, end, kind, width)
    if run is not None:
        yield run
