"""Dashboard, alerts, runbook and the page on metrics speak of metrics that there are, with labels that they have."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from refitd.api.health import LeaderCollector
from refitd_client.contract.states import EngineState
from support.checkpoints import publish
from support.promql import Selector, selectors
from support.services import serving

TREE = Path(__file__).parents[2]
DASHBOARD = json.loads((TREE / "deploy/grafana/refitd.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((TREE / "deploy/prometheus/rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
RUNBOOK = (TREE / "docs/runbook.md").read_text()
METRICS = (TREE / "docs/metrics.md").read_text()
WHERE_THE_PAGE_IS = "{{ with $externalLabels.refitd_docs }}{{ . }}/runbook.html{{ else }}docs/runbook.md{{ end }}"

OF_PROMETHEUS = {"up": {"job", "instance"}, "ALERTS": {"alertname", "alertstate"}}
BY_SCRAPE = {"job", "instance"}  # what Prometheus adds to every series
OPEN_VALUES = {"run", "engine", "instance", "job", "le", *OF_PROMETHEUS["ALERTS"]}

Series = dict[str, dict[str, set[str]]]


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """Every series of a service that has served a version and rejected one: name to labels to values."""
    return asyncio.run(_series(tmp_path_factory.mktemp("service")))


async def _series(folder: Path) -> Series:
    async with serving(folder) as stage:
        await stage.served(1)
        publish(stage.root, "run", 2, {})
        await stage.rejected("run~v000002")
        await stage.sweep()
        text = (await stage.http.get("/metrics")).text
    group = CollectorRegistry()
    group.register(LeaderCollector(lambda: 1))  # what a service of a group has besides
    text += generate_latest(group).decode()
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    found["refitd_engine_state"]["state"] = set(EngineState)  # an engine is in one of them at a time
    return found


def panels() -> Iterator[dict[str, Any]]:
    yield from (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def expressions() -> Iterator[tuple[str, str]]:
    """Who asks, and what."""
    for panel in panels():
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])
    yield from (("annotations", each["expr"]) for each in DASHBOARD["annotations"]["list"])
    yield from ((rule["alert"], rule["expr"]) for rule in RULES)


def unknown(selector: Selector, series: Series) -> Iterator[str]:
    """What a selector speaks of and is not there."""
    known = OF_PROMETHEUS.get(selector.name)
    labels = series.get(selector.name)
    if known is None and labels is None:
        yield f"no metric {selector.name}"
        return
    for label, operator, value in selector.matchers:
        if label not in (known or labels or {}).keys() | BY_SCRAPE if known is None else label not in known:
            yield f"{selector.name} has no label {label}"
        elif label not in OPEN_VALUES and "Re" not in operator and value not in (labels or {}).get(label, set()):
            yield f"{selector.name} has no {label}={value!r}"


def test_every_query_speaks_of_metrics_that_there_are(series: Series) -> None:
    faults = [
        f"{who}: {fault}"
        for who, expression in expressions()
        for selector in selectors(expression)
        for fault in unknown(selector, series)
    ]
    assert not faults
    assert len({selector.name for _, text in expressions() for selector in selectors(text)}) > 15


def test_the_page_on_metrics_lists_each_with_its_type_and_labels(series: Series) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", METRICS, re.MULTILINE)
    told = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    there: dict[str, set[str]] = {}
    for name, labels in series.items():
        if name.startswith("refitd_") and not name.endswith(("_count", "_sum")):
            there[name.removesuffix("_bucket")] = labels.keys() - {"le"}
    assert {name: labels for name, (_, labels) in told.items()} == there
    for name, (kind, _) in told.items():
        assert (kind == "histogram") is (f"{name}_bucket" in series), name
        assert (kind == "counter") is name.endswith("_total"), name


def test_the_runbook_begins_with_a_list_of_its_alerts_with_links_and_how_urgent_they_are() -> None:
    listed = re.findall(r"^\| \[(\w+)\]\(#(\w+)\) \| (\w+) \|", RUNBOOK.partition("\n## ")[0], re.MULTILINE)
    alerts = [(rule["alert"], rule["labels"]["severity"]) for rule in RULES]
    assert listed == [(name, name.lower(), severity) for name, severity in alerts]


def test_every_alert_has_an_entry_in_the_runbook_and_none_is_left_over() -> None:
    entries = re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE)
    assert entries == [rule["alert"] for rule in RULES]
    for entry in RUNBOOK.split("\n## ")[1:]:
        name = entry.partition("\n")[0]
        for part in ("**What it means.**", "**How to see it.**", "**What to do.**"):
            assert part in entry, name
    for rule in RULES:
        assert rule["annotations"]["runbook_url"] == f"{WHERE_THE_PAGE_IS}#{rule['alert'].lower()}"
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert rule["labels"]["severity"] in {"page", "ticket"}


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """What is in one document and not in the other, or otherwise there."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after.get(key), f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from lost(*pair, f"{path}[{number}]")
    elif before != after:
        yield path


def through_grafanas_schema(dashboard: dict[str, Any]) -> dict[str, Any]:
    """The dashboard, read and written by the classes that Grafana's makers generate from its schemas."""
    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))


def test_the_dashboard_is_one_by_grafanas_own_schema() -> None:
    """What the schema does not know is lost on the way. Two fields it lacks, though Grafana itself writes them."""
    lacking = re.compile(r"\.templating\.list\[\d\]\.definition|\.annotations\.list\[0\]\.titleFormat")
    assert [path for path in lost(DASHBOARD, through_grafanas_schema(DASHBOARD)) if not lacking.fullmatch(path)] == []


def test_the_dashboard_can_be_put_up_anywhere() -> None:
    """No panel names a data source of some Grafana, and each says what it shows in units."""
    assert "id" not in DASHBOARD
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
    boxes = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [(x, y) for box in boxes for x in range(box["x"], box["x"] + box["w"])
             for y in range(box["y"], box["y"] + box["h"])]  # fmt: skip
    assert len(cells) == len(set(cells)), "panels lie on each other"
    assert max(x for x, _ in cells) < 24
