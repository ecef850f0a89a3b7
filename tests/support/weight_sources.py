"""Sources of weights as vLLM's trainers have them, of a few lines: `WeightSource` by its structure alone."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import distributed


@dataclass(frozen=True)
class ParamMeta:
    """As vLLM's."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def described(tensors: Mapping[str, torch.Tensor]) -> list[ParamMeta]:
    return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()]


def read(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint."""
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


class Source:
    """Yields the tensors that it is made with. `said` is what it says of them; by default what is so.

    `passes` counts how often it was read to its end.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], said: list[ParamMeta] | None = None) -> None:
        self.tensors, self._said = tensors, said
        self.passes = 0

    def metadata(self) -> list[ParamMeta]:
        return described(self.tensors) if self._said is None else self._said

    def held_names(self) -> Collection[str] | None:
        return None

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.tensors.items()
        self.passes += 1


class Gathering(Source):
    """Gathers each tensor as it is yielded, by a collective of all ranks, as FSDP does."""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self.tensors.items():
            whole = tensor.clone()
            distributed.all_reduce(whole, op=distributed.ReduceOp.MAX)
            yield name, whole
        self.passes += 1


class Split(Source):
    """Of a model that is split: yields None for what this rank does not hold, or leaves out its whole group."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], held: Collection[str], groups: list[list[str]] | None = None
    ) -> None:
        super().__init__(tensors)
        self._held = held
        self._groups = [[*tensors]] if groups is None else groups

    def held_names(self) -> Collection[str]:
        return self._held

    def groups(self) -> list[list[str]]:
        return [group for group in self._groups if any(name in self._held for name in group)]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name in (name for group in self.groups() for name in group):
            yield name, self.tensors[name] if name in self._held else None
        self.passes += 1
