"""Whether the changes of a whole file are in order, looked at in a few large pieces and not tensor by tensor.

A thread that looks at hundreds of tensors beside busy Python threads waits for the interpreter's lock at each numpy
operation, and sixteen such threads wait for each other. Entries of one kind lie together in a file, so the same is
found in pieces of some megabytes, across tensors, with a fixed amount of memory for each thread.

"No" means that something is wrong or that the file is laid out otherwise: only a look at each tensor says what.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.finite import any_nonfinite, kind_of
from refitd_client.delta.change import elements_of, index_type
from refitd_client.delta.head import Head
from refitd_client.delta.layout import INDICES, VALUES, Compression, Encoding
from refitd_client.fingerprint import width_of
from refitd_client.lanes import in_lanes, lanes_for

Read = Callable[[int, int], NDArray[np.uint8]]
"""The bytes of the file from one place to another. What it returned last to a thread may be overwritten."""

_PIECE = 2**22  # bytes that one thread looks at at a time
_Span = tuple[int, int, int]  # where a tensor's indices begin and end in the file, and how many elements it has
_Look = Callable[[], bool]


def in_order(head: Head, read: Read) -> bool:
    """Whether the indices of all tensors are in strict order and in range, found together."""
    looks = _looks_at_indices(head, read)
    return looks is not None and _all(looks, Event())


def is_sound(head: Head, read: Read, stop: Event) -> bool:
    """Whether that is so, and all new values are finite (scales: above 0). `stop` ends it early, with "no".

    Raises:
        OSError: the file cannot be read, or is shorter than it was.
    """
    indices = _looks_at_indices(head, read)
    return indices is not None and _all([*indices, *_looks_at_values(head, read)], stop)


def _all(looks: Sequence[_Look], stop: Event) -> bool:
    found = [False] * len(looks)

    def look(number: int, failed: Event) -> None:
        if not stop.is_set() and not failed.is_set():
            found[number] = looks[number]()

    in_lanes([partial(look, number) for number in range(len(looks))], lanes=lanes_for(len(looks)))
    return all(found)


def _looks_at_indices(head: Head, read: Read) -> list[_Look] | None:
    """None where indices are not as they are in memory, or do not lie together."""
    if (head.metadata.encoding, head.metadata.compression) != (Encoding.FLAT, Compression.NONE):
        return None
    kinds: dict[type[Any], list[_Span]] = {}
    for name, row in head.rows.items():
        elements = elements_of(row.dtype, row.shape)
        kinds.setdefault(index_type(elements), []).append((*head.places[INDICES + name], elements))
    looks: list[_Look] = []
    for kind, found in kinds.items():
        spans = sorted(found)
        if any(one[1] != other[0] for one, other in pairwise(spans)):
            return None
        looks += _IndexRun(spans, np.dtype(kind), read).looks()
    return looks


class _IndexRun:
    """The indices of one type: those of one tensor behind those of another."""

    def __init__(self, spans: Sequence[_Span], kind: np.dtype[Any], read: Read) -> None:
        self._begin, self._end, self._kind, self._read = spans[0][0], spans[-1][1], kind, read
        # Each counted in indices from the begin: where a tensor's last index is, and how many elements it has.
        self._lasts = np.array([(end - self._begin) // kind.itemsize - 1 for _, end, _ in spans], np.int64)
        self._elements = np.array([elements for *_, elements in spans], np.uint64)

    def looks(self) -> Iterator[_Look]:
        count, step = (self._end - self._begin) // self._kind.itemsize, _PIECE // self._kind.itemsize
        for first in range(0, count, step):
            yield partial(self._look, first, min(first + step, count))

    def _look(self, first: int, end: int) -> bool:
        """Look at indices `first` to `end`, and at the step from the one before: only a tensor's first may be lower."""
        before, size = max(0, first - 1), self._kind.itemsize
        indices = self._read(self._begin + before * size, self._begin + end * size).view(self._kind)
        falls = np.flatnonzero(indices[1:] <= indices[:-1]) + before  # the last ones before a fall
        at = np.searchsorted(self._lasts, falls)  # below the number of tensors: a fall is before the run's last index
        if not bool((self._lasts[at] == falls).all()):
            return False
        some = slice(*np.searchsorted(self._lasts, (first, end)))
        last = indices[self._lasts[some] - before].astype(np.uint64)
        return bool((last < self._elements[some]).all())


def _looks_at_values(head: Head, read: Read) -> Iterator[_Look]:
    """Neighbours of one dtype together."""
    runs: list[tuple[int, int, str, int]] = []
    for name, row in sorted(head.rows.items(), key=lambda item: head.places[VALUES + item[0]]):
        (begin, end), kind, width = head.places[VALUES + name], kind_of(name, row.dtype), width_of(row.dtype)
        if runs and runs[-1][1:] == (begin, kind, width):
            begin = runs.pop()[0]
        runs.append((begin, end, kind, width))
    for first, last, kind, width in runs:
        step = _PIECE // width * width
        for begin in range(first, last, step):
            yield partial(_are_finite, kind, read, begin, min(begin + step, last))


def _are_finite(kind: str, read: Read, begin: int, end: int) -> bool:
    return not any_nonfinite(kind, read(begin, end))
