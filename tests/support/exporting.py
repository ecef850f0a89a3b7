"""A trainer that exports the weights of a small model from shared memory: what a GPU's memory is, on the CPU."""

from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from refitd_client.checkpoint.finite import NO_RULE
from refitd_client.tensors import DTYPES
from refitd_client.transport import exporter
from refitd_client.transport.memory import LayoutCache, SharedTensors
from refitd_client.transport.offer import Offer
from refitd_client.transport.offer_file import ExportedTensors, ImportedTensors, make_secret, read_secret

Weights = dict[str, torch.Tensor]


def shared(weights: Weights, folder: Path) -> SharedTensors:
    """The same tensors where they can be exported."""
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
def exporting(
    root: Path, step: int, made: SharedTensors, run: str = "run", *, files: bool = True
) -> Generator[ExportedTensors]:
    """An offer of a version. At the end of the context the trainer exports no more, as if it had gone."""
    make_secret(root)
    folder = root / run
    folder.mkdir(parents=True, exist_ok=True)
    version = f"{run.replace('/', '~')}~v{step:06d}"
    offer = replace(offer_of(version, made.tensors), files=files)
    try:
        with ExportedTensors(folder, offer, read_secret(root)) as exported:
            yield exported
    finally:
        exporter.end(folder)


def offer_of(version: str, tensors: Mapping[str, Any]) -> Offer:
    """A single offer. Waits for the fingerprints.

    Raises:
        DriverError, NotSharedError: the memory of a tensor cannot be exported.
    """
    prepared = LayoutCache().prepare(tensors, [NO_RULE] * len(tensors))
    return prepared.offer(version, [each.fingerprint for each in prepared.scan()])


@contextmanager
def imported(path: Path, secret: bytes) -> Generator[ImportedTensors]:
    """Read an offer and hold its lock in a context. Raises as `ImportedTensors` and `hold`."""
    with closing(ImportedTensors(path, secret)) as found:
        found.hold()
        yield found
