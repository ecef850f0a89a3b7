"""A real refitd finds real engines where a real name server, the released sglang-router or AReaL's record names them:
it brings them to the target, lets go of those that are named no more, and keeps all when the place itself is gone.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from refitd_client.contract.states import EngineState
from support import hasty
from support.jobs import Job, running, served_by
from support.name_server import Table, naming
from support.router import RouterServer
from support.servers import EmbeddedServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ALLOWED = ("--engine-allow", "127.0.0.0/8,localhost")  # so that what is found is sent the keys


@dataclass(frozen=True)
class Found:
    """An engine, how a place calls it, and how it comes into that place and out of it."""

    engine: EmbeddedServer
    host: str
    comes: Callable[[], None]
    goes: Callable[[], None]

    @property
    def id(self) -> str:
        """Its id, as refitd makes it of what the place says."""
        return f"{self.host}:{self.engine.port}"


@contextmanager
def two_engines(folder: Path, model: Path) -> Generator[tuple[EmbeddedServer, EmbeddedServer]]:
    (folder / "second").mkdir()
    with EmbeddedServer(folder, model) as one, EmbeddedServer(folder / "second", model) as two:
        yield one, two


def follow(job: Job, models: Path, one: Found, two: Found) -> None:
    """One comes and is served, two comes and gets what there is, one goes and gets no more."""

    def is_in_sync(found: Found) -> None:
        job.until(lambda event: (event.subject, event.data.get("state")) == (found.id, EngineState.IN_SYNC))

    assert job.client.engines().items == []
    one.comes()
    is_in_sync(one)
    job.serve(models / "model_b", 1)
    two.comes()
    is_in_sync(two)
    assert [served_by(found.engine).label for found in (one, two)] == ["1", "1"]
    one.goes()
    job.until(lambda event: (event.subject, event.text) == (one.id, "removed"))
    assert [engine.id for engine in job.client.engines().items] == [two.id]
    job.serve(models / "model_a", 2)
    assert [served_by(found.engine).label for found in (one, two)] == ["1", "2"]


def test_engines_come_and_go_with_their_records_in_the_dns(models: Path, tmp_path: Path) -> None:
    """One by an address and a port of the operator's, the other by a service record, which has the port."""
    table: Table = {}
    with two_engines(tmp_path, models / "model_a") as (one, two), naming(table) as (host, port):
        address, service = ("rollout.test.", "A"), ("_sglang._tcp.test.", "SRV")

        def record(name: tuple[str, str], text: str) -> tuple[Callable[[], None], Callable[[], None]]:
            return lambda: table.update({name: [text]}), lambda: table.update({name: []})

        at = f"dns://{host}:{port}"
        flags = ["--discover", f"{at}/rollout.test?port={one.port}", "--discover", f"{at}/_sglang._tcp.test?type=SRV"]
        flags += ALLOWED
        with running(tmp_path, one, *flags, named=False, first=hasty.ask_often) as job:
            by_address = Found(one, "127.0.0.1", *record(address, "127.0.0.1"))
            follow(job, models, by_address, Found(two, "localhost", *record(service, f"0 0 {two.port} localhost.")))


def test_engines_come_and_go_with_the_workers_of_a_router(models: Path, tmp_path: Path) -> None:
    with (
        two_engines(tmp_path, models / "model_a") as (one, two),
        RouterServer(tmp_path) as router,
        running(
            tmp_path, one, "--discover", f"sglang-router+{router.url}", *ALLOWED, named=False, first=hasty.ask_often
        ) as job,
    ):
        workers = [
            Found(engine, "127.0.0.1", partial(router.add, engine), partial(router.remove, engine))
            for engine in (one, two)
        ]
        follow(job, models, *workers)
