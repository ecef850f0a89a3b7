"""The front, as a process, between a trainer that speaks as AReaL does and a real engine.

`test_areal_released.py` has the released AReaL itself in the trainer's place.
"""

import shutil
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest

from support.adapters import write_adapter
from support.front import FrontServer
from support.jobs import PATIENCE, PROMPT, RUN, Job, running, served_by
from support.servers import ADMIN_KEY, EmbeddedServer

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture
def job(models: Path, tmp_path: Path) -> Generator[Job]:
    with EmbeddedServer(tmp_path, models / "model_a") as engine, running(tmp_path, engine) as job:
        yield job


def test_a_front_turns_areal_s_calls_into_the_transaction_and_streams_the_rest(
    models: Path, tmp_path: Path, job: Job
) -> None:
    with (
        FrontServer(tmp_path, job, "--engine", f"{job.engine.url}=0") as front,
        httpx.Client(base_url=front.url, timeout=PATIENCE, trust_env=False) as areal,
        ThreadPoolExecutor() as threads,
    ):
        assert areal.get("/health").status_code == 200
        old = served_by(job.engine)
        endless = {"temperature": 0, "max_new_tokens": 1000, "ignore_eos": True}

        def generate(*, stream: bool) -> str:
            body = {"input_ids": PROMPT, "sampling_params": endless, "stream": stream}
            with areal.stream("POST", "/generate", json=body) as reply:
                return "".join(reply.iter_text())

        under_way = [threads.submit(generate, stream=stream) for stream in (False, True)]
        while True:
            assert areal.post("/pause_generation", json={}).json()["status"] == "ok"
            if not wait(under_way, timeout=0.5).not_done:
                break
            areal.post("/continue_generation", json={})  # one that came after the pause waits for this
        assert all('"abort"' in each.result() for each in under_way)
        late = threads.submit(generate, stream=False)

        folder = tmp_path / "fileroot/weight_update_v4"
        shutil.copytree(models / "model_b", folder)
        updated = areal.post("/update_weights_from_disk", json={"model_path": str(folder), "abort_all_requests": True})
        assert (updated.status_code, updated.json()["success"]) == (200, True), updated.text
        shutil.rmtree(folder)
        now = served_by(job.engine)
        assert (now.path, now.label) == (str(job.root / RUN / "v000004"), "4")
        assert now.answer != old.answer
        assert not late.done()  # it waits at the front, and the engine is not paused
        assert areal.post("/continue_generation", json={}).json()["status"] == "ok"
        httpx.post(f"{job.engine.url}/abort_request", json={"abort_all": True}, headers=ADMIN, trust_env=False)
        assert late.result(PATIENCE)

        refused = areal.post("/update_weights_from_tensor", json={})
        assert refused.status_code == 409
        assert "refitd" in refused.json()["message"]


def test_each_engine_has_an_address_and_one_update_of_all_is_one_version(models: Path, tmp_path: Path) -> None:
    """AReaL tells all of its engines at about the same time, of the same folder."""
    (tmp_path / "second").mkdir()
    with (
        EmbeddedServer(tmp_path, models / "model_a") as one,
        EmbeddedServer(tmp_path / "second", models / "model_a") as two,
        running(tmp_path, one, "--engine", two.url) as job,
        FrontServer(tmp_path, job, "--engine", f"{one.url}=0", "--engine", f"{two.url}=0") as areal,
    ):
        fronts = [areal.address_of(engine.url) for engine in (one, two)]
        assert len(set(fronts)) == 2
        folder = tmp_path / "fileroot/weight_update_v1"
        shutil.copytree(models / "model_b", folder)

        def update(front: str) -> int:
            body = {"model_path": str(folder)}
            return httpx.post(f"{front}/update_weights_from_disk", json=body, timeout=PATIENCE).status_code

        with ThreadPoolExecutor() as threads:
            assert list(threads.map(update, fronts)) == [200, 200]
        assert [served_by(engine).label for engine in (one, two)] == ["1", "1"]
        assert [version.step for version in job.client.versions().items] == [1]
        for front in fronts:
            answer = httpx.post(
                f"{front}/generate", json={"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
            )
            assert answer.status_code == 200


def test_adapters_of_areal_s_go_by_the_front_as_well(models: Path, tmp_path: Path) -> None:
    with (
        EmbeddedServer(tmp_path, models / "model_a", "--enable-lora") as engine,
        running(tmp_path, engine, "--lora", "actor") as job,
        FrontServer(tmp_path, job, "--engine", f"{engine.url}=0") as front,
        httpx.Client(base_url=front.url, timeout=PATIENCE, trust_env=False) as areal,
    ):
        for step in (1, 2):
            folder = write_adapter(tmp_path / f"fileroot/weight_update_v{step}", models / "model_a", step)
            loaded = areal.post("/load_lora_adapter", json={"lora_name": f"actor-v{step}", "lora_path": str(folder)})
            assert (loaded.status_code, loaded.json()["success"]) == (200, True), loaded.text
            shutil.rmtree(folder)
            assert areal.post("/unload_lora_adapter", json={"lora_name": f"actor-v{step - 1}"}).json()["success"]
        names = [card["id"] for card in areal.get("/v1/models").json()["data"]]
        assert "actor-v2" in names, "what AReaL calls version 2 is what its requests name"
        assert "actor-v1" in names, "a request that was held back during the update still names it"
