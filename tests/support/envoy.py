"""Envoy as a process, with the configuration of deploy/envoy."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import httpx

from .servers import API_KEY, EngineServer, Server
from .sockets import free_port

_TREE = Path(__file__).parents[2]
CONFIGURATION = _TREE / "deploy/envoy/envoy.yaml"
WHY_NOT = "Envoy is not here: tests/envoy/install .envoy (make thorough does), or name it: REFITD_ENVOY"


def envoy() -> str | None:
    """Its path, None where there is none."""
    ours = _TREE / ".envoy/envoy"
    return os.environ.get("REFITD_ENVOY") or shutil.which("envoy") or (str(ours) if ours.exists() else None)


class EnvoyServer(Server):
    """Envoy before two engines, which it asks a refitd about.

    Args:
        engines: as many as the configuration has.
        refitd: the service's port.
        run: the run of the engines.
        token: opens reads of the service.
    """

    name = "envoy"
    ready = re.compile(rb"all dependencies initialized\. starting workers")

    def __init__(self, folder: Path, engines: Sequence[EngineServer], refitd: int, run: str, token: str) -> None:
        super().__init__(folder)
        self.port = free_port()
        text = CONFIGURATION.read_text().replace("READ-TOKEN", token).replace("run=grpo-7b", f"run={run}")
        ours = {"127.0.0.1, port_value: 8080": self.port, "10.0.0.9, port_value: 8700": refitd}
        for number, engine in enumerate(engines, 1):
            ours[f"10.0.0.{number}, port_value: 30000"] = engine.port
            text = text.replace(f"10.0.0.{number}:30000", f"127.0.0.1:{engine.port}")
        for place, port in ours.items():
            text = text.replace(place, f"127.0.0.1, port_value: {port}")
        assert "10.0.0." not in text
        self._configuration = folder / "envoy.yaml"
        self._configuration.write_text(text)

    def command(self, port: int) -> Sequence[str]:
        """Its command line. It shares no memory with another Envoy."""
        return [envoy() or "envoy", "-c", str(self._configuration), "--disable-hot-restart", "--concurrency", "1"]

    def generate(self) -> str:
        """Ask for a few tokens as a rollout does; the label that answered, or the status of an error."""
        body = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}}
        headers = {"Authorization": f"Bearer {API_KEY}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=60.0, trust_env=False) as http:
            reply = http.post("/generate", json=body)
            return reply.json()["meta_info"]["weight_version"] if reply.is_success else str(reply.status_code)
