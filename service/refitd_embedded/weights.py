"""Checkpoints: finding the files, reading them, holding them against the model, only then writing; and checksums.

Which files count is SGLang's rule: with an index, the files it lists; without one, every `*.safetensors`. Unlike
SGLang, everything is read into memory and checked before the first parameter changes, so a load either happens as a
whole or not at all. An update of weights from disk is a command of the scheduler: nothing is computed while it runs.

    wait out the artificial delay → look at load_format → open (read, check) → write → labels

Until the write it can be abandoned. From there it goes through to the labels, also when the caller has left.

`/weights_checker` answers one content hash a tensor, equal to that of a real SGLang on CPU. SGLang fuses q, k and v
(and gate and up) into one parameter each, and hashes its parameters: sha256 over the bytes, the first eight of them as
sixteen hex digits. Fused tensors are stacked along the output dimension, so hashing the parts one after the other gives
the same digest, and no tensor has to be copied. (On a GPU SGLang uses another hash.)

With `--defects` an engine loads as carelessly as SGLang 0.5.23 does. Tensors are written one by one as they are read,
straight into the live model. So:

- a missing tensor is not noticed: the model becomes a mixture of two checkpoints, and the answer is 200;
- a linear layer of another shape is padded or cut until it fits: 200 as well;
- NaN is a number like any other;
- a failure in the middle is answered by "Rolling back to original weights.", which reads *the same new checkpoint*
  once more. If that works, the answer is 400 with contents that no answer names; if it fails again, the exception
  has no handler left and takes the whole server down. A torn file or a norm of another shape always fails twice;
- a `load_format` that does not exist raises before the first try block: the server dies.

Seen on a real server; the paths are in `model_executor/model_runner_components/weight_updater.py`.
"""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from refitd_embedded.model import Decoder, DecoderConfig, read_config
from refitd_embedded.scheduler import Scheduler
from refitd_embedded.wire import UpdateFromDiskBody

T = TypeVar("T")
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


Write = Callable[[], str | None]
"""Writes what was opened to the model. Blocking. A message where the weights are not known, which is a careless load's
alone.
"""


class CarefulLoader:
    """Reads and checks everything, then writes everything."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def open(self, directory: Path) -> Write:
        """Prepare, without touching a weight, and return the step that writes. Raises CheckpointError. Blocking."""
        fitted = fit(self._decoder, read(directory))
        return lambda: commit(self._decoder, fitted)


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


class EngineDiedError(Exception):
    """A real server would have died here. The text is its last error."""


@dataclass(slots=True)
class Interruption:
    """Makes the next `times` passes over a checkpoint fail after `after` tensors were written.

    The only way to get the 400 with unknown contents on purpose: once, and the "rollback" goes through.
    """

    after: int
    times: int


class CarelessLoader:
    """Writes while it reads. `interruption` is for tests."""

    def __init__(self, decoder: Decoder) -> None:
        self._parameters = dict(decoder.named_parameters())
        self.interruption = Interruption(after=0, times=0)

    def open(self, directory: Path) -> Write:
        """As `CarefulLoader.open`. Notices missing files, and nothing else."""
        files = shards(directory)
        return lambda: self._write(files)

    def _write(self, files: list[Path]) -> str | None:
        try:
            self._pass(files)
        except Exception as first:
            try:
                self._pass(files)
            except Exception as second:
                raise EngineDiedError(f"{type(second).__name__}: {second}") from second
            return f"Failed to update weights: {first}.\nRolling back to original weights."
        return None

    def _pass(self, files: list[Path]) -> None:
        for written, (name, tensor) in enumerate(_tensors(files)):
            if self.interruption.times and written == self.interruption.after:
                self.interruption.times -= 1
                raise RuntimeError(f"injected: interrupted after {written} tensors")
            if name in self._parameters:
                with torch.no_grad():
                    _squeeze_in(name, tensor, self._parameters[name])


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in files:
        with safetensors.safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                yield name, shard.get_tensor(name)


def _squeeze_in(name: str, tensor: Tensor, parameter: Tensor) -> None:
    """Write what fits, as SGLang's CPU loaders do: linear layers along the dimension that is sharded."""
    linear = "_proj." in name and tensor.dim() == parameter.dim()
    dim = 1 if "o_proj.weight" in name or "down_proj.weight" in name else 0
    if linear and tensor.shape[dim] != parameter.shape[dim]:
        size = min(tensor.shape[dim], parameter.shape[dim])
        parameter.zero_()
        parameter, tensor = parameter.narrow(dim, 0, size), tensor.narrow(dim, 0, size)
    if tensor.shape != parameter.shape:
        raise AssertionError(f"Attempted to load weight ({tensor.shape}) into parameter ({parameter.shape})")
    parameter.copy_(tensor)


