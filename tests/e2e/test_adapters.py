"""LoRA adapters through the real sidecar: published, held against the model, loaded by name, unloaded, collected."""

import time
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from refitd_client.contract.states import EngineState, Kind
from support.adapters import write_adapter
from support.jobs import PATIENCE, RUN, Job, running
from support.servers import API_KEY, EmbeddedServer, EngineServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def adapters_of(engine: EngineServer) -> dict[str, str]:
    """The adapters that an engine lists, with their folders."""
    reply = httpx.get(f"{engine.url}/v1/models", headers={"Authorization": f"Bearer {API_KEY}"}, trust_env=False)
    return {card["id"]: card["root"] for card in reply.json()["data"] if card["parent"] is not None}


def until_only(job: Job, *steps: int) -> None:
    """Wait until the engine lists these adapters and no other: nobody tells when the last user of one is gone."""
    ends = time.monotonic() + PATIENCE
    wanted = {f"actor-v{step}": str(job.root / RUN / f"v{step:06d}") for step in steps}
    while adapters_of(job.engine) != wanted:
        assert time.monotonic() < ends, adapters_of(job.engine)
        time.sleep(0.05)


@pytest.fixture
def job(models: Path, tmp_path: Path) -> Generator[Job]:
    with (
        EmbeddedServer(tmp_path, models / "model_a", "--enable-lora") as engine,
        running(tmp_path, engine, "--lora", "actor", "--keep-last", "2") as job,
    ):
        yield job


def test_the_newest_adapters_are_served_by_name_and_the_others_are_unloaded_and_collected(
    models: Path, tmp_path: Path, job: Job
) -> None:
    for step in (1, 2, 3, 4):
        adapter = write_adapter(tmp_path / f"adapter{step}", models / "model_a", step)
        publication = job.serve(adapter, step)
        assert publication.kind is Kind.LORA
    until_only(job, 3, 4)
    job.client.reclaim()
    assert sorted(path.name for path in (job.root / RUN).glob("v*")) == ["v000003", "v000004"]
    version = job.client.versions().items[0]
    assert (version.kind, version.engines[0].step) == (Kind.LORA, 4)


def test_an_adapter_that_was_rolled_back_from_is_not_kept_for_requests_that_come_late(
    models: Path, tmp_path: Path, job: Job
) -> None:
    for step in (1, 2):
        job.serve(write_adapter(tmp_path / f"adapter{step}", models / "model_a", step), step)
    until_only(job, 1, 2)
    job.client.rollback(RUN)
    until_only(job, 1)


def test_a_trainer_s_own_adapter_folder_is_found_and_a_restarted_engine_gets_it_again(models: Path, job: Job) -> None:
    folder = write_adapter(job.root / RUN / "v000007", models / "model_a", 7)
    job.until(lambda event: event.subject.endswith("v000007") and event.text.startswith("served"))
    job.engine.kill()
    gone = job.until_engine(EngineState.UNREACHABLE)
    job.engine.restart()
    job.until_engine(EngineState.IN_SYNC, after=gone.seq)
    assert adapters_of(job.engine) == {"actor-v7": str(folder)}
