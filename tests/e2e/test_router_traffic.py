"""Requests through the released sglang-router, whose workers a real refitd keeps to the engines that may get them."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from refitd_client.contract.states import EngineState
from support.jobs import RUN, Job, running
from support.router import RouterServer
from support.servers import ADMIN_KEY, API_KEY, EmbeddedServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NO_WORKER = "503"


@contextmanager
def behind_a_router(
    folder: Path, models: Path, *flags: str, max_behind: int = 1
) -> Generator[tuple[Job, RouterServer, EmbeddedServer, EmbeddedServer]]:
    """Two engines that the router lists from its start, the second with `flags`, and a refitd that keeps its list."""
    (folder / "second").mkdir()
    (folder / "worker-key").write_text(API_KEY)
    with (
        EmbeddedServer(folder, models / "model_a") as one,
        EmbeddedServer(folder / "second", models / "model_a", *flags) as two,
        RouterServer(folder) as router,
    ):
        router.add(one)
        router.add(two)
        router.until_listed(one, two)
        assert router.generate() == "default"
        kept = f"sglang-router+{router.url}?run={RUN}&max_behind={max_behind}&worker_key_file={folder / 'worker-key'}"
        with running(folder, one, "--engine", two.url, "--router", kept) as job:
            yield job, router, one, two


def test_a_router_sends_no_request_to_an_engine_that_is_new_or_has_unknown_contents(
    models: Path, tmp_path: Path
) -> None:
    with behind_a_router(tmp_path, models, "--defects", "--load-delay", "3") as (job, router, one, two):
        router.until_listed()
        assert router.generate() == NO_WORKER
        job.serve(models / "model_b", 1)
        router.until_listed(one, two)
        assert {router.generate() for _ in range(4)} == {"1"}
        before = job.now
        interrupt(two)
        job.publish(models / "model_a", 2)
        job.until(lambda event: event.subject == id_of(two) and event.data.get("state") == EngineState.TAINTED, before)
        router.until_listed(one)
        assert {router.generate() for _ in range(4)} == {"2"}
        told = job.until(lambda event: event.subject == id_of(two) and "gets no more requests" in event.text, before)
        assert "unknown contents" in told.text
        router.until_listed(one, two)
        assert {router.generate() for _ in range(4)} == {"2"}


def test_a_router_gets_back_an_engine_that_was_restarted_when_it_is_current_again(models: Path, tmp_path: Path) -> None:
    with behind_a_router(tmp_path, models) as (job, router, one, two):
        job.serve(models / "model_b", 1)
        router.until_listed(one, two)
        two.kill()
        router.until_listed(one)
        two.restart()
        router.until_listed(one, two)
        assert {router.generate() for _ in range(4)} == {"1"}


def test_a_router_sends_no_request_to_an_engine_that_is_further_behind_than_is_allowed(
    models: Path, tmp_path: Path
) -> None:
    with behind_a_router(tmp_path, models, max_behind=1) as (job, router, one, two):
        job.serve(models / "model_b", 1)
        job.client.pause(RUN)
        job.publish(models / "model_a", 2).wait(wait_for="sealed")
        router.until_listed(one, two)
        assert router.generate() == "1"
        job.publish(models / "model_b", 3).wait(wait_for="sealed")
        router.until_listed()
        assert router.generate() == NO_WORKER
        job.client.resume(RUN)
        router.until_listed(one, two)
        assert router.generate() == "3"
        assert len(job.client.engines(run=RUN, serves=">=3").items) == 2
        assert job.client.engines(run=RUN, serves="1").items == []


def id_of(engine: EmbeddedServer) -> str:
    return f"127.0.0.1:{engine.port}"


def interrupt(engine: EmbeddedServer) -> None:
    """Have its next load break off in the middle."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    url = f"{engine.url}/embedded/interrupt_loads"
    httpx.post(url, json={"after": 3, "times": 1}, headers=headers, trust_env=False).raise_for_status()
