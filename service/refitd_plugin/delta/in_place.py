"""A delta on its way into a model, in place.

It is known before the first write that the delta fits: the model holds what it held when its version was found to be
there, that version is the delta's base or one since, and each changed tensor's fingerprint, less the old elements and
plus the new ones, is the one that the delta promises. After the last write the model's tensors have the fingerprints
that follow.

Where a delta cannot be translated (a loader computes the tensor, or no load has shown yet how it is loaded) the rank
asks for a full version.

A patch has the changed elements on their way into the model's tensors:

    look    what is there now is read and kept, and what the change does to fingerprints is computed; nothing is written
    write   the new values
    undo    exactly those elements get back what `look` found

`look` comes first. When `write` or `undo` returns the device has done it.

`HostPatch` is for tensors in host memory. `DevicePatch` is the same on a GPU: one launch for four million elements,
whatever tensors they belong to. Indices and values wait in pinned host memory and go over the bus in chunks, since all
of them at once would take too much of a GPU that an engine has filled. Each program of a kernel has up to 1024 elements
of one piece; a table says which, and where the piece's route leads.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from refitd_client.delta.change import Indices
from refitd_client.fingerprint import Bits, share
from refitd_client.fingerprint.device import flat_bits
from refitd_client.fingerprint.host import MASK
from refitd_client.validation.examine import signature
from refitd_plugin.delta.changes import DeltaChanges
from refitd_plugin.delta.layout import (
    ADDRESS,
    COLUMNS,
    COUNT,
    FIRST,
    HOLDER,
    NUMBER,
    ROW_INDEX,
    LaidOutDelta,
    PieceGroup,
    blocks,
    lay_out,
    places,
)
from refitd_plugin.memory.source import FullNeededError
from refitd_plugin.port import UpdateCall
from refitd_plugin.proof.slices import SliceCheck
from refitd_plugin.update.loading import Loading, TensorFeed
from refitd_plugin.update.plan import ReplayPlan
from refitd_plugin.update.update_source import MOST_DELTAS, ServedState, UpdateSource, leads_from, write_nothing


@dataclass(frozen=True, slots=True)
class Shifts:
    """What a change adds to fingerprints (mod 2^64): of each piece's checkpoint tensor, and of each of the model's."""

    pieces: Sequence[int]
    holders: Sequence[int]


class HostPatch:
    """Tensors in host memory, by numpy."""

    def __init__(self, laid: LaidOutDelta, holders: Sequence[Any]) -> None:
        """`holders` are the model's tensors by the numbers that routes give; those that are named are contiguous."""
        rows = [(row, group) for group in laid.groups for row in group.table.tolist()]
        self._pieces = [_piece(row, group, holders[row[HOLDER]]) for row, group in rows]
        self._numbers = [(row[NUMBER], row[HOLDER]) for row, _ in rows]
        self._count = len(holders)
        self._olds: list[Bits] = []

    def look(self) -> Shifts:
        self._olds = [bits[at] for bits, at, _, _ in self._pieces]
        tensors, holders = [0] * len(self._pieces), [0] * self._count
        for (_, at, indices, values), (number, holder), old in zip(
            self._pieces, self._numbers, self._olds, strict=True
        ):
            tensors[number] = _shift(indices, old, values)
            holders[holder] += _shift(at.view(np.uint64), old, values)
        return Shifts(tensors, [each & MASK for each in holders])

    def write(self) -> None:
        for bits, at, _, values in self._pieces:
            bits[at] = values

    def undo(self) -> None:
        for (bits, at, _, _), old in zip(self._pieces, self._olds, strict=True):
            bits[at] = old


def _piece(row: Sequence[int], group: PieceGroup, holder: Any) -> tuple[Bits, NDArray[np.int64], Indices, Bits]:
    """The bits of the model's tensor, where the elements lie in it, their indices in the checkpoint's, the new ones."""
    some = slice(row[FIRST], row[FIRST] + row[COUNT])
    bits, indices = flat_bits(holder).numpy(), group.indices[some]
    return bits.view(f"u{bits.itemsize}"), places(row, indices), indices, group.values[some]


def _shift(indices: Indices, old: Bits, new: Bits) -> int:
    return (share(indices, new) - share(indices, old)) & MASK


BLOCK = 1024  # elements of one program
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PATCH_ALIGNED = 512
_SCRATCH = 24 * 2**20  # bytes on the device: indices, new and old values of a chunk


