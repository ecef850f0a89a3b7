"""The HTTP API over the real parts of the service; engines are in memory."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.states import VersionState
from support.checkpoints import publish, tensors
from support.services import Stage, serving


async def test_waiting_for_a_version_ends_when_it_is_served(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        publish(stage.root, "run", 1, tensors(1))
        await stage.http.post("/v1/versions", json={"run": "run", "step": 1})
        found = (await stage.http.get("/v1/versions/run~v000001/wait?for=served&timeout=10")).json()
        assert found["outcome"] == "served"
        assert [(engine["state"], engine["step"]) for engine in found["version"]["engines"]] == [("IN_SYNC", 1)] * 2
        assert found["version"]["timings"]["validate"] > 0


@pytest.mark.parametrize(
    ("body", "status", "slug"),
    [
        ({"run": "run", "step": 1, "path": "/etc"}, 422, "path-outside-root"),
        ({"run": "run", "step": 1, "path": "run/none"}, 422, "path-missing"),
        ({"run": "../x", "step": 1}, 422, "bad-name"),
        ({"run": "run", "step": -1}, 422, "bad-name"),
        ({"run": "run", "step": 1, "kind": "lora"}, 422, "unsupported-kind"),
        ({"run": "run", "step": 1, "kind": "delta"}, 422, "bad-request"),
        ({"run": "run"}, 422, "bad-request"),
        ({"run": "run", "step": "x"}, 422, "bad-request"),
    ],
)
async def test_a_bad_notice_gets_its_own_problem_document(
    tmp_path: Path, body: dict[str, object], status: int, slug: str
) -> None:
    async with serving(tmp_path) as stage:
        answer = await stage.http.post("/v1/versions", json=body)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        problem = answer.json()
        assert problem["type"] == f"urn:refitd:problem:{slug}"
        assert problem["status"] == status
        assert problem["detail"]
        assert slug != "path-missing" or f"publish into this service's root, {stage.root}," in problem["detail"]
        assert stage.store.versions == {}


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("GET", "/v1/versions?limit=x", "limit in the query is 'x': it is not a whole number"),
        ("GET", "/v1/versions?limit=501", "limit in the query is '501': it has to be 500 or less"),
        ("GET", "/v1/versions/a~v000001/wait?timeout=301", "timeout in the query is '301': it has to be 300 or less"),
        ("GET", "/v1/log?severity=bad", "severity in the query is 'bad': it has to be 'info' or 'warning'"),
        ("GET", "/v1/engines?serves=x", "serves in the query is 'x': String should match pattern '^(>=)?[0-9]"),
        ("GET", "/v1/events", "last-event-id in the headers is 'x': it is not a whole number"),
        ("POST", "/v1/versions", "step in the body is 1.5: it is not a whole number; force in the body is no field"),
    ],
)
async def test_a_request_of_the_wrong_form_is_told_the_field_what_came_and_what_is_wanted(
    tmp_path: Path, method: str, path: str, said: str
) -> None:
    body = {"run": "run", "step": 1.5, "force": True} if method == "POST" else None
    async with serving(tmp_path) as stage:
        answer = await stage.http.request(method, path, json=body, headers={"Last-Event-ID": "x"})
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:refitd:problem:bad-request")
        assert answer.json()["detail"].startswith(said)


async def listed(stage: Stage, query: str = "") -> list[str]:
    """The ids on all pages."""
    found, cursor = [], ""
    while cursor is not None:
        page = (await stage.http.get(f"/v1/versions?limit=2{query}{cursor and '&cursor=' + cursor}")).json()
        found += [version["id"] for version in page["items"]]
        cursor = page["next_cursor"]
    return found


async def announced(stage: Stage, run: str, step: int) -> None:
    publish(stage.root, run, step, tensors(step))
    assert (await stage.http.post("/v1/versions", json={"run": run, "step": step})).is_success
    await stage.until(version_id(run, Order(1, step)), lambda record: record.state is VersionState.SEALED)


async def test_a_cursor_neither_skips_nor_repeats_while_versions_come_also_late_ones(tmp_path: Path) -> None:
    async with serving(tmp_path, names=()) as stage:
        for run, step in (("old", 5), ("old", 9), ("new", 1), ("old", 10), ("new", 7), ("new", 8)):
            await announced(stage, run, step)
        there = await listed(stage)
        found, cursor = [], ""
        for run, step in (("old", 7), ("new", 3), ("third", 1), ("old", 11), ("new", 9)):
            page = (await stage.http.get(f"/v1/versions?limit=1{cursor and '&cursor=' + cursor}")).json()
            found += [version["id"] for version in page["items"]]
            cursor = page["next_cursor"]
            await announced(stage, run, step)
        rest = (await stage.http.get(f"/v1/versions?limit=50&cursor={cursor}")).json()
        found += [version["id"] for version in rest["items"]]
        assert [each for each in found if each in there] == there
        assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("path", "slug"),
    [
        ("/v1/versions/none", "unknown-version"),
        ("/v1/engines/none", "unknown-engine"),
        ("/v1/explain/none", "unknown-id"),
        ("/nowhere", "not-found"),
    ],
)
async def test_what_is_not_there_is_named(tmp_path: Path, path: str, slug: str) -> None:
    async with serving(tmp_path) as stage:
        await stage.listed()
        answer = await stage.http.get(path)
        assert (answer.status_code, answer.json()["type"]) == (404, f"urn:refitd:problem:{slug}")


async def test_no_route_that_changes_anything_forgets_the_token(tmp_path: Path) -> None:
    async with serving(tmp_path, token="secret") as stage:
        paths = (await stage.http.get("/openapi.json")).json()["paths"]
        for path, methods in paths.items():
            for method in set(methods) - {"get"}:
                answer = await stage.http.request(method, path.replace("{", "").replace("}", ""), json={})
                assert answer.status_code == 401, (method, path)


async def test_engines_come_and_go(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        added = await stage.http.post("/v1/engines", json={"url": "http://b:1"})
        assert (added.status_code, added.json()["id"]) == (201, "b:1")
        assert (await stage.http.post("/v1/engines", json={"url": "http://b:1/"})).status_code == 409
        seen = -1
        async with asyncio.timeout(10):
            while stage.store.engines["b:1"].serving != "run~v000001":
                seen = await stage.store.changed.wait_after(seen, within=0.05)
        assert (await stage.http.delete("/v1/engines/b:1")).status_code == 204
        assert (await stage.http.get("/v1/engines/b:1")).status_code == 404
        assert (await stage.http.delete("/v1/engines/a:1")).status_code == 409


async def test_a_body_that_curl_calls_a_form_is_answered_with_what_to_send(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        form = {"content-type": "application/x-www-form-urlencoded"}
        answer = await stage.http.post("/v1/versions", content=b'{"run": "run", "step": 7}', headers=form)
        assert answer.status_code == 422
        assert "send the body with content-type: application/json" in answer.json()["detail"]
        wrong = await stage.http.post("/v1/versions", json={"run": "run"})
        assert "step" in wrong.json()["detail"]


async def test_what_is_wrong_with_root_and_engines_file_can_be_asked(tmp_path: Path) -> None:
    async with serving(tmp_path, token="secret") as stage:
        await stage.served(1)
        assert (await stage.http.get("/v1/overview")).json()["faults"] == dict.fromkeys(
            ("root", "engines", "journal", "disk", "folders", "upstream", "push", "tls")
        )
        stage.store.faults.set(engines_file="engines.yaml cannot be read")
        assert (await stage.http.get("/v1/overview")).json()["faults"]["engines"] == "engines.yaml cannot be read"


async def test_health_readiness_and_metrics_need_no_token(tmp_path: Path) -> None:
    async with serving(tmp_path, token="secret") as stage:
        await stage.served(1)
        assert (await stage.http.get("/healthz")).json() == {"status": "ok"}
        assert (await stage.http.get("/readyz")).status_code == 200
        metrics = (await stage.http.get("/metrics")).text
        assert 'refitd_versions{state="SEALED"} 1.0' in metrics
        assert 'refitd_engines{state="IN_SYNC"} 1.0' in metrics


@pytest.mark.parametrize(
    ("settings", "kind", "says"),
    [({"lora": "actor"}, "full", "save_pretrained"), ({}, "lora", "--lora NAME")],
)
async def test_a_kind_that_is_not_carried_out_is_refused_with_what_to_do(
    tmp_path: Path, settings: dict[str, Any], kind: str, says: str
) -> None:
    async with serving(tmp_path, **settings) as stage:
        answer = await stage.http.post("/v1/versions", json={"run": "run", "step": 1, "kind": kind, "base": "x"})
        assert (answer.status_code, says in answer.json()["detail"]) == (422, True), answer.json()
