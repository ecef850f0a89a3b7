"""Checkpoints: finding the files, reading them, holding them against the model, and only then writing.

Which files count is SGLang's rule: with an index, the files it lists; without one, every `*.safetensors`. What is done
with them is not SGLang's: everything is read into memory and checked before the first parameter changes, so a load
either happens as a whole or not at all. `defects` has the real server's way.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from refitd_embedded.config import DecoderConfig, read_config
from refitd_embedded.model import Decoder

INDEX = "model.safetensors.index.json"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class CheckpointError(Exception):
    """The checkpoint cannot be loaded. The text names the file or tensor; no weight was touched."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """All weights are the checkpoint's."""


@dataclass(frozen=True, slots=True)
class Tainted:
    """The load failed in the middle: nobody knows what the weights are. Only a careless loader gets here."""

    message: str


Write = Callable[[], Loaded | Tainted]


class Loader(Protocol):
    """Brings a checkpoint into one decoder, in two steps so that the first can still be abandoned."""

    def open(self, directory: Path) -> Write:
        """Prepare, without touching a weight, and return the step that writes. Raises CheckpointError. Blocking."""
        ...


class CarefulLoader:
    """Reads and checks everything, then writes everything."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def open(self, directory: Path) -> Write:
        """See `Loader`."""
        fitted = fit(self._decoder, read(directory))

        def write() -> Loaded:
            commit(self._decoder, fitted)
            return Loaded()

        return write


def load(directory: Path, dtype: torch.dtype | None = None) -> Decoder:
    """A decoder from a checkpoint directory, in `dtype` or the one its `config.json` names.

    Raises OSError or ValueError for the configuration, CheckpointError for the weights.
    """
    config = DecoderConfig.from_hf(read_config(directory))
    decoder = Decoder(config).to(dtype or getattr(torch, config.dtype))
    commit(decoder, fit(decoder, read(directory)))
    return decoder


def shards(directory: Path) -> list[Path]:
    """The files that make up the checkpoint. Raises CheckpointError if there is none, or one is missing."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory (this engine does not download models)")
    if (directory / INDEX).exists():
        return _indexed(directory)
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise CheckpointError(f"Cannot find any model weights with `{directory}`.")
    return found


def read(directory: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, in memory. Raises CheckpointError."""
    tensors: dict[str, Tensor] = {}
    for path in shards(directory):
        part = _read_file(path)
        if twice := tensors.keys() & part.keys():
            raise CheckpointError(f"{min(twice)} is in {path.name} and in an earlier file of {directory}")
        tensors |= part
    return tensors


def fit(decoder: Decoder, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that the decoder wants, converted to its dtypes. Raises CheckpointError for what is missing, of
    another shape, not floating point, or not finite. Further tensors are left out, as SGLang leaves them out.
    """
    wanted = dict(decoder.named_parameters())
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise CheckpointError(f"{len(missing)} of {len(wanted)} tensors are missing: {_some(missing)}")
    fitted = {name: tensors[name].to(parameter.dtype) for name, parameter in wanted.items()}
    problems = (_problem(name, tensors[name].dtype, fitted[name], parameter) for name, parameter in wanted.items())
    if found := [problem for problem in problems if problem]:
        raise CheckpointError(_some(found))
    return fitted


def commit(decoder: Decoder, fitted: Mapping[str, Tensor]) -> None:
    """Overwrite the decoder's weights in place."""
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(fitted[name])


def _indexed(directory: Path) -> list[Path]:
    try:
        names = set(map(str, json.loads((directory / INDEX).read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as problem:
        raise CheckpointError(f"{directory / INDEX} cannot be read: {problem!r}") from problem
    if foreign := sorted(name for name in names if Path(name).name != name):
        raise CheckpointError(f"{directory / INDEX} points outside its directory: {_some(foreign)}")
    if gone := sorted(name for name in names if not (directory / name).is_file()):
        raise CheckpointError(
            f"{INDEX} references {len(gone)} shard file(s) missing from {directory} (incomplete download?): {gone}."
        )
    return [directory / name for name in sorted(names)]


def _read_file(path: Path) -> dict[str, Tensor]:
    # Into memory, not mapped: a file that is truncated under a mapping kills the process.
    try:
        return safetensors.torch.load(path.read_bytes())
    except (OSError, safetensors.SafetensorError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}") from problem


def _problem(name: str, dtype: torch.dtype, fitted: Tensor, parameter: Tensor) -> str | None:
    if fitted.shape != parameter.shape:
        return f"{name} has shape {list(fitted.shape)}, the model wants {list(parameter.shape)}"
    if dtype not in FLOATS:
        return f"{name} is {dtype}, the model wants floating point"
    if not torch.isfinite(fitted).all():
        return f"{name} has values that are not finite in {parameter.dtype}"
    return None


def _some(texts: Iterable[str]) -> str:
    """The first three, and how many more."""
    every = list(texts)
    more = f" and {len(every) - 3} more" if len(every) > 3 else ""
    return ", ".join(every[:3]) + more
