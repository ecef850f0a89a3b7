"""What the plugin asks of the engine whose process it is in. An engine's hook implements this, and passes it in.

The hook wraps the function by which its engine updates weights from files. It makes an `UpdateCall` of each call that
it wants the plugin to carry out; whatever the engine does around a load, it goes on doing in that function.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from refitd_plugin.update.loading import TensorFeed


class Stages:
    """The milliseconds that each stage of an update takes. A stage that comes twice counts together."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, (time.perf_counter() - began) * 1000)

    def add(self, stage: str, ms: float) -> None:
        self.ms[stage] = round(self.ms.get(stage, 0.0) + ms, 2)


@dataclass(frozen=True, slots=True)
class UpdateCall:
    """One call of the engine's function that updates weights.

    `original` is that function, to be called with a path and a load format; it returns whether the load went well and a
    message. `observable` is False where a load within this call must not be recorded: the engine captures CUDA graphs
    in the same call.
    """

    path: str
    load_format: str
    original: Callable[[str, str], tuple[bool, str]]
    observable: bool = True
    stages: Stages = field(default_factory=Stages)


class EngineProcess(Protocol):
    """One rank of an engine: its model, how it was started, and how its loads are given tensors.

    Attributes:
        name: the engine's name in a handshake, as `sglang`.
        release: the installed release of the engine.
        port: the port that its HTTP server listens on.
        seed: the server's random seed. With the port it says which server this rank belongs to.
        rank: which of the tensor-parallel ranks it is.
        size: how many tensor-parallel ranks there are.
        dp_rank: which of the data-parallel ranks it is, where there are several.
        model: the torch module. Its `load_weights` takes an iterator of (name, tensor).
        model_path: the folder of the served version, as the engine has it. An update changes it before it loads.
        revision: the revision on the hub that the server was started with, where it was given one.
        may_release: whether the weights' memory may be taken away between updates.
    """

    @property
    def name(self) -> str: ...
    @property
    def release(self) -> str: ...
    @property
    def port(self) -> int | None: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def dp_rank(self) -> int | None: ...
    @property
    def model(self) -> Any: ...
    @property
    def model_path(self) -> str: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def may_release(self) -> bool: ...

    def set_model_path(self, path: str) -> None:
        """Record again what the engine served before an update that was refused or undone."""
        ...

    def aside(self) -> str | None:
        """Why updates are left to the engine itself; None where the plugin carries them out."""
        ...

    def loaded_once(self) -> str | None:
        """Why no weights can be loaded into the model again; None where they can, as far as can be seen."""
        ...

    def feeding(self, feed: "TensorFeed") -> AbstractContextManager[None]:
        """While the context lasts, loads in this thread iterate over `feed.tensors()` in place of files."""
        ...
