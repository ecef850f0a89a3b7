"""What is in a model's memory: a fingerprint of each tensor, and one digest of all of them.

Two replicas with the same digest hold the same bits. Parameters and buffers count, each memory once. These are the
fingerprints that manifests and deltas have (docs/delta-format.md), of the model's own tensors: where such a tensor is
one of the checkpoint's, they are equal.
"""

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash

from refitd_client.fingerprint.batch import Batch
from refitd_plugin.plan import Anatomy, anatomy, tensors_of

_batches: WeakKeyDictionary[torch.nn.Module, tuple[Anatomy, list[str], Batch]] = WeakKeyDictionary()


def holders_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors that have elements, each memory once, under the first of its names."""
    named: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors_of(model):
        if tensor.numel():
            named.setdefault((tensor.data_ptr(), tuple(tensor.shape), tensor.stride()), (name, tensor.detach()))
    return dict(named.values())


def contents_of(model: torch.nn.Module) -> dict[str, str]:
    """The fingerprint of each tensor, as hex digits, in the order of `holders_of`."""
    now = anatomy(model)
    known = _batches.get(model)
    if known is None or known[0] != now:
        holders = holders_of(model)
        known = _batches[model] = now, list(holders), Batch(list(holders.values()))
    _, names, batch = known
    return named(names, batch.fingerprints())


def named(names: Iterable[str], numbers: Iterable[int]) -> dict[str, str]:
    """Fingerprints by name, as hex digits."""
    return {name: f"{number:016x}" for name, number in zip(names, numbers, strict=True)}


def contents_beside(model: torch.nn.Module) -> dict[str, str]:
    """The same for a thread beside SGLang's: it shares no memory with an update that goes on."""
    holders = holders_of(model)
    numbers = Batch(list(holders.values())).fingerprints()
    return {name: f"{number:016x}" for name, number in zip(holders, numbers, strict=True)}


def digest(contents: dict[str, str]) -> str:
    """One digest of all fingerprints, `xxh3:` and 32 hex digits."""
    lines = "".join(f"{name}\0{number}\n" for name, number in sorted(contents.items()))
    return f"xxh3:{xxhash.xxh3_128(lines.encode()).hexdigest()}"


class Prints:
    """The fingerprints of a checkpoint's tensors as they lie in the model: of those that lie there whole.

    A tensor may lie there more than once. Where it is split, or a rank has a slice of it, it is not among them.
    """

    def __init__(self, targets: Sequence[tuple[str, torch.Tensor]], model: torch.nn.Module) -> None:
        """`targets` are what the tensors were copied to, by name."""
        holders = {(tensor.data_ptr(), tensor.numel()): name for name, tensor in holders_of(model).items()}
        self._same = [(name, holders.get((target.data_ptr(), target.numel()))) for name, target in targets]
        others = [target for (_, target), (_, same) in zip(targets, self._same, strict=True) if same is None]
        self.others = others
        self._batch = Batch(others)

    def take(self, contents: dict[str, str], others: Sequence[int] | None = None) -> list[tuple[str, int]]:
        """Name and fingerprint of each target. `contents` are the model's now: what is in them is not read again, nor
        are `others` where their fingerprints are given.
        """
        rest = iter(self._batch.fingerprints() if others is None else others)
        return [(name, next(rest) if same is None else int(contents[same], 16)) for name, same in self._same]


def differing(prints: Sequence[tuple[str, int]], expected: dict[str, str]) -> str | None:
    """The first tensor that is not what a manifest says, as a sentence."""
    for name, found in prints:
        if name in expected and int(expected[name], 16) != found:
            return f"tensor {name} has fingerprint {found:016x} in memory, and refit.json says {expected[name]}"
    return None


def equal(prints: Sequence[tuple[str, int]], expected: dict[str, Any]) -> int:
    """How many of the tensors that a manifest has fingerprints of lie in memory as it says."""
    return len({name for name, found in prints if name in expected and int(expected[name], 16) == found})
