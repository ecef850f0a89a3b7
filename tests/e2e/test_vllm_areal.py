"""The released AReaL's own client for vLLM through the front of a real vLLM: not an imitation."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.areal import released_areal
from support.front import FrontServer
from support.jobs import PATIENCE, RUN, Job, running
from support.servers import API_KEY, AREAL_VENV
from support.vllm import PROMPT, VllmServer

pytestmark = [
    *(pytest.mark.vllm, pytest.mark.areal, pytest.mark.e2e, pytest.mark.timeout(600)),
    pytest.mark.skipif(not AREAL_VENV, reason="REFITD_AREAL_VENV names no AReaL: make areal"),
]


@pytest.fixture
def job(vllm_models: Path, tmp_path: Path) -> Generator[Job]:
    (tmp_path / "vllm").mkdir()
    server: Any = VllmServer(tmp_path / "vllm", vllm_models / "model_a")
    with server, running(tmp_path, server) as job:
        yield job


def test_the_released_areal_updates_a_vllm_through_the_front(vllm_models: Path, tmp_path: Path, job: Job) -> None:
    with FrontServer(tmp_path, job, "--engine", f"{job.engine.url}=0") as front:
        start, first, second = released_areal(
            "vllm", front.url, tmp_path, vllm_models / "model_b", vllm_models / "model_a"
        )
        a_pause_ends_what_runs(front.url)
    assert (first["version"], second["version"]) == (1, 2)
    assert first["deleted"]
    assert second["deleted"]  # AReaL has deleted its files, and refitd holds the versions
    assert start["tokens"] == second["tokens"] != first["tokens"]
    assert (first["versions"], second["versions"]) == ([1] * 8, [2] * 8)
    assert sorted(path.name for path in (job.root / RUN).glob("v*")) == ["v000001", "v000002"]


def a_pause_ends_what_runs(front: str) -> None:
    """AReaL asks again for the rest of an answer that was aborted: it gets what there is, as such."""
    body = {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "stream": True, "temperature": 0}
    headers = {"Authorization": f"Bearer {API_KEY}"}
    with httpx.Client(base_url=front, timeout=PATIENCE, trust_env=False) as areal, ThreadPoolExecutor() as threads:
        with areal.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            lines = reply.iter_lines()
            next(lines)
            paused = threads.submit(httpx.post, f"{front}/areal_pause_generation", json={}, timeout=PATIENCE)
            assert '"finish_reason":"abort"' in "".join(lines)
        assert paused.result(PATIENCE).json()["status"] == "ok"
        late = threads.submit(areal.post, "/v1/completions", json={**body, "stream": False, "max_tokens": 1})
        assert areal.post("/areal_continue_generation", json={}).json()["status"] == "ok"
        assert late.result(PATIENCE).status_code == 200
