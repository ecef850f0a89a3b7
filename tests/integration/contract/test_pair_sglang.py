"""A real prefill and a real decode server of SGLang on a CPU, updated by the service as one engine.

Keys and values go from one to the other by Mooncake over TCP (tests/sglang/README.md).
"""

import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.jobs import PATIENCE, PROMPT, running
from support.proxy import Hold, Proxy
from support.servers import API_KEY, KIT, SglangServer
from support.sockets import free_port

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
LOAD, PAUSE = "/update_weights_from_disk", "/pause_generation"


class HalfServer(SglangServer):
    """A server that prefills or decodes."""

    def __init__(self, folder: Path, model: Path, role: str) -> None:
        self.name = f"sglang-{role}"
        self.bootstrap_port = free_port()
        flags = ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "mooncake"]
        # Otherwise it registers a pool in host memory with CUDA, which is not there.
        flags += ["--disaggregation-decode-retraction-backup", "cpu_tensor"] if role == "decode" else []
        super().__init__(folder, model, *flags, "--disaggregation-bootstrap-port", str(self.bootstrap_port))

    def environment(self) -> dict[str, str]:
        shims = [str(KIT / "shims" / name) for name in ("cpu_pin_memory", "cpu_events")]
        folders = [*shims, *filter(None, [os.environ.get("PYTHONPATH")])]
        return super().environment() | {"PYTHONPATH": os.pathsep.join(folders), "MC_FORCE_TCP": "1"}


@pytest.fixture(scope="module")
def halves(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[list[HalfServer]]:
    """Both on model_a, prefill first."""
    folder = tmp_path_factory.mktemp("pair")
    servers = [HalfServer(folder, models / "model_a", role) for role in ("prefill", "decode")]
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        for server in servers:
            stack.callback(server.stop)
        list(pool.map(HalfServer.start, servers))
        yield servers


def answered(halves: list[HalfServer]) -> list[int]:
    """What the pair answers, asked as a router asks it."""
    body: dict[str, Any] = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": halves[0].bootstrap_port,
        "bootstrap_room": 77,
    }

    def ask(server: HalfServer) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {API_KEY}"}
        reply = httpx.post(f"{server.url}/generate", json=body, headers=headers, timeout=PATIENCE, trust_env=False)
        return reply.raise_for_status().json()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(ask, halves))[1]["output_ids"]


def labels(halves: list[HalfServer]) -> list[tuple[str, str]]:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    told = [httpx.get(f"{server.url}/model_info", headers=headers, trust_env=False).json() for server in halves]
    return [(each["model_path"], each["weight_version"]) for each in told]


def test_both_are_paused_before_either_loads_and_then_both_are_on_the_version(
    halves: list[HalfServer], models: Path, tmp_path: Path
) -> None:
    """The decode server's pause is held: the prefill server, paused already, is not loaded meanwhile."""
    answers = [answered(halves)]
    with Proxy(halves[0].port) as prefill, Proxy(halves[1].port) as decode:
        (tmp_path / "engines.yaml").write_text(f"engines:\n  - url: {prefill.url}\n    pair: {decode.url}\n")
        flags = ("--engines-file", str(tmp_path / "engines.yaml"))
        with running(tmp_path, halves[0], *flags, named=False) as job:
            for step, model in enumerate(["model_b", "model_a"], start=1):
                loads, hold = prefill.count(LOAD), Hold()
                decode.plan(PAUSE, hold)
                publication = job.publish(models / model, step)
                hold.until_arrived()
                prefill.until(PAUSE, step)
                assert (prefill.count(LOAD), decode.count(LOAD)) == (loads, loads)
                hold.release()
                publication.wait(timeout=PATIENCE)
                assert (prefill.count(LOAD), decode.count(LOAD)) == (loads + 1, loads + 1)
                path = str(publication.path)
                assert labels(halves) == [(path, str(step))] * 2
                assert len(job.client.engines().items) == 1
                answers.append(answered(halves))
    assert answers[0] == answers[2] != answers[1]
