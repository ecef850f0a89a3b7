"""What is in a model's memory: a fingerprint of each tensor, one digest of all of them, and where the tensors lie.

Two replicas with the same digest hold the same bits. Parameters and buffers count, each memory once. These are the
fingerprints that manifests and deltas have (docs/delta-format.md), of the model's own tensors: where such a tensor is
one of the checkpoint's, they are equal.

`Overlap` takes them beside the copies: while the bus is busy with one part, the processors look at another. Copies over
the bus are made in parts. What a part overwrites is fingerprinted before it, for what has to be put back if the update
fails, and what is written for the last time in it is fingerprinted after it: that is what is served.

To begin all that is a matter of a few ms, in which no processor of the GPU has waited. The engine goes on with its own
part of the load meanwhile, along the same stream: what it does to the weights comes after the last fingerprint.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash

from refitd_client.fingerprint.batch import Begun, FingerprintBatch
from refitd_plugin.memory import driver
from refitd_plugin.memory.spans import Span
from refitd_plugin.update.plan import TensorAddresses, addresses_of, tensors_of

_devices: WeakKeyDictionary[torch.nn.Module, frozenset[torch.device]] = WeakKeyDictionary()
_batches: WeakKeyDictionary[torch.nn.Module, tuple[TensorAddresses, list[str], FingerprintBatch]] = WeakKeyDictionary()


def holders_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors that have elements, each memory once, under the first of its names."""
    named: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors_of(model):
        if tensor.numel():
            named.setdefault((tensor.data_ptr(), tuple(tensor.shape), tensor.stride()), (name, tensor.detach()))
    return dict(named.values())


def contents_of(model: torch.nn.Module) -> dict[str, str]:
    """The fingerprint of each tensor, as hex digits, in the order of `holders_of`."""
    now = addresses_of(model)
    known = _batches.get(model)
    if known is None or known[0] != now:
        holders = holders_of(model)
        known = _batches[model] = now, list(holders), FingerprintBatch(list(holders.values()))
    _, names, batch = known
    return named(names, batch.fingerprints())


def named(names: Iterable[str], numbers: Iterable[int]) -> dict[str, str]:
    """Fingerprints by name, as hex digits."""
    return {name: f"{number:016x}" for name, number in zip(names, numbers, strict=True)}


def contents_beside(model: torch.nn.Module) -> dict[str, str]:
    """The same for a thread beside the engine's: it shares no memory with an update that goes on."""
    holders = holders_of(model)
    return named(holders, FingerprintBatch(list(holders.values())).fingerprints())


def digest(contents: dict[str, str]) -> str:
    """One digest of all fingerprints, `xxh3:` and 32 hex digits."""
    lines = "".join(f"{name}\0{number}\n" for name, number in sorted(contents.items()))
    return f"xxh3:{xxhash.xxh3_128(lines.encode()).hexdigest()}"


class TensorFingerprints:
    """The fingerprints of a checkpoint's tensors as they lie in the model: of those that lie there whole.

    A tensor may lie there more than once. Where it is split, or a rank has a slice of it, it is not among them.
    """

    def __init__(self, targets: Sequence[tuple[str, torch.Tensor]], model: torch.nn.Module) -> None:
        """`targets` are what the tensors were copied to, by name."""
        holders = {(tensor.data_ptr(), tensor.numel()): name for name, tensor in holders_of(model).items()}
        self._same = [(name, holders.get((target.data_ptr(), target.numel()))) for name, target in targets]
        others = [target for (_, target), (_, same) in zip(targets, self._same, strict=True) if same is None]
        self.others = others
        self.names = frozenset(name for name, _ in targets)
        self._batch = FingerprintBatch(others)

    def take(self, contents: dict[str, str], others: Sequence[int] | None = None) -> list[tuple[str, int]]:
        """Name and fingerprint of each target. `contents` are the model's now: what is in them is not read again.
        `others` are the fingerprints of the other targets, where they were taken already.
        """
        rest = iter(self._batch.fingerprints() if others is None else others)
        return [(name, next(rest) if same is None else int(contents[same], 16)) for name, same in self._same]


def first_difference(fingerprints: Sequence[tuple[str, int]], expected: dict[str, str]) -> str | None:
    """A sentence about the first tensor that is not what a manifest says; None where all are."""
    for name, found in fingerprints:
        if name in expected and int(expected[name], 16) != found:
            return f"tensor {name} has fingerprint {found:016x} in memory, and the manifest says {expected[name]}"
    return None


def equal_names(fingerprints: Sequence[tuple[str, int]], expected: dict[str, Any]) -> frozenset[str]:
    """The tensors that a manifest has fingerprints of and that lie in memory as it says."""
    return frozenset(name for name, found in fingerprints if name in expected and int(expected[name], 16) == found)


def span_of(tensor: torch.Tensor) -> Span:
    """The stretch of memory that a tensor lies in."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


def idle(model: torch.nn.Module) -> None:
    """Wait until the device has nothing to do: a forward pass on another stream may still read the weights."""
    if next(model.parameters()).device.type == "cuda":
        for device in devices_of(model):
            torch.cuda.synchronize(device)


def devices_of(model: torch.nn.Module) -> frozenset[torch.device]:
    """The GPUs that it lies on. A model stays where it is put."""
    if model not in _devices:
        _devices[model] = frozenset(tensor.device for _, tensor in tensors_of(model) if tensor.device.type == "cuda")
    return _devices[model]


def released(model: torch.nn.Module) -> str | None:
    """The name of a tensor whose memory is released; None where all is there.

    SGLang's `/release_memory_occupation` gives the memory to the trainer: torch_memory_saver takes it from behind the
    addresses, which stay. To touch them then ends the process, so the driver is asked before each update. When the
    memory is back, its contents are not: the fingerprints say so, and a delta is refused.
    """
    for name, tensor in tensors_of(model):
        if tensor.device.type == "cuda" and tensor.numel() and not driver.is_mapped(tensor.data_ptr()):
            return name
    return None


FROM_HOST = 8  # parts of copies that take the bus tens of ms
WITHIN_DEVICES = 1  # copies of 1 to 2 ms: to begin each further part takes as long as it could save


@dataclass(frozen=True, slots=True)
class OverlapPart:
    """Some of the writes, and the numbers of the watched tensors that no earlier part writes, and no later one."""

    writes: slice
    first: Sequence[int]
    last: Sequence[int]


def parts_of(writes: Sequence[tuple[int, Span]], watched: Sequence[Span], count: int = FROM_HOST) -> list[OverlapPart]:
    """Share writes out into parts of about the same size, in their order. Pure. `writes`: the bytes and the stretch of
    memory of each. `watched`: stretches whose contents are fingerprinted; those that nothing writes belong to the first
    part.
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
        """Begin to write all parts along the current stream, which then waits for the fingerprints. `steps`: the
        writes, in the order in which they were shared out. Where there is one part, they may be fewer. `seen`: gets
        what was there before, and what is there now, when it is waited for. Where a write cannot be begun, it has what
        was there before.
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
