"""DP attention in a real SGLang: two ranks, each with an attention of its own, which share the rest of the model.

SGLang counts such groups in `dp_size` before 0.5.23, and in `attn_dp_size` since. Each of them answers an update.
"""

import os
import random
import socket
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from support.architectures import make
from support.jobs import running
from support.plugged import PluggedSglang
from support.servers import API_KEY

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

# SGLang takes what other programs allocate meanwhile for its own, so that it may take more than it needs.
TWO_GROUPS = ("--tp", "2", "--dp", "2", "--enable-dp-attention", "--mem-fraction-static", "0.7")


def quiet_port() -> int:
    """A free port below those that the kernel hands out: SGLang also binds others at a distance of it (13, 233)."""
    for port in random.sample(range(12_000, 32_000), 100):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def answers(server: PluggedSglang) -> list[list[int]]:
    """What each group answers to one question."""
    body = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}}
    headers = {"Authorization": f"Bearer {API_KEY}"}
    found: list[list[int]] = []
    for group in (0, 1):
        asked = body | {"routed_dp_rank": group}
        reply = httpx.post(f"{server.url}/generate", json=asked, headers=headers, timeout=120, trust_env=False)
        found.append(reply.raise_for_status().json()["output_ids"])
    return found


@pytest.mark.skipif(
    not os.environ.get("REFITD_SGLANG_TRITON"),
    reason="two ranks need the real triton: REFITD_SGLANG_TRITON names the folder it is in",
)
@pytest.mark.parametrize("inside", ["on", "off"])
def test_each_group_answers_by_the_version_that_the_engine_is_said_to_serve(
    inside: str, models: Path, tmp_path: Path
) -> None:
    """With refitd inside and without."""
    pair = [make(tmp_path / f"{seed}", "qwen3", seed, models / "model_a") for seed in (1, 2)]
    root = tmp_path / "root"
    (root / ".refitd").mkdir(parents=True)
    variables = {"TORCHDYNAMO_DISABLE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1", "REFITD_SGLANG": inside}
    server = PluggedSglang(tmp_path, pair[0], *TWO_GROUPS, root=root, **variables)
    server.port = quiet_port()
    with server:
        found = [answers(server)]
        with running(tmp_path, server, root=root) as job:
            for step, model in enumerate([pair[1], pair[0], pair[1]], start=1):
                job.serve(model, step)
                found.append(answers(server))
            engine = job.engine_now
    assert (engine.plugin is not None) is (inside == "on")
    assert all(first == second for first, second in found)
    assert found[0] == found[2] != found[1] == found[3]
