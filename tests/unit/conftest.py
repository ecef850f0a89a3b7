"""What tests of the plugin share. No test here starts processes: where the plugin would begin one, there is none."""

from collections.abc import Generator
from pathlib import Path

import pytest

from refitd_plugin.prefetch import PrefetchWorker
from support.plugin_threads import ending_plugin_threads


@pytest.fixture(autouse=True, scope="session")
def no_prefetch_processes() -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefetchWorker, "begin", lambda _: None)
        yield


@pytest.fixture(autouse=True)
def plugin_threads_end() -> Generator[None]:
    with ending_plugin_threads():
        yield


@pytest.fixture
def startup(tmp_path: Path) -> Path:
    """The folder of the model that a tiny rank is started with."""
    from safetensors.torch import save_file  # only those that ask for it wait for torch

    from support.mini_sglang import tiny_weights

    folder = tmp_path / "startup"
    folder.mkdir()
    save_file(tiny_weights(0), folder / "model.safetensors")
    return folder
