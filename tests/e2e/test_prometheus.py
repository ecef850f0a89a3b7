"""A real Prometheus on a real service, with the files of deploy: targets, alerts, and the queries of the dashboard."""

import json
import re
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from support.jobs import Job, running
from support.promtool import prometheus
from support.servers import EmbeddedServer, Server

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(prometheus() is None, reason="Prometheus is not here: tests/prometheus/install .promtool"),
]

DEPLOY = Path(__file__).parents[2] / "deploy"
PANELS = json.loads((DEPLOY / "grafana/refitd.json").read_text())["panels"]
VARIABLES = {"$__rate_interval": "1m", "$__interval": "5s", "$__range": "5m", "$instance": ".+", "$run": ".+"}
MAY_BE_EMPTY = {"Errors by part and reason"}  # where nothing went wrong
PATIENCE = 60.0
LOOK_AGAIN = 0.1  # Prometheus tells nobody when it has scraped


class PrometheusServer(Server):
    """`prometheus`, on the files that are deployed but for where the service is and how often it is asked."""

    name = "prometheus"
    ready = re.compile(rb"Server is ready to receive web requests")

    def __init__(self, folder: Path, target: str) -> None:
        super().__init__(folder)
        config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        config["rule_files"] = [str(DEPLOY / "prometheus/rules.yml")]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        self._config = folder / "prometheus.yml"
        self._config.write_text(yaml.safe_dump(config))
        self._data = folder / "prometheus"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def command(self, port: int) -> Sequence[str]:
        places = [f"--config.file={self._config}", f"--storage.tsdb.path={self._data}"]
        return [prometheus() or "", *places, f"--web.listen-address=127.0.0.1:{port}"]

    def ask(self, what: str, **params: str) -> Any:
        """An answer of its API."""
        reply = httpx.get(f"{self.url}/api/v1/{what}", params=params, trust_env=False)
        assert reply.status_code == 200, reply.text
        return reply.json()["data"]


@contextmanager
def watched(models: Path, folder: Path) -> Generator[tuple[Job, PrometheusServer]]:
    """A service with an engine, and a Prometheus that asks it."""
    with (
        EmbeddedServer(folder, models / "model_a") as engine,
        running(folder, engine) as job,
        PrometheusServer(folder, f"127.0.0.1:{job.refitd.port}") as server,
    ):
        yield job, server


def queries() -> list[tuple[str, str]]:
    """The dashboard's queries, with a value for each variable, by panel."""
    found: list[tuple[str, str]] = []
    for panel in PANELS:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            found.append((panel["title"], expression))
    return found


def test_a_real_prometheus_scrapes_the_service_answers_every_query_of_the_dashboard_and_alerts_when_it_is_gone(
    models: Path, tmp_path: Path
) -> None:
    with watched(models, tmp_path) as (job, server):
        left = dict.fromkeys(queries(), 0)
        assert len(left) > 20
        ends, step = time.monotonic() + PATIENCE, 0
        while time.monotonic() < ends and any(title not in MAY_BE_EMPTY for title, _ in left):
            step += 1  # rates are of what changes between two scrapes
            job.serve(models / ("model_b" if step % 2 else "model_a"), step)
            left = {query: 0 for query in left if not server.ask("query", query=query[1])["result"]}
        assert {title for title, _ in left} <= MAY_BE_EMPTY, f"no data: {left}"
        (target,) = server.ask("targets")["activeTargets"]
        assert (target["health"], target["labels"]["job"]) == ("up", "refitd")
        rules = [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]
        written = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())["groups"]
        assert {rule["name"] for rule in rules} == {rule["alert"] for group in written for rule in group["rules"]}
        assert {(rule["health"], rule["state"]) for rule in rules} == {("ok", "inactive")}

        job.refitd.kill()
        ends, alerts = time.monotonic() + PATIENCE, []
        while time.monotonic() < ends and not alerts:
            alerts = [alert["labels"]["alertname"] for alert in server.ask("alerts")["alerts"]]
            time.sleep(LOOK_AGAIN)
        assert alerts == ["RefitdDown"]
