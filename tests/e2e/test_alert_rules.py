"""The alerts fire when they should and at no other time, by Prometheus' own tool."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from support.promtool import WHY_NOT, promtool

FOLDER = Path(__file__).parents[2] / "deploy/prometheus"
needs_promtool = pytest.mark.skipif(promtool() is None, reason=WHY_NOT)


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool() or "", *words], capture_output=True, text=True, check=False)


@needs_promtool
def test_prometheus_takes_its_configuration_and_the_rules() -> None:
    for words in (
        ("check", "rules", FOLDER / "rules.yml"),
        ("check", "config", "--syntax-only", FOLDER / "prometheus.yml"),
    ):
        done = run(*words)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_each_alert_fires_when_it_should_and_not_before() -> None:
    done = run("test", "rules", FOLDER / "rules.test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_that_it_fires_and_one_that_it_does_not() -> None:
    rules = yaml.safe_load((FOLDER / "rules.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    cases = [case for test in yaml.safe_load((FOLDER / "rules.test.yml").read_text())["tests"]
             for case in test["alert_rule_test"]]  # fmt: skip
    assert {case["alertname"] for case in cases if "exp_alerts" in case} == alerts
    assert {case["alertname"] for case in cases if "exp_alerts" not in case} == alerts
    assert all(re.fullmatch(r"Refitd[A-Z]\w+", alert) for alert in alerts)
