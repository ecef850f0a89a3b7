"""What several workers of pytest need, made by the first that asks for it."""

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

_Made = TypeVar("_Made")


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of the tests that all workers have."""
    ours = factory.getbasetemp()
    return ours.parent if "PYTEST_XDIST_WORKER" in os.environ else ours


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], _Made]) -> _Made:
    """What `make` returns of a folder of its own, which stays. It is pickled for the other workers."""
    result = shared_folder(factory) / f"{name}.pickle"
    with result.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            made = make(factory.mktemp(name))
            result.write_bytes(pickle.dumps(made))
        return pickle.loads(result.read_bytes())  # noqa: S301 - a worker of these tests has written it
