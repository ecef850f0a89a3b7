"""Requests through a real Envoy, whose health checks ask a real refitd for each engine's gate."""

import time
from pathlib import Path

import pytest

from support.jobs import PATIENCE, RUN, TOKEN, running
from support.load_balancers import NO_ENVOY, EnvoyServer, envoy
from support.servers import EmbeddedServer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.thorough,
    pytest.mark.timeout(300),
    pytest.mark.skipif(envoy() is None, reason=NO_ENVOY),
]

NO_HEALTHY_HOST = "503"


def until(proxy: EnvoyServer, label: str) -> None:
    """Wait until an answer has this label. Envoy asks for the gates once a second."""
    ends = time.monotonic() + PATIENCE
    while (found := proxy.generate()) != label:
        assert time.monotonic() < ends, f"it answers {found}, not {label}\n{proxy.tail()}"
        time.sleep(0.05)


def test_envoy_sends_requests_to_the_engines_whose_gates_are_open_and_to_no_other(models: Path, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    with (
        EmbeddedServer(tmp_path, models / "model_a") as one,
        EmbeddedServer(tmp_path / "second", models / "model_a") as two,
        running(tmp_path, one, "--engine", two.url) as job,
        EnvoyServer(tmp_path, (one.port, two.port), job.refitd.port, RUN, TOKEN) as proxy,
    ):
        assert proxy.generate() == NO_HEALTHY_HOST  # both are new
        job.serve(models / "model_b", 1)
        until(proxy, "1")
        job.client.pause(RUN)
        for step in (2, 3):
            job.publish(models / "model_a", step).wait(wait_for="sealed")
        until(proxy, NO_HEALTHY_HOST)  # both are two steps behind
        job.client.resume(RUN)
        until(proxy, "3")
        two.kill()
        job.until(lambda event: event.subject == f"127.0.0.1:{two.port}" and event.data.get("state") == "UNREACHABLE")
        until(proxy, "3")