class DevicePatch:
    """Tensors on one GPU, by kernels. Any thread makes a patch and looks."""

    def __init__(self, laid: LaidOutDelta, holders: Sequence[Any]) -> None:
        """Take what `HostPatch` takes. There is at least one piece."""
        self._device = holders[int(laid.groups[0].table[0, HOLDER])].device
        self._pieces, self._holders = len(laid.names), len(holders)
        addresses = np.array([tensor.data_ptr() for tensor in holders], np.int64)
        with torch.cuda.device(self._device):  # a thread begins on the first GPU, which may be another rank's
            self._groups = [_Group(group, addresses, self._device) for group in laid.groups]

    def look(self) -> Shifts:
        """Look on a stream of the patch's own: an engine may be computing meanwhile, and does not write."""
        with torch.cuda.device(self._device), torch.cuda.stream(_side_stream(self._device)):
            sums = torch.zeros(self._pieces + self._holders, dtype=torch.int64, device=self._device)
            for group in self._groups:
                group.look(sums, self._pieces)
            found = [int(number) & MASK for number in sums.cpu().numpy().view(np.uint64)]
            torch.cuda.current_stream().synchronize()
        return Shifts(found[: self._pieces], found[self._pieces :])

    def write(self) -> None:
        self._put(old=False)

    def undo(self) -> None:
        self._put(old=True)

    def _put(self, *, old: bool) -> None:
        with torch.cuda.device(self._device):
            # The device was idle when this update began (`RankEngine`), so no pass of the engine reads what is written.
            for group in self._groups:
                group.put(old=old)
            torch.cuda.current_stream().synchronize()  # what is fingerprinted next is all written


@dataclass(frozen=True, slots=True)
class _Chunk:
    units: slice
    begin: int
    end: int


