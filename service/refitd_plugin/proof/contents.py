"""What is in a model's memory: a fingerprint of each tensor, one digest of all of them, and where the tensors lie.

Two replicas with the same digest hold the same bits. Parameters and buffers count, each memory once. These are the
fingerprints that manifests and deltas have (docs/delta-format.md), of the model's own tensors: where such a tensor is
one of the checkpoint's, they are equal.

`Overlap` takes them along the copies of an update: before the first one, for what has to be put back if the update
fails, and after the last one: that is what is served. Nothing waits for the GPU meanwhile, and the engine goes on with
its own part of the load along the same stream: what it does to the weights comes after the last fingerprint.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import xxhash

from refitd_client.fingerprint.batch import FingerprintBatch
from refitd_plugin.memory import driver
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
        self._batch = FingerprintBatch(others)

    def take(self, contents: dict[str, str], others: Sequence[int] | None = None) -> list[tuple[str, int]]:
        """Name and fingerprint of each target. `contents` are the model's now: what is in them is not read again.
        `others` are the fingerprints of the other targets, where they were taken already.
        """
        rest = iter(self._batch.fingerprints() if others is None else others)
        return [(name, next(rest) if same is None else int(contents[same], 16)) for name, same in self._same]


def held_against(
    fingerprints: Sequence[tuple[str, int]], expected: Mapping[str, str], says: str
) -> tuple[frozenset[str], str | None]:
    """The tensors that lie in memory as `expected`, and a sentence about the first that does not; None where all do.
    `says`: what has the fingerprints that are expected.
    """
    wanted = [(name, found, int(expected[name], 16)) for name, found in fingerprints if name in expected]
    wrong = next(((name, found) for name, found, value in wanted if found != value), None)
    proved = frozenset(name for name, found, value in wanted if found == value)
    if wrong is None:
        return proved, None
    name, found = wrong
    return proved, f"tensor {name} has fingerprint {found:016x} in memory, and {says} says {expected[name]}"


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


@dataclass(slots=True)
class SeenContents:
    """The fingerprints of watched tensors, in their order; None where they were not taken. `end` is what `wait` has to
    wait for.
    """

    before: list[int] | None = None
    after: list[int] | None = None
    end: Callable[[], None] | None = None

    def wait(self) -> None:
        """Wait for the writes that were begun, and for their fingerprints."""
        if (end := self.end) is not None:
            self.end = None
            end()


class Overlap:
    """Tensors of one GPU that are watched while they are written. Used again for each version."""

    def __init__(self, watched: Sequence[torch.Tensor]) -> None:
        self._device = watched[0].device
        self._first, self._last = FingerprintBatch(watched), FingerprintBatch(watched)

    def begin(self, steps: Sequence[Callable[[], object]], seen: SeenContents) -> None:
        """Begin the writes along the current stream. `seen` gets what was there before, and what is there now, when it
        is waited for. Where a write cannot be begun, it has what was there before.
        """
        with torch.cuda.device(self._device):
            before = self._first.begin()  # on the stream of the steps: the GPU takes it before the first of them
            try:
                for step in steps:
                    step()
                after = self._last.begin()
            except BaseException:
                # Steps that were begun may still write: what is put back has to come after them.
                torch.cuda.synchronize(self._device)
                seen.before = self._first.end(before)
                raise

        def end() -> None:
            torch.cuda.synchronize(self._device)
            seen.before, seen.after = self._first.end(before), self._last.end(after)

        seen.end = end
