"""Checkpoints: finding the files, reading them, holding them against the model, only then writing; and checksums.

Which files count is SGLang's rule: with an index, the files it lists; without one, every `*.safetensors`. Unlike
SGLang, everything is read into memory and checked before the first parameter changes, so a load either happens as a
whole or not at all; `defects` loads as the real server does.

`/weights_checker` answers one content hash a tensor, equal to that of a real SGLang on CPU. SGLang fuses q, k and v
(and gate and up) into one parameter each, and hashes what it has: sha256 over the bytes, the first eight of them as
sixteen hex digits. Fused tensors are stacked along the output dimension, so hashing the parts one after the other gives
the same digest, and no tensor has to be copied. (On a GPU SGLang uses another hash.)
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from refitd_embedded.config import DecoderConfig, read_config
from refitd_embedded.model import Decoder

FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}
"""First part → (name of the whole, all parts in order)."""
LATER_PARTS = ("k_proj", "v_proj", "up_proj")
INDEX = "model.safetensors.index.json"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class CheckpointError(Exception):
    """The checkpoint cannot be loaded. The text names the file or tensor; no weight was touched."""


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """All weights are the checkpoint's."""


@dataclass(frozen=True, slots=True)
class WeightsTainted:
    """The load failed in the middle, and the weights are not known. Only a careless loader returns this."""

    message: str


Write = Callable[[], WeightsLoaded | WeightsTainted]
"""Writes what was opened to the model. Blocking."""


class CheckpointLoader(Protocol):
    """Brings a checkpoint into one decoder, in two steps so that the first can still be abandoned."""

    def open(self, directory: Path) -> Write:
        """Prepare, without touching a weight, and return the step that writes. Raises CheckpointError. Blocking."""
        ...


class CarefulLoader:
    """Reads and checks everything, then writes everything."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def open(self, directory: Path) -> Write:
        fitted = fit(self._decoder, read(directory))

        def write() -> WeightsLoaded:
            commit(self._decoder, fitted)
            return WeightsLoaded()

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
        try:  # into memory, not mapped: a file that is truncated under a mapping kills the process
            part = safetensors.torch.load(path.read_bytes())
        except (OSError, safetensors.SafetensorError) as problem:
            raise CheckpointError(f"{path} cannot be read: {problem}") from problem
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


def checksums(decoder: Decoder) -> dict[str, str]:
    """The hash of every weight, under SGLang's names. Blocking."""
    tensors = dict(decoder.named_parameters())
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        *path, module, kind = name.split(".")
        if module in FUSED:
            whole, parts = FUSED[module]
            found[".".join((*path, whole, kind))] = _digest([tensors[".".join((*path, part, kind))] for part in parts])
        elif module not in LATER_PARTS:
            found[name] = _digest([tensor])
    return found


def report(found: dict[str, str]) -> dict[str, Any]:
    """The whole answer, for one rank of one."""
    overall = hashlib.sha256("".join(name + found[name] for name in sorted(found)).encode()).hexdigest()
    place = {"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1}
    rank = {"checksums": found, "per_gpu_checksum": overall, "parallelism_info": [{**place, "rank": 0, "size": 1}]}
    engine = hashlib.sha256(overall.encode()).hexdigest()
    return {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": engine}


def _digest(parts: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()[:8].hex()
