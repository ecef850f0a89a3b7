"""What unit tests share. No test here starts processes: where the plugin would begin one, there is none."""

from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from refitd_plugin.prefetch import PrefetchWorker
from support.plugin_threads import ending_plugin_threads

if TYPE_CHECKING:
    from refitd_hosts.group.address import PostgresAddress
    from refitd_hosts.group.leadership import HeldLead
    from support.postgres import PostgresServer


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


@pytest.fixture
def database(postgres: "PostgresServer") -> "PostgresAddress":
    """A new, empty database."""
    from refitd_hosts.group.address import PostgresAddress

    return PostgresAddress(postgres.database())


@pytest.fixture
def led(database: "PostgresAddress") -> "Generator[Callable[..., HeldLead]]":
    """Takes the lead of a group on the database, as another process would. What was lost is in the list given."""
    from refitd_hosts.group.leadership import Candidate

    with ExitStack() as held:

        def take(lost: list[str] | None = None, lease: float = 60.0) -> "HeldLead":
            candidate = Candidate(database, "http://hub:8700", lease)
            held.callback(candidate.close)
            lead = candidate.try_to_lead([].append if lost is None else lost.append)
            assert lead is not None
            held.callback(lead.release)
            return lead

        yield take
