"""The update of weights from disk, as a command of the scheduler: nothing is computed while it runs.

    wait out the artificial delay → look at load_format → open (read, check) → write → flush → labels

Until the write it can be abandoned. From there it goes through to the labels, also when the caller has left.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from refitd_embedded.defects import CarelessLoader, EngineDiedError
from refitd_embedded.model import Decoder
from refitd_embedded.scheduler import Scheduler
from refitd_embedded.weights import (
    CarefulLoader,
    CheckpointError,
    CheckpointLoader,
    WeightsLoaded,
    WeightsTainted,
    Write,
)

T = TypeVar("T")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOrder:
    """What /update_weights_from_disk asks for; defaults are SGLang's."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


@dataclass(frozen=True, slots=True)
class Updated:
    """How an update ended, as it is answered."""

    success: bool
    message: str


class Reloader:
    """Loads checkpoints into the live model. `delay` is in seconds, for each load.

    `careless` makes all the mistakes that SGLang makes (see `defects`).
    """

    def __init__(self, decoder: Decoder, scheduler: Scheduler, labels: Labels, *, careless: bool) -> None:
        self.delay = 0.0
        self.careless = careless
        self.loader: CheckpointLoader = CarelessLoader(decoder) if careless else CarefulLoader(decoder)
        self._scheduler, self._labels = scheduler, labels

    async def load(self, order: UpdateOrder) -> Updated:
        """Carry out an order, between two steps of the scheduler. Raises EngineDiedError."""
        await asyncio.sleep(self.delay)
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

    async def _write(self, write: Write, order: UpdateOrder, load_format: str) -> Updated:
        match await asyncio.to_thread(write):
            case WeightsTainted(message):
                return Updated(False, message)
            case WeightsLoaded():
                self._scheduler.relabel(order.weight_version)
        flushed = self._scheduler.flush()  # also unasked: there is no prefix cache whose loss could hurt
        if order.flush_cache and not flushed:
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
