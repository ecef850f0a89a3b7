"""What the tests with real servers share. A test of a real SGLang or vLLM, or of released trainers, exists only where
REFITD_SGLANG_VENV, REFITD_VLLM_VENV, REFITD_AREAL_VENV or REFITD_TRAINERS_VENV names one."""

import fcntl
import gc
import os
import shutil
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from refitd_plugin import channel
from support.once import shared_folder
from support.phase_limit import (  # noqa: F401  # pytest takes its hooks from here
    pytest_configure,
    pytest_runtest_call,
    pytest_runtest_setup,
    pytest_runtest_teardown,
    pytest_unconfigure,
)
from support.servers import AREAL_VENV, SGLANG_VENV, TRAINERS_VENV, VLLM_VENV, SglangServer

if TYPE_CHECKING:
    from support.plugged import PluggedSglang
    from support.postgres import PostgresServer
    from support.vllm import OneVllm

# A shell that runs the tests in the background has SIGINT ignored, and what the tests start would ignore it as well.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several processes of tests compute on few cores, and threads of torch that wait for one another would spin there.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same cases each time and everywhere, however slow the machine; `make soak`, or --hypothesis-profile=default, draws
# others. Hypothesis also draws constants from the modules that it takes for local, and which those are depends on the
# folder of the clone and on what was imported before: here there are none. It has no setting for that.
providers._get_local_constants = Constants  # pyright: ignore[reportPrivateUsage]
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

collect_ignore_glob = [
    *([] if SGLANG_VENV else ["e2e/test_sglang_*.py"]),
    *([] if VLLM_VENV else ["e2e/test_vllm_*.py"]),
    *([] if AREAL_VENV else ["e2e/test_areal_released.py"]),
    *([] if TRAINERS_VENV else ["e2e/test_trainers_*.py"]),
    *([] if "REFITD_LOWEST_VENV" in os.environ else ["lowest/*.py"]),
]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected, a million objects in each worker, stays until the end: the garbage collector
    looks at none of it, now or later, which takes half of the time to collect tests and some of the time to run them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a real vLLM come last, kind by kind: one runs at a time, and each takes most of a minute to start."""
    if not VLLM_VENV:
        return
    from support.vllm import STARTED

    kinds = list(STARTED)

    def turn(item: Any) -> int:
        kind = item.callspec.params.get("kind") if hasattr(item, "callspec") else None
        return kinds.index(kind) if kind in STARTED else -1

    items.sort(key=turn)


@pytest.fixture(autouse=True, scope="session")
def turns_of_usual_length() -> Generator[None]:
    """No loop of an engine runs here. Threads of the plugin last as long as an engine's process, and here as long as
    this one: where three hundred of them, of the engines of tests before, took turns of 20 µs, the process did nothing
    else any more, and its tests did not end.
    """
    with pytest.MonkeyPatch.context() as patch:
        for seconds in ("_SHORT_SECONDS", "_LISTENING_SECONDS"):
            patch.setattr(channel, seconds, sys.getswitchinterval())
        yield


def _copied_once(tmp_path_factory: pytest.TempPathFactory, name: str, config: pytest.Config, *width: str) -> Path:
    from support.tiny_models import tiny_models

    folder = shared_folder(tmp_path_factory) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            copy = tmp_path_factory.mktemp("models") / name
            kept = config.cache.mkdir("tiny-models") if hasattr(config, "cache") else copy.parent
            shutil.copytree(tiny_models(kept, *width), copy, symlinks=True).rename(folder)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty root, as a service has made it."""
    (tmp_path / "root" / ".refitd").mkdir(parents=True)
    return tmp_path / "root"


@pytest.fixture(scope="session")
def postgres() -> "Generator[PostgresServer]":
    """A real PostgreSQL for all tests of this process; each has databases of its own."""
    from support.postgres import ABSENT, programs, running_postgres

    if programs() is None:
        pytest.skip(ABSENT)
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """model_a and model_b, and what tests/sglang/README.md lists beside them. Read only: all workers have the same."""
    return _copied_once(tmp_path_factory, "models-of-all", pytestconfig)


@pytest.fixture(scope="session")
def vllm_models(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """The same, as wide as vLLM wants them on a CPU."""
    from support.vllm import WIDTH

    return _copied_once(tmp_path_factory, "models-of-vllm", pytestconfig, str(WIDTH))


@pytest.fixture(scope="session")
def one_vllm(vllm_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator["OneVllm"]:
    """The vLLM of all tests, on model_a, of the kind that a test asks for."""
    from support.vllm import OneVllm

    one = OneVllm(vllm_models, tmp_path_factory.mktemp)
    try:
        yield one
    finally:
        one.stop()


@pytest.fixture(scope="session")
def sglang_plugged(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator["PluggedSglang"]:
    """One with refitd's plugin on model_a, and its root. A test that kills it restarts it."""
    from support.plugged import PluggedSglang  # here, because every worker imports this module

    root = tmp_path_factory.mktemp("root")
    (root / ".refitd").mkdir()
    with PluggedSglang(tmp_path_factory.mktemp("plugged"), models / "model_a", root=root) as server:
        yield server


@pytest.fixture(scope="session")
def sglang(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[SglangServer]:
    """One SGLang on model_a for all tests. A test that kills it restarts it."""
    with SglangServer(tmp_path_factory.mktemp("sglang"), models / "model_a") as server:
        yield server
