"""A trainer that lends the weights of a small model from shared memory: what a GPU's memory is, on the CPU."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from refitd_client.handover import lender
from refitd_client.handover.lent import Lent
from refitd_client.handover.making import offer_of
from refitd_client.handover.secret import make_secret, read_secret
from refitd_client.handover.shared import SharedTensors
from refitd_client.tensors import DTYPES

Weights = dict[str, torch.Tensor]


def shared(weights: Weights, folder: Path) -> SharedTensors:
    """The same tensors where they can be lent."""
    specs = {
        name: (DTYPES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))
        for name, tensor in weights.items()
    }
    made = SharedTensors(specs, folder)
    fill(made, weights)
    return made


def fill(made: SharedTensors, weights: Weights) -> None:
    """The next step's."""
    for name, tensor in weights.items():
        made.tensors[name].copy_(tensor)


@contextmanager
def lending(root: Path, step: int, made: SharedTensors, run: str = "run") -> Generator[Lent]:
    """An offer of a version. At the end of the context the trainer lends no more, as if it had gone."""
    make_secret(root)
    folder = root / run
    folder.mkdir(parents=True, exist_ok=True)
    version = f"{run.replace('/', '~')}~v{step:06d}"
    with Lent(folder, offer_of(version, made.tensors), read_secret(root)) as lent:
        yield lent
    lender.end(folder)
