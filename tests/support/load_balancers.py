"""Envoy and nginx as processes, with the configurations of deploy/envoy and deploy/nginx."""

import os
import re
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import httpx

from .servers import API_KEY, Server
from .sockets import free_port

_TREE = Path(__file__).parents[2]
NO_ENVOY = "Envoy is not here: tests/envoy/install .envoy (make thorough does), or name it: REFITD_ENVOY"
NO_NGINX = "nginx is not here: tests/nginx/install .nginx (make thorough does), or name it: REFITD_NGINX"


def envoy() -> str | None:
    """Its path, None where there is none."""
    return _program("envoy")


def nginx() -> str | None:
    """Its path, None where there is none."""
    return _program("nginx")


def _program(name: str) -> str | None:
    ours = _TREE / f".{name}/{name}"
    return os.environ.get(f"REFITD_{name.upper()}") or shutil.which(name) or (str(ours) if ours.exists() else None)


class LoadBalancer(Server):
    """One before two engines.

    Args:
        folder: gets its configuration.
        configuration: the file that is shipped, in deploy.
        engines: their ports, as many as the configuration has.
        others: what else to write in the place of what the configuration has.
    """

    def __init__(self, folder: Path, configuration: str, engines: Sequence[int], others: dict[str, str]) -> None:
        super().__init__(folder)
        self.port = free_port()
        text = (_TREE / "deploy" / configuration).read_text()
        for number, port in enumerate(engines, 1):
            text = text.replace(f"10.0.0.{number}:30000", f"127.0.0.1:{port}")
            others |= {f"10.0.0.{number}, port_value: 30000": f"127.0.0.1, port_value: {port}"}
        for place, ours in others.items():
            text = text.replace(place, ours)
        assert "10.0.0." not in text
        self._configuration = folder / Path(configuration).name
        self._configuration.write_text(text)

    def start(self) -> Self:
        """Start it and wait until it listens, which Envoy does a moment after it has said that it will."""
        super().start()
        while True:
            with socket.socket() as connection:
                if connection.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            time.sleep(0.01)

    def generate(self) -> str:
        """Ask for a few tokens as a rollout does; the label that answered, or the status of an error."""
        body = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}}
        headers = {"Authorization": f"Bearer {API_KEY}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=60.0, trust_env=False) as http:
            reply = http.post("/generate", json=body)
            return reply.json()["meta_info"]["weight_version"] if reply.is_success else str(reply.status_code)


class EnvoyServer(LoadBalancer):
    """Envoy, which asks a refitd about the engines.

    Args:
        folder: as `LoadBalancer`.
        engines: likewise.
        refitd: the service's port.
        run: the run of the engines.
        token: opens reads of the service.
        front: the port of a front that it is before, too.
    """

    name = "envoy"
    ready = re.compile(rb"all dependencies initialized\. starting workers")

    def __init__(
        self, folder: Path, engines: Sequence[int], refitd: int, run: str, token: str, front: int | None = None
    ) -> None:
        ours = {
            "10.0.0.9, port_value: 8700": f"127.0.0.1, port_value: {refitd}",
            "port_value: 8701": f"port_value: {front}",
            "run=grpo-7b": f"run={run}",
            "READ-TOKEN": token,
        }
        super().__init__(folder, f"envoy/{'envoy' if front is None else 'front'}.yaml", engines, ours)
        text = self._configuration.read_text()
        self._configuration.write_text(text.replace("port_value: 8080", f"port_value: {self.port}"))

    def command(self, port: int) -> Sequence[str]:
        """Its command line. It shares no memory with another Envoy."""
        return [envoy() or "envoy", "-c", str(self._configuration), "--disable-hot-restart", "--concurrency", "1"]


class NginxServer(LoadBalancer):
    """nginx, which is before a front as well."""

    name = "nginx"
    ready = re.compile(rb"start worker process \d+")

    def __init__(self, folder: Path, engines: Sequence[int], front: int) -> None:
        super().__init__(folder, "nginx/front.conf", engines, {"127.0.0.1:8701": f"127.0.0.1:{front}"})
        places = [f"{each}_temp_path {folder}/{each};" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
        text = self._configuration.read_text().replace("http {", "\n".join(["http {", "access_log off;", *places]), 1)
        self._configuration.write_text(text.replace("127.0.0.1:8080", f"127.0.0.1:{self.port}"))

    def command(self, port: int) -> Sequence[str]:
        """Its command line. As root it would give up its rights, and could not look into the folder any more."""
        ours = f"daemon off; pid {self._configuration.parent}/nginx.pid; error_log stderr notice;"
        if os.geteuid() == 0:
            ours += " user root root;"
        return [nginx() or "nginx", "-c", str(self._configuration), "-e", "stderr", "-g", ours]
