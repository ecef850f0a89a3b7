"""The backend for verl, registered with a stand-in for verl's registry: verl itself is in an environment of its own."""

import importlib
import sys
from types import ModuleType
from typing import Any

REGISTERED: dict[str, Any] = {}


class _Registry:
    @staticmethod
    def register(name: str) -> Any:
        return lambda kind: REGISTERED.setdefault(name, kind)


def stand_in(**interface: Any) -> None:
    """Have `verl.checkpoint_engine.base` be importable, with a `CheckpointEngine` that has these attributes."""
    for name in ("verl", "verl.checkpoint_engine", "verl.checkpoint_engine.base"):
        sys.modules[name] = ModuleType(name)
    base: Any = sys.modules["verl.checkpoint_engine.base"]
    base.CheckpointEngineRegistry, base.CheckpointEngine = _Registry, type("CheckpointEngine", (), interface)


def backend() -> Any:
    """The module that a user names as `custom_backend_module`."""
    stand_in(wire_format="named_tensors")
    return importlib.import_module("refitd_client.trainers.verl")