LOADABLE = ("auto", "safetensors")
KNOWN_FORMATS = (
    *LOADABLE, "pt", "instanttensor", "npcache", "dummy", "sharded_state", "presharded", "gguf", "expert_pack",
    "bitsandbytes", "mistral", "layered", "flash_rl", "jax", "remote", "remote_instance", "rdma", "local_cached",
    "fastsafetensors", "private", "runai_streamer", "ipc_cache",
)  # fmt: skip
"""SGLang's `LoadFormat`. Any other value kills the real server."""

SUCCESS = "Succeeded to update model weights."
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)


@dataclass(slots=True)
class Labels:
    """What /model_info says is served. The scheduler has a `weight_version` of its own, which goes into answers: when
    a flush is refused after a load, the two differ, as they do on the real server.
    """

    model_path: str
    load_format: str = "auto"
    weight_version: str = "default"


class Updated(NamedTuple):
    """How an update ended, as it is answered."""

    success: bool
    message: str


class Reloader:
    """Loads checkpoints into the live model. `delay` is in seconds, for each load. `careless`: as with `--defects`."""

    def __init__(
        self, decoder: Decoder, scheduler: Scheduler, labels: Labels, *, careless: bool, delay: float = 0.0
    ) -> None:
        self.careless, self._delay = careless, delay
        self.loader = CarelessLoader(decoder) if careless else CarefulLoader(decoder)
        self._scheduler, self._labels = scheduler, labels

    async def load(self, order: UpdateFromDiskBody) -> Updated:
        """Carry out an order, between two steps of the scheduler. Raises EngineDiedError."""
        await asyncio.sleep(self._delay)
        load_format = order.load_format or self._labels.load_format
        if load_format not in KNOWN_FORMATS:
            message = f"load_format {load_format!r} does not exist: use one of {', '.join(KNOWN_FORMATS)}"
            if self.careless:
                raise EngineDiedError(message)
            return Updated(False, message)
        if load_format not in LOADABLE:
            return Updated(False, f"Failed to get model loader: load_format {load_format!r} is not supported.")
        try:
            write = await asyncio.to_thread(self.loader.open, Path(order.model_path))
        except CheckpointError as problem:
            return Updated(False, f"Failed to get weights iterator: {problem}")
        return await _to_the_end(self._write(write, order, load_format))

    async def _write(self, write: Write, order: UpdateFromDiskBody, load_format: str) -> Updated:
        if (tainted := await asyncio.to_thread(write)) is not None:
            return Updated(False, tainted)
        self._scheduler.relabel(order.weight_version)
        if order.flush_cache and not self._scheduler.may_flush():
            return Updated(False, NOT_FLUSHED)
        self._labels.model_path, self._labels.load_format = order.model_path, load_format
        if order.weight_version is None:
            return Updated(True, SUCCESS)
        self._labels.weight_version = order.weight_version
        return Updated(True, f"{SUCCESS} Weight version updated to {order.weight_version}.")


async def _to_the_end(work: Awaitable[T]) -> T:
    """Await `work`; being cancelled waits for its end first. Half-written weights are what must never be left."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
