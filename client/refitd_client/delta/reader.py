"""Reading a delta from an untrusted writer: everything is checked before any of it can be used.

In this order: its header against its size (`head.py`), the digest of all its bytes, then each tensor's indices, which
are in strict order and in range. What passes can be applied to tensors of those names, dtypes and shapes as it is.

`parse_delta` has the whole file in memory. `DeltaFile` goes through a file in pieces, with a fixed amount of memory: a
file with holes takes no room on its disk, so its blocks do not say what it takes to read it.

Whether all changes of a file are in order is looked at in stretches of some megabytes, and not tensor by tensor. A
thread that looks at hundreds of tensors beside busy Python threads waits for the interpreter's lock at each numpy
operation, and sixteen such threads wait for each other. Entries of one kind lie together in a file, so the same is
found across tensors, while the bytes are read for their digest (`ChangesSearch`). "No" means that something is wrong or
that the file is laid out otherwise: only a look at each tensor says what.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.finite import any_nonfinite, kind_of
from refitd_client.contract.manifest import BLOCK, combined, digest_of_pieces, in_blocks
from refitd_client.delta.change import Change, Delta, DeltaRefusedError, Indices, elements_of, index_type
from refitd_client.delta.head import (
    DIGEST_BYTES,
    INDICES,
    MAX_HEADER_BYTES,
    VALUES,
    Head,
    TensorRecord,
    head_in,
    named,
    read_head,
)
from refitd_client.files.plain_file import fill, opened, read_at
from refitd_client.fingerprint import Bits, width_of
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
    """None where the indices of one type do not lie together."""
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


MAX_BYTES = 2**38
"""Bytes that a delta's indices and values may take, unless the caller knows better: 256 GiB."""

AT_A_TIME = 2**17  # changes in a piece of a `DeltaFile`
_DIGESTED = 2**20  # bytes that are read at a time to be digested


def read_delta(path: Path, *, max_bytes: int = MAX_BYTES) -> Delta:
    """Read a whole delta file into memory. It is not mapped: a file that is truncated is an error then, and no SIGBUS.

    Raises:
        DeltaRefusedError: it is none, is damaged, or takes more than `max_bytes`. The sentence names the file.
        InvalidWeightsError: it is no plain file, or cannot be opened.
        OSError: it cannot be read.
    """
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        if size > max_bytes + MAX_HEADER_BYTES:
            raise DeltaRefusedError(f"{path} has {size} bytes, more than the {max_bytes} that are read")
        data = np.empty(size, np.uint8)
        fill(fd, data.data, 0)
    try:
        return parse_delta(data.data, max_bytes=max_bytes)
    except DeltaRefusedError as error:
        raise DeltaRefusedError(f"{path} is no delta to be used: {error}") from error


def parse_delta(
    data: bytes | memoryview, *, max_bytes: int = MAX_BYTES, digested: bool = False, known: Head | None = None
) -> Delta:
    """Parse the bytes of a delta's file. Arrays of the result share them.

    Args:
        data: the whole file. It must not change while the delta is used.
        max_bytes: how much its indices and values may take.
        digested: whether the bytes were checked against a digest of all of them already, as a manifest has it.
        known: its header, where it was parsed already; it is parsed again if it is another one.

    Raises:
        DeltaRefusedError: it breaks a rule. The message is a sentence about "it", the file.
    """
    view = memoryview(data)
    head = known if known is not None and known.is_of(view) else head_in(view)
    if not digested:
        body = view[:-DIGEST_BYTES]
        blocks = [partial(digest_of_pieces, block) for block in in_blocks([body])]
        _check_digest(bytes(view[-DIGEST_BYTES:]), blocks)
    check_memory(head, max_bytes)
    file = np.frombuffer(view, np.uint8)
    is_ordered = in_order(head, file)
    changes = {name: _change(name, row, head, file, is_ordered=is_ordered) for name, row in head.rows.items()}
    return Delta(base=head.base, version=head.version, changes=changes)


def check_memory(head: Head, max_bytes: int) -> None:
    """Check that a delta takes no more than `max_bytes`. Raises DeltaRefusedError if it takes more."""
    if head.memory > max_bytes:
        raise DeltaRefusedError(f"it would take {head.memory} bytes of memory; at most {max_bytes} are given to it")


