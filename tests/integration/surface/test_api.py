"""The HTTP API over the real parts of the service; engines are in memory."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refitd.engine.port import Outcome
from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.states import VersionState
from support.checkpoints import publish, tensors
from support.services import Stage, serving


async def test_a_notice_is_accepted_once_and_known_after_that(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        publish(stage.root, "run", 1, tensors(1))
        first = await stage.http.post("/v1/versions", json={"run": "run", "step": 1})
        again = await stage.http.post("/v1/versions", json={"run": "run", "step": 1})
        assert again.status_code == 200
        assert first.json()["id"] == again.json()["id"] == "run~v000001"
        assert first.status_code in {202, 200}  # the watch may have been faster


async def test_a_notice_a_thousand_times_at_once_is_one_version(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        publish(stage.root, "run", 1, tensors(1))
        async with asyncio.TaskGroup() as group:
            posts = [
                group.create_task(stage.http.post("/v1/versions", json={"run": "run", "step": 1})) for _ in range(1000)
            ]
        codes = {post.result().status_code for post in posts}
        assert codes - {503} <= {200, 202}  # 503: looks at the root wait for each other for too long, and none is lost
        assert codes - {503}
        assert len(stage.store.versions) == 1


async def test_waiting_for_a_version_ends_when_it_is_served(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        publish(stage.root, "run", 1, tensors(1))
        await stage.http.post("/v1/versions", json={"run": "run", "step": 1})
        found = (await stage.http.get("/v1/versions/run~v000001/wait?for=served&timeout=10")).json()
        assert found["outcome"] == "served"
        assert [(engine["state"], engine["step"]) for engine in found["version"]["engines"]] == [("IN_SYNC", 1)] * 2
        assert found["version"]["timings"]["validate"] > 0


async def test_waiting_has_an_end(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a",)) as stage:
        stage.engines["a"].gate = asyncio.Event()
        publish(stage.root, "run", 1, tensors(1))
        await stage.until("run~v000001", lambda record: record.state is VersionState.SEALED)
        found = (await stage.http.get("/v1/versions/run~v000001/wait?timeout=0.1")).json()
        assert found["outcome"] == "pending"
        stage.engines["a"].gate.set()


async def test_waiting_for_a_bad_version_fails_with_the_reason(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        weights = tensors(1)
        del weights["layer.1.weight"]
        publish(stage.root, "run", 1, weights)
        await stage.rejected("run~v000001")
        found = (await stage.http.get("/v1/versions/run~v000001/wait")).json()
        assert found["outcome"] == "failed"
        assert "layer.1.weight" in found["version"]["reason"]
        assert stage.engines["a"].loads == []


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
        ("GET", "/v1/versions?limit=x", "limit in the query is 'x': it has to be a whole number"),
        ("GET", "/v1/versions?limit=501", "limit in the query is '501': it has to be 500 or less"),
        ("GET", "/v1/versions/a~v000001/wait?timeout=301", "timeout in the query is '301': it has to be 300 or less"),
        ("GET", "/v1/log?severity=bad", "severity in the query is 'bad': it has to be 'info' or 'warning'"),
        ("GET", "/v1/engines?serves=x", "serves in the query is 'x': it has to be a text that matches ^(>=)?[0-9]"),
        ("GET", "/v1/events", "last-event-id in the headers is 'x': it has to be a whole number"),
        ("POST", "/v1/versions", "step in the body is 1.5: it has to be a whole number; force in the body is no field"),
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


async def test_one_step_with_other_content_is_a_conflict(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        publish(stage.root, "run", 99, tensors(2)).rename(stage.root / "elsewhere")
        answer = await stage.http.post("/v1/versions", json={"run": "run", "step": 1, "path": "elsewhere"})
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:refitd:problem:version-conflict")
        assert stage.engines["a"].label == "1"


async def test_lists_are_paged_newest_first(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        for step in (1, 2, 3):
            await stage.served(step)
        steps: list[int] = []
        cursor = ""
        while cursor is not None:
            page = (await stage.http.get(f"/v1/versions?limit=2{cursor and '&cursor=' + cursor}")).json()
            steps += [version["step"] for version in page["items"]]
            cursor = page["next_cursor"]
        assert steps == [3, 2, 1]


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


async def test_lists_go_by_time_across_runs_and_by_step_within_one(tmp_path: Path) -> None:
    async with serving(tmp_path, names=()) as stage:
        for run, step in (("old", 100), ("new", 1), ("old", 101), ("new", 3), ("old", 102), ("new", 2)):
            await announced(stage, run, step)
        newest_first = ["old~v000102", "new~v000003", "new~v000002", "old~v000101", "new~v000001", "old~v000100"]
        assert await listed(stage) == newest_first
        assert await listed(stage, "&run=new") == [each for each in newest_first if each.startswith("new")]
        assert await listed(stage, "&state=SEALED&run=old") == ["old~v000102", "old~v000101", "old~v000100"]


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


@pytest.mark.parametrize("query", ["cursor=x", "state=nonsense", "limit=0", "limit=x"])
async def test_a_bad_query_is_a_problem_and_no_bug(tmp_path: Path, query: str) -> None:
    async with serving(tmp_path) as stage:
        assert (await stage.http.get(f"/v1/versions?{query}")).status_code == 422


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


async def test_everything_that_changes_anything_needs_the_token(tmp_path: Path) -> None:
    async with serving(tmp_path, token="secret") as stage:
        await stage.listed()
        changes = [
            ("POST", "/v1/versions"),
            ("PUT", "/v1/versions/x/pin"),
            ("DELETE", "/v1/versions/x/pin"),
            ("POST", "/v1/rollback"),
            ("POST", "/v1/engines"),
            ("DELETE", "/v1/engines/x"),
            ("POST", "/v1/engines/x/resync"),
            ("POST", "/v1/reclaim"),
        ]
        for method, path in changes:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
                answer = await stage.http.request(method, path, headers=headers, json={"run": "run", "step": 1})
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"].startswith("Bearer realm=")
        good = await stage.http.put("/v1/versions/x/pin", headers={"Authorization": "Bearer secret"})
        assert good.status_code == 404
        assert (await stage.http.get("/v1/versions")).status_code == 200


async def test_no_route_that_changes_anything_forgets_the_token(tmp_path: Path) -> None:
    async with serving(tmp_path, token="secret") as stage:
        paths = (await stage.http.get("/openapi.json")).json()["paths"]
        for path, methods in paths.items():
            for method in set(methods) - {"get"}:
                answer = await stage.http.request(method, path.replace("{", "").replace("}", ""), json={})
                assert answer.status_code == 401, (method, path)


async def test_a_body_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        answer = await stage.http.post("/v1/versions", content=b"x" * (2**20 + 1))
        assert (answer.status_code, answer.json()["type"]) == (413, "urn:refitd:problem:too-large")


async def test_a_rollback_goes_to_the_version_before_and_a_newer_one_rolls_as_usual(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        first = await stage.served(1)
        second = await stage.served(2)
        answer = await stage.http.post("/v1/rollback", json={"run": "run"})
        assert answer.json()["id"] == first
        seen = -1
        async with asyncio.timeout(10):
            while stage.engines["a"].label != "1":
                seen = await stage.store.changed.wait_after(seen, within=0.05)
        left = (await stage.http.get(f"/v1/versions/{second}/wait")).json()
        assert (left["version"]["barred"], left["outcome"]) == (True, "failed")
        await stage.served(3)
        assert stage.engines["a"].label == "3"


async def test_a_rollback_without_an_earlier_version_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        for body, status in (({"run": "run"}, 409), ({"run": "none"}, 404), ({"run": "run", "to": "none"}, 404)):
            assert (await stage.http.post("/v1/rollback", json=body)).status_code == status


async def test_reclaim_keeps_the_last_versions_and_pins_and_says_why(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        for step in (1, 2, 3, 4):
            await stage.served(step)
        await stage.http.put("/v1/versions/run~v000001/pin")
        plan = (await stage.http.get("/v1/reclaim/plan")).json()
        assert {item["version"]: item["keep"] for item in plan["items"]} == {
            "run~v000001": True,
            "run~v000002": False,
            "run~v000003": True,
            "run~v000004": True,
        }
        assert (stage.root / "run/v000002").exists()
        done = (await stage.http.post("/v1/reclaim")).json()
        assert done["done"]
        assert not (stage.root / "run/v000002").exists()
        assert (await stage.http.get("/v1/versions/run~v000002")).json()["state"] == "DELETED"
        assert (await stage.http.post("/v1/versions", json={"run": "run", "step": 2})).status_code == 200


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


@pytest.mark.parametrize("url", ["ftp://x", "http://user:pass@x", "http://x/path", "nonsense", "http://x?q=1"])
async def test_an_engine_url_that_is_not_one_is_refused(tmp_path: Path, url: str) -> None:
    async with serving(tmp_path) as stage:
        answer = await stage.http.post("/v1/engines", json={"url": url})
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:refitd:problem:bad-engine-url")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/versions", {"run": "run", "step": 1, "allow_mising": True}),
        ("/v1/engines", {"url": "http://127.0.0.1:1", "name": "a"}),
        ("/v1/rollback", {"run": "run", "version": "run~v000001"}),
    ],
)
async def test_a_field_that_nobody_knows_is_refused_by_name(tmp_path: Path, path: str, body: dict[str, object]) -> None:
    async with serving(tmp_path) as stage:
        answer = await stage.http.post(path, json=body)
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:refitd:problem:bad-request")
        assert [*body][-1] in answer.json()["detail"]


async def test_a_resync_loads_an_engine_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        assert (await stage.http.post("/v1/engines/a:1/resync")).status_code == 202
        seen = -1
        async with asyncio.timeout(10):
            while len(stage.engines["a"].loads) < 2 or stage.store.engines["a:1"].serving is None:
                seen = await stage.store.changed.wait_after(seen, within=0.05)


async def test_versions_and_engines_explain_themselves(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        version = (await stage.http.get("/v1/explain/run~v000001")).json()["sentences"]
        assert any("Engine a:1 serves it." in sentence for sentence in version)
        assert any("kept" in sentence for sentence in version)
        engine = (await stage.http.get("/v1/explain/a:1")).json()["sentences"]
        assert "It serves run~v000001; that is the target of run run." in engine


async def test_an_engine_s_last_load_is_told_in_words(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        record = stage.store.engines["a:1"]

        async def told(**changes: Any) -> str:
            assert record.trouble.last_attempt is not None
            stage.store.engines["a:1"] = record.having(
                last_attempt=replace(record.trouble.last_attempt, **{"timings": {}, **changes})
            )
            return (await stage.http.get("/v1/explain/a:1")).json()["sentences"][-1]

        assert (await told()).endswith("and went well.")
        assert (await told(outcome=None)).endswith("and is under way.")
        refused = await told(outcome="NACK", reason="400 Bad Request")
        assert refused.endswith("and was refused, which left it as it was: 400 Bad Request.")
        for outcome in Outcome:
            assert outcome.name not in await told(outcome=outcome.name)
        took = await told(timings={"pause": 3.4, "load": 1200.0})
        assert took.endswith("and went well. It took: pause 3 ms, load 1,200 ms.")
        explained = (await stage.http.get("/v1/explain/run~v000001")).json()["sentences"]
        assert any(each.startswith("Its update took: ") and "validate " in each for each in explained)


async def test_what_was_rolled_back_from_is_not_called_good(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        await stage.served(2)
        await stage.http.post("/v1/rollback", json={"run": "run"})
        sentences = (await stage.http.get("/v1/explain/run~v000002")).json()["sentences"]
        assert not any("newest good version" in sentence for sentence in sentences)


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
        stage.store.faults.set_engines_file("engines.yaml cannot be read")
        assert (await stage.http.get("/v1/overview")).json()["faults"]["engines"] == "engines.yaml cannot be read"


async def test_health_readiness_and_metrics_need_no_token(tmp_path: Path) -> None:
    async with serving(tmp_path, token="secret") as stage:
        await stage.served(1)
        assert (await stage.http.get("/healthz")).json() == {"status": "ok"}
        assert (await stage.http.get("/readyz")).status_code == 200
        metrics = (await stage.http.get("/metrics")).text
        assert 'refitd_versions{state="SEALED"} 1.0' in metrics
        assert 'refitd_engines{state="IN_SYNC"} 1.0' in metrics


async def test_a_root_that_vanished_is_not_ready(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        stage.root.rename(tmp_path / "unmounted")
        async with asyncio.timeout(10):
            while (await stage.http.get("/readyz")).status_code != 503:
                await stage.store.changed.wait_after(stage.store.changed.count, within=0.02)
        assert (await stage.http.get("/healthz")).status_code == 200


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