class _Group:
    """Pieces with elements of one width, and indices of one."""

    def __init__(self, group: PieceGroup, addresses: NDArray[np.int64], device: Any) -> None:
        self._device = device
        self._width = group.values.itemsize
        self._indices, self._values = _pinned(group.indices), _pinned(group.values)
        self._olds = torch.empty_like(self._values, pin_memory=self._values.is_pinned())
        _warm(device, self._width, self._indices.element_size())
        table = blocks(group.table, BLOCK)
        table[:, ADDRESS] = addresses[table[:, HOLDER]]
        # The table goes to the device before the pause: a copy from pageable memory waits for the device.
        self._table = torch.from_numpy(table).to(device)
        self._chunks = _chunks(table, self._indices.element_size() + 2 * self._width)

    def look(self, sums: Any, holders: int) -> None:
        """Keep what is there, and add what changes to `sums`: a piece's by its number, a holder's from `holders` on."""
        from refitd_plugin.memory import kernels

        with _scratch(self._device) as memory:
            for chunk in self._chunks:
                indices, values, olds = self._device_buffers(memory, chunk)
                _copy_chunk(indices, self._indices, chunk)
                _copy_chunk(values, self._values, chunk)
                table = self._table[chunk.units]
                kernels.look(table, chunk.begin, indices, values, olds, sums, holders, self._width)
                # Old values go to the host: the next chunk takes the scratch, and `undo` may come much later.
                self._olds[chunk.begin : chunk.end].copy_(olds, non_blocking=True)
            torch.cuda.current_stream().synchronize()  # before another patch takes the scratch, on another stream

    def put(self, *, old: bool) -> None:
        """Write the new values, or those that were there."""
        from refitd_plugin.memory import kernels

        source = self._olds if old else self._values
        with _scratch(self._device) as memory:
            for chunk in self._chunks:
                indices, values, _ = self._device_buffers(memory, chunk)
                _copy_chunk(indices, self._indices, chunk)
                _copy_chunk(values, source, chunk)
                kernels.put(self._table[chunk.units], chunk.begin, indices, values, self._width)
            torch.cuda.current_stream().synchronize()  # as in `look`

    def _device_buffers(self, memory: Any, chunk: _Chunk) -> list[Any]:
        """Memory on the device for indices, new and old values of a chunk."""
        found, end = list[Any](), 0
        for like in (self._indices, self._values, self._values):
            size = (chunk.end - chunk.begin) * like.element_size()
            found.append(memory[end : end + size].view(like.dtype))
            end += -(-size // _PATCH_ALIGNED) * _PATCH_ALIGNED
        return found


def _copy_chunk(target: Any, host: Any, chunk: _Chunk) -> None:
    target.copy_(host[chunk.begin : chunk.end], non_blocking=True)


_turn = Lock()


@contextmanager
def _scratch(device: Any) -> Iterator[Any]:
    """The piece of a GPU's memory that all chunks go through, one patch at a time. Leave it when copies are done."""
    with _turn:
        yield _memory(device)


@cache
def _side_stream(device: Any) -> Any:
    return torch.cuda.Stream(device)


@cache
def _memory(device: Any) -> Any:
    return torch.empty(_SCRATCH, dtype=torch.uint8, device=device)


@cache
def _warm(device: Any, width: int, index_width: int) -> None:
    """Have the kernel that writes compiled before the first pause in which it is needed: with nothing to do."""
    from refitd_plugin.memory import kernels

    table = torch.zeros(1, COLUMNS, dtype=torch.int64, device=device)
    table[0, ROW_INDEX] = 1  # row_index is divided by
    indices, values = (torch.zeros(1, dtype=_INTEGERS[size], device=device) for size in (index_width, width))
    kernels.put(table, 0, indices, values, width)


def _chunks(table: NDArray[np.int64], nbytes: int) -> list[_Chunk]:
    """As many programs at a time as fit into the scratch memory: `nbytes` is what an element takes."""
    step = max(1, (_SCRATCH - 3 * _PATCH_ALIGNED) // (nbytes * BLOCK))
    ends = table[:, FIRST] + table[:, COUNT]
    return [
        _Chunk(slice(at, at + step), int(table[at, FIRST]), int(ends[min(at + step, len(table)) - 1]))
        for at in range(0, len(table), step)
    ]


def _pinned(array: NDArray[Any]) -> Any:
    """The array as signed integers in page-locked memory."""
    signed = array.view(f"i{array.itemsize}")
    if torch.from_numpy(array[:1].view(np.uint8)).is_pinned():
        return torch.from_numpy(signed)
    copy = torch.empty(len(array), dtype=_INTEGERS[array.itemsize], pin_memory=torch.cuda.is_available())
    copy.numpy()[:] = signed
    return copy


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedDelta:
    """A delta that fits the `served_state`, laid out by `plan`. `contents` are the fingerprints that the model's
    tensors will have, `fingerprints` those of the checkpoint's tensors, and `slice_check` is what the slices of others
    will have; None where it is not known what they have now.
    """

    served_state: ServedState
    plan: ReplayPlan
    patch: HostPatch | DevicePatch | None
    contents: dict[str, str]
    fingerprints: list[tuple[str, int]]
    slice_check: SliceCheck | None


def fit_delta(changes: DeltaChanges, served_state: ServedState | None, loading: Loading) -> FittedDelta:
    """Hold a delta against what is served. `served_state`: what is in memory, None where that is not known. `loading`:
    the rank's loads, which have the plan to lay the delta out by.

    Raises:
        FullNeededError: it cannot be applied to that, and a full version can.
        SourceRefusedError: it is none for this model.
    """
    if served_state is None:
        raise FullNeededError("nothing is known of the weights in memory: load a full version")
    _check_order(changes, served_state)
    plan = loading.plan_for_deltas(served_state.source.inventory)
    if isinstance(plan, str):
        raise FullNeededError(f"a delta cannot be translated for this model, {plan}: load a full version")
    tables = loading.tables(plan, served_state.source)
    laid = changes.laid
    if laid is None or changes.placements is not tables.placements:
        laid = lay_out(changes.read().changes, tables.placements)
    patch = _patch(laid, list(tables.holders.values()))
    shifts = patch.look() if patch is not None else Shifts([], [0] * len(tables.holders))
    sums = tables.slices.shifted(served_state.slice_sums, laid, shifts.pieces)
    expected = changes.manifest.fingerprints
    return FittedDelta(
        served_state=served_state,
        plan=plan,
        patch=patch,
        contents={
            name: f"{int(served_state.contents[name], 16) + shift & MASK:016x}"
            for name, shift in zip(tables.holders, shifts.holders, strict=True)
        },
        fingerprints=_expected(changes, served_state, laid, shifts),
        slice_check=None if sums is None else tables.slices.check(sums, expected, "refit.json"),
    )


def _check_order(changes: DeltaChanges, served_state: ServedState) -> None:
    """Refuse a delta from another version, one too many, and one whose other tensors are not those in memory."""
    if not leads_from(changes, served_state.label):
        raise FullNeededError(
            f"the delta leads from {changes.base} to {changes.label}, and the engine holds {served_state.label}: "
            "load a full version"
        )
    if len(served_state.followed_by(changes.handle)) > MOST_DELTAS:
        raise FullNeededError(f"there are {MOST_DELTAS} deltas since {served_state.source.label}: load a full version")
    expected = changes.manifest.fingerprints
    for name, found in served_state.fingerprints:
        if name not in changes.results and name in expected and int(expected[name], 16) != found:
            raise FullNeededError(f"tensor {name} is not what {changes.label} is made of: load a full version")


def _patch(laid: LaidOutDelta, holders: list[Any]) -> HostPatch | DevicePatch | None:
    if not laid.names:
        return None
    return (DevicePatch if holders[int(laid.groups[0].table[0, HOLDER])].is_cuda else HostPatch)(laid, holders)


def _expected(
    changes: DeltaChanges, served_state: ServedState, laid: LaidOutDelta, shifts: Shifts
) -> list[tuple[str, int]]:
    """The fingerprints that the checkpoint's tensors will have, which are those that the delta promises."""
    whole: dict[str, list[int]] = {}
    for name, is_whole, shift in zip(laid.names, laid.whole, shifts.pieces, strict=True):
        if is_whole:
            whole.setdefault(name, []).append(shift)
    found: list[tuple[str, int]] = []
    for name, before in served_state.fingerprints:
        after = before + whole[name].pop(0) & MASK if name in whole else before
        if name in whole and after != changes.results[name]:
            raise FullNeededError(
                f"tensor {name} would have fingerprint {after:016x} with the delta, and should have "
                f"{changes.results[name]:016x}: the weights in memory are of another version"
            )
        found.append((name, after))
    return found


class DeltaInPlace(UpdateSource):
    kind = "delta"

    def __init__(self, changes: DeltaChanges, loading: Loading) -> None:
        folder, nbytes = changes.place.folder, changes.nbytes
        super().__init__(loading, label=changes.label, digest=changes.digest, folder=folder, nbytes=nbytes)
        self.changes = changes
        self._fitted: FittedDelta | None = None

    @property
    def signature(self) -> str:
        """What the files look like now; `is_unchanged` says whether they were read so."""
        return signature(self.changes.place.root, self.changes.place.path)

    def is_unchanged(self) -> bool:
        return self.changes.is_unchanged()

    def look(self, served_state: ServedState | None) -> None:
        """Make it fit: translate it, read what is there, and compute what follows. The engine may serve meanwhile.

        Raises:
            SourceRefusedError: it does not fit.
        """
        self._fitted = fit_delta(self.changes, served_state, self.loading)

    def fit(self, served_state: ServedState | None, contents: dict[str, str]) -> None:
        # The delta was laid out for these very bits: on others the sums of `look` prove nothing.
        if served_state is not None and contents != served_state.contents:
            raise FullNeededError(f"the weights in memory are not those of {served_state.label} any more")
        ready = self._fitted
        if ready is None or ready.served_state is not served_state or not self.loading.has(ready.plan):
            self.look(served_state)

    def write(self, call: UpdateCall) -> TensorFeed:
        patch = self._ready.patch
        return self.loading.apply(call, call.path, call.load_format, write_nothing if patch is None else patch.write)

    def check(self, contents: dict[str, str]) -> str | None:
        if contents != self._ready.contents:
            wrong = next(name for name, found in contents.items() if self._ready.contents.get(name) != found)
            return f"the model's {wrong} is not what the delta should have made of it"
        expected = self.changes.manifest.fingerprints
        self.proved = frozenset(name for name, _ in self._ready.fingerprints if name in expected)
        self.slice_check = self._ready.slice_check
        return None

    def put_back(self, call: UpdateCall, previous: ServedState | None, path: str) -> TensorFeed:
        patch = self._ready.patch
        return self.loading.apply(call, path, "auto", write_nothing if patch is None else patch.undo)

    def served_state(self, contents: dict[str, str]) -> ServedState | None:
        ready = self._ready
        source, deltas = ready.served_state.source, ready.served_state.followed_by(self.changes.handle)
        check, prints = ready.slice_check, ready.fingerprints
        sums = None if check is None else check.found
        return ServedState(source=source, deltas=deltas, contents=contents, fingerprints=prints, slice_sums=sums)

    @property
    def _ready(self) -> FittedDelta:
        if self._fitted is None:
            raise RuntimeError("a delta is written that was not looked at")
        return self._fitted