class DeltaFile:
    """An open file whose header was read and checked. Threads may share it; the descriptor stays the caller's."""

    def __init__(self, fd: int) -> None:
        """Read its header. Raises DeltaRefusedError: it breaks a rule; OSError: it cannot be read."""
        self._fd = fd
        self.head: Head = read_head(fd)

    def check_digest(self) -> None:
        """Check the file against the digest at its end. Takes the memory of a piece for each thread. Raises
        DeltaRefusedError: it is damaged; OSError: it cannot be read, or is shorter than it was.
        """
        fd, end = self._fd, os.fstat(self._fd).st_size - DIGEST_BYTES

        def digest(begin: int) -> bytes:
            stop = min(begin + BLOCK, end)
            return digest_of_pieces(read_at(fd, min(_DIGESTED, stop - at), at) for at in range(begin, stop, _DIGESTED))

        blocks = [partial(digest, begin) for begin in range(0, max(1, end), BLOCK)]
        _check_digest(read_at(fd, DIGEST_BYTES, end), blocks)

    def pieces(self, name: str) -> Iterator[tuple[Indices, Bits]]:
        """A tensor's indices with their new values, in order. Each piece is checked before it is returned. Raises
        DeltaRefusedError: indices are not in strict order, or beyond the tensor. The sentence names the tensor;
        OSError: the file cannot be read.
        """
        row, last = self.head.rows[name], -1
        elements, *kinds = _kinds_of(row.dtype, row.shape)
        for first in range(0, row.changed, AT_A_TIME):
            count = min(AT_A_TIME, row.changed - first)
            indices, values = (
                np.frombuffer(
                    read_at(self._fd, count * kind.itemsize, self.head.places[entry + name][0] + first * kind.itemsize),
                    kind,
                )
                for entry, kind in zip((INDICES, VALUES), kinds, strict=True)
            )
            last = _check_order(name, indices, last, elements)
            yield indices, values


def _check_digest(digest: bytes, blocks: Sequence[Callable[[], bytes]]) -> None:
    """Check a file's `digest` of all bytes before it. `blocks` digest a block each, in several threads."""
    found = [b""] * len(blocks)

    def take(number: int, _: Event) -> None:
        found[number] = blocks[number]()

    in_lanes([partial(take, number) for number in range(len(blocks))], lanes=lanes_for(len(blocks)))
    if combined(found) != digest:
        raise DeltaRefusedError("its digest is not that of its bytes: it is damaged, or was not written to its end")


def _check_order(name: str, indices: Indices, last: int, elements: int) -> int:
    """Check that indices go on from index `last` in strict order, within so many elements. Returns the last of them."""
    if int(indices[0]) <= last or not bool(np.all(indices[1:] > indices[:-1])):
        raise DeltaRefusedError(f"{named(name)} has indices that are not in strict order")
    if int(indices[-1]) >= elements:
        raise DeltaRefusedError(f"{named(name)} has index {int(indices[-1])}, of {elements} elements")
    return int(indices[-1])


def _change(name: str, row: TensorRecord, head: Head, file: NDArray[np.uint8], *, is_ordered: bool) -> Change:
    elements, index_kind, value_kind = _kinds_of(row.dtype, row.shape)
    indices: Indices = file[slice(*head.places[INDICES + name])].view(index_kind)
    values: Bits = file[slice(*head.places[VALUES + name])].view(value_kind)
    if not is_ordered:
        _check_order(name, indices, -1, elements)
    return Change(
        dtype=row.dtype,
        shape=row.shape,
        indices=indices,
        values=values,
        base=int(row.base, 16),
        result=int(row.result, 16),
    )


@lru_cache(1024)  # a model's tensors have few shapes
def _kinds_of(dtype: str, shape: tuple[int, ...]) -> tuple[int, np.dtype[Any], np.dtype[Any]]:
    elements = elements_of(dtype, shape)
    return elements, np.dtype(index_type(elements)), np.dtype(f"<u{width_of(dtype)}")
