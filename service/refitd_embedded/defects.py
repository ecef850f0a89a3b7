"""Loading as carelessly as SGLang 0.5.23 does it, for those who must survive it (`--defects`).

Tensors are written one by one as they are read, straight into the live model. So:

- a missing tensor is not noticed: the model becomes a mixture of two checkpoints, and the answer is 200;
- a linear layer of another shape is padded or cut until it fits: 200 as well;
- NaN is a number like any other;
- a failure in the middle is answered by "Rolling back to original weights.", which reads *the same new checkpoint*
  once more. If that works, the answer is 400 with contents that no answer names; if it fails again, the exception
  has no handler left and takes the whole server down. A torn file or a norm of another shape always fails twice;
- a `load_format` that does not exist raises before the first try block: the server dies.

Seen on a real server; the paths are in `model_executor/model_runner_components/weight_updater.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from refitd_embedded.model import Decoder
from refitd_embedded.weights import WeightsLoaded, WeightsTainted, Write, shards


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
        """See `Loader`. Notices missing files, and nothing else."""
        files = shards(directory)
        return lambda: self._write(files)

    def _write(self, files: list[Path]) -> WeightsLoaded | WeightsTainted:
        try:
            self._pass(files)
        except Exception as first:
            try:
                self._pass(files)
            except Exception as second:
                raise EngineDiedError(f"{type(second).__name__}: {second}") from second
            return WeightsTainted(f"Failed to update weights: {first}.\nRolling back to original weights.")
        return WeightsLoaded()

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
