"""What an operator looks at and does through the API: the overview, the log, loads of a version, pausing updates."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from refitd.api.overview import Cached
from refitd.state.journal.journal import JournalError
from refitd.state.journal.rows import JournalWrite
from refitd_client.contract.states import EngineState, VersionState
from refitd_client.contract.wire import Faults, Overview, WaitResult
from refitd_client.errors import WaitTimeoutError
from refitd_client.http.exchange import judge
from support.checkpoints import publish, tensors
from support.services import Stage, serving


async def paused(stage: Stage, what: str = "pause") -> dict[str, object]:
    answer = await stage.http.post("/v1/runs", json={"run": "run", "paused": what == "pause"})
    assert answer.status_code == 200
    return answer.json()


async def test_the_overview_holds_runs_engines_and_where_the_stream_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        await stage.served(1)
        await stage.store.durable()
        found = (await stage.http.get("/v1/overview")).json()
        (run,) = found["runs"]
        assert (run["standing"], run["headline"]) == ("CURRENT", "All 2 engines serve step 1, the newest.")
        assert [(engine["id"], engine["behind"]) for engine in found["engines"]] == [("a:1", 0), ("b:1", 0)]
        assert found["event"] == stage.store.last_event
        assert found["versions"]["SEALED"] == 1
        await stage.served(2)
        again = (await stage.http.get("/v1/overview")).json()
        assert again["runs"][0]["target_step"] == 2
        assert again["event"] > found["event"]


async def test_readers_wait_for_what_is_told_and_not_for_what_engines_are_at(tmp_path: Path) -> None:
    """The event that the overview names is on disk: a stream that goes on from it misses nothing after a crash."""
    written = threading.Event()
    async with serving(tmp_path) as stage:
        id_ = await stage.served(1)
        await stage.store.durable()
        seen, commit = stage.store.last_event, stage.store.journal._commit

        def slow(batch: list[JournalWrite]) -> Exception | None:
            written.wait(30)
            return commit(batch)

        stage.store.journal._commit = slow  # type: ignore[method-assign]
        try:
            engine = stage.store.engines["a:1"]
            stage.store.put_engine(engine.having(reason="why"), "is at something")
            overview = (await stage.http.get("/v1/overview")).json()
            assert overview["event"] == seen < stage.store.last_event
            listed = (await stage.http.get("/v1/versions")).json()["items"]
            assert [each["id"] for each in listed] == [id_]
            stage.store.put_version(stage.store.versions[id_].having(pinned=True))
            waiting = asyncio.create_task(stage.http.get("/v1/versions"))
            await stage.http.get("/healthz")
            assert not waiting.done()
        finally:
            written.set()
        assert [each["pinned"] for each in (await waiting).json()["items"]] == [True]


async def test_the_overview_of_an_idle_service_is_as_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who shows its instant shows a clock: one that stands still looks like a service that is gone."""
    async with serving(tmp_path) as stage:
        await stage.served(1)
        cached, faults = Cached(), Faults()
        monkeypatch.setattr(stage.store.clock, "now", lambda: "2026-11-21T12:00:00.000Z")
        first = msgspec.json.decode(cached.json(stage.store, stage.targets, faults), type=Overview)
        monkeypatch.setattr(stage.store.clock, "now", lambda: "2026-11-21T12:00:09.000Z")
        monkeypatch.setattr("refitd.api.overview.overview_of", None)  # nothing has happened: it is not made again
        again = msgspec.json.decode(cached.json(stage.store, stage.targets, faults), type=Overview)
        monkeypatch.undo()
        assert (first.at, again.at) == ("2026-11-21T12:00:00.000Z", "2026-11-21T12:00:09.000Z")
        assert replace(first, at=again.at) == again


async def test_a_journal_that_cannot_be_written_is_told_and_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*, told: bool = False) -> None:
        raise JournalError("the journal cannot be written: disk full")

    async with serving(tmp_path) as stage:
        await stage.served(1)
        assert (await stage.http.get("/v1/overview")).json()["faults"]["journal"] is None
        monkeypatch.setattr(stage.store.journal, "durable", full)
        answer = await stage.http.get("/v1/overview")
        assert (answer.status_code, answer.json()["runs"][0]["in_sync"]) == (200, 1)
        assert "disk full" in answer.json()["faults"]["journal"]
        assert "disk full" in (await stage.http.get("/v1/overview")).json()["faults"]["journal"]
        monkeypatch.undo()


async def test_a_version_tells_the_stages_of_each_engines_load(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        id_ = await stage.served(1)
        loads = (await stage.http.get(f"/v1/versions/{id_}/attempts")).json()["items"]
        assert sorted((load["engine"], load["outcome"]) for load in loads) == [("a:1", "ACK"), ("b:1", "ACK")]
        assert all(load["timings"]["load"] > 0 for load in loads)
        assert (await stage.http.get("/v1/versions/none/attempts")).status_code == 404


async def test_a_version_tells_how_long_it_was_published_seen_and_validated(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        publish(stage.root, "run", 1, tensors(1))
        await stage.http.post("/v1/versions", json={"run": "run", "step": 1, "publish_ms": 12.5})
        await stage.until("run~v000001", lambda record: record.served_at is not None)
        timings = (await stage.http.get("/v1/versions/run~v000001")).json()["timings"]
        assert timings["publish"] == 12.5
        assert {"seen", "validate", "load"} <= timings.keys()
        answer = await stage.http.post("/v1/versions", json={"run": "run", "step": 2, "publish_ms": -1})
        assert answer.status_code == 422


async def test_the_log_is_paged_newest_first_and_by_subject(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        id_ = await stage.served(1)
        seen: list[int] = []
        before = ""
        while before is not None:
            page = (await stage.http.get(f"/v1/log?limit=3{before and f'&before={before}'}")).json()
            seen += [event["seq"] for event in page["items"]]
            before = page["next_cursor"]
        assert seen == list(range(stage.store.last_event, 0, -1))
        mine = (await stage.http.get("/v1/log", params={"subject": id_})).json()["items"]
        assert {event["subject"] for event in mine} == {id_}


async def test_the_log_is_asked_by_run_engine_and_severity(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        diverged = tensors(2)
        diverged["layer.0.weight"][0, 0] = float("nan")
        publish(stage.root, "run", 2, diverged)
        await stage.until("run~v000002", lambda record: record.state is VersionState.REJECTED)

        async def asked(**wanted: str) -> list[dict[str, Any]]:
            return (await stage.http.get("/v1/log", params=wanted)).json()["items"]

        assert {event["run"] for event in await asked(run="run")} == {"run"}
        assert {"a:1", "run~v000001", "run~v000002"} <= {event["subject"] for event in await asked(run="run")}
        assert {(event["kind"], event["subject"]) for event in await asked(engine="a:1")} == {("engine", "a:1")}
        assert [event["data"]["state"] for event in await asked(severity="warning")] == ["REJECTED"]
        assert await asked(run="other") == []
        assert (await stage.http.get("/v1/log", params={"severity": "loud"})).status_code == 422


async def test_paused_updates_bring_no_engine_to_a_newer_version_until_they_are_resumed(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        assert (await paused(stage))["paused_since"] is not None
        publish(stage.root, "run", 2, tensors(2))
        await stage.until("run~v000002", lambda record: record.state is VersionState.SEALED)
        for subject in ("a:1", "run~v000002"):
            said = (await stage.http.get(f"/v1/explain/{subject}")).json()["sentences"]
            assert sum("paused" in sentence and "'refitd resume run'" in sentence for sentence in said) == 1
            assert any("paused since" in sentence for sentence in said)
        found = (await stage.http.get("/v1/versions/run~v000002/wait?timeout=0.3")).json()
        assert found["outcome"] == "pending"
        with pytest.raises(WaitTimeoutError, match=r"a:1 is BEHIND \(updates of run are paused: refitd resume run\)"):
            judge(msgspec.convert(found, WaitResult), 0.3)
        (engine,) = (await stage.http.get("/v1/engines")).json()["items"]
        assert engine["reason"] == "updates of run are paused: refitd resume run"
        assert stage.engines["a"].label == "1"
        assert (await paused(stage, "resume"))["paused_since"] is None
        await stage.until("run~v000002", lambda record: record.served_at is not None)
        assert stage.engines["a"].label == "2"


async def test_an_engine_that_restarts_while_updates_are_paused_gets_the_last_good_version(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        await paused(stage)
        publish(stage.root, "run", 2, tensors(2))
        await stage.until("run~v000002", lambda record: record.state is VersionState.SEALED)
        stage.engines["a"].restart()
        async with asyncio.timeout(10):
            while stage.engines["a"].label != "1":
                await stage.store.changed.wait_after(stage.store.changed.count, within=0.05)


@pytest.mark.parametrize("subject", ["exp%2Ftrial", "1", "v000001"])
async def test_a_version_is_explained_that_is_named_by_its_run_its_step_or_its_folder(
    tmp_path: Path, subject: str
) -> None:
    async with serving(tmp_path, run="exp/trial") as stage:
        publish(stage.root, "exp/trial", 1, tensors(1))
        await stage.until("exp~trial~v000001", lambda record: record.served_at is not None)
        answer = (await stage.http.get(f"/v1/explain/{subject}")).json()
        assert answer["id"] == "exp~trial~v000001"
        stands = [
            "Run exp/trial is CURRENT: The engine serves step 1, the newest.",
            "exp~trial~v000001 is its target.",
        ]
        named = stands if "%" in subject else []
        assert answer["sentences"][: len(named) + 1] == [
            *named,
            "exp~trial~v000001 is SEALED: its files were checked and are good.",
        ]


async def test_a_run_is_explained_by_how_it_stands_before_its_target_is(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        publish(stage.root, "run", 2, {})
        await stage.rejected("run~v000002")
        said = (await stage.http.get("/v1/explain/run")).json()["sentences"]
        assert said[0] == "Run run is TROUBLED: The engine serves step 1."
        assert said[1].startswith("Step 2 is REJECTED: ")
        assert said[1].endswith(".")
        assert said[2:4] == [
            "run~v000001 is its target.",
            "run~v000001 is SEALED: its files were checked and are good.",
        ]


async def test_a_run_without_a_good_version_is_explained_by_how_it_stands(tmp_path: Path) -> None:
    async with serving(tmp_path, run="exp") as stage:
        publish(stage.root, "exp", 2, {})
        await stage.rejected("exp~v000002")
        answer = (await stage.http.get("/v1/explain/exp")).json()
        assert answer["id"] == "exp"
        assert answer["sentences"][0] == "Run exp is TROUBLED: No good version yet."
        assert answer["sentences"][1].startswith("Step 2 is REJECTED: ")
        assert answer["sentences"][-1] == "It has no target: 'refitd versions --run exp' lists its versions."


async def test_an_engine_is_named_by_its_url_too_and_one_that_is_unknown_is_said_to_be_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        url = quote(stage.store.engines["a:1"].url, safe="")
        assert (await stage.http.post(f"/v1/engines/{url}/resync")).json()["id"] == "a:1"
        assert (await stage.http.get(f"/v1/engines/{url}%2F")).json()["id"] == "a:1"
        assert (await stage.http.get(f"/v1/explain/{url}")).json()["id"] == "a:1"
        other = quote("http://127.0.0.1:30000", safe="")
        for answer in (
            await stage.http.post(f"/v1/engines/{other}/resync"),
            await stage.http.get(f"/v1/engines/{other}"),
            await stage.http.delete(f"/v1/engines/{other}"),
        ):
            assert answer.status_code == 404
            assert answer.json()["detail"] == ("no engine http://127.0.0.1:30000: 'refitd engines' lists what there is")


async def test_of_an_engine_that_is_not_there_yet_it_is_said_what_it_serves(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        await paused(stage)
        publish(stage.root, "run", 2, tensors(2))
        await stage.until("run~v000002", lambda record: record.state is VersionState.SEALED)
        said = (await stage.http.get("/v1/explain/run~v000002")).json()["sentences"]
        (where,) = (each for each in said if "does not serve it yet" in each)
        assert where.startswith("Engine a:1 does not serve it yet: it is ")
        assert where.endswith(", and serves run~v000001.")


async def test_who_names_what_may_be_several_versions_or_none_is_told_what_to_ask_for(tmp_path: Path) -> None:
    async with serving(tmp_path, run="exp") as stage:
        for run in ("exp", "other"):
            publish(stage.root, run, 2, {})
            await stage.until(f"{run}~v000002", lambda record: record.state is VersionState.REJECTED)

        async def told(subject: str) -> tuple[int, str]:
            answer = await stage.http.get(f"/v1/explain/{subject}")
            return answer.status_code, answer.json()["detail"]

        both = "may be 2 versions: 'refitd explain exp~v000002', 'refitd explain other~v000002'"
        assert await told("2") == (404, f"2 {both}")
        assert await told("v000002") == (404, f"v000002 {both}")
        lists = "'refitd runs', 'refitd versions' and 'refitd engines' list what there is"
        assert (await told("run~v000099"))[1] == f"no run, version or engine has the name 'run~v000099': {lists}"


async def test_who_names_a_version_of_another_generation_is_told_which_there_are(tmp_path: Path) -> None:
    async with serving(tmp_path, run="exp") as stage:
        for generation in (2, 3):
            publish(stage.root, "exp", 2, {}, generation=generation)
            await stage.until(f"exp~v000002.g{generation}", lambda record: record.state is VersionState.REJECTED)

        async def told(path: str) -> tuple[int, str]:
            answer = await stage.http.get(f"/v1/{path}")
            return answer.status_code, answer.json()["detail"]

        but = "no version exp~v000002, but that step in another generation:"
        commands = "'refitd explain exp~v000002.g3', 'refitd explain exp~v000002.g2'"
        assert await told("explain/exp~v000002") == (404, f"{but} {commands}")
        assert await told("versions/exp~v000002") == (404, f"{but} exp~v000002.g3, exp~v000002.g2")
        for other in ("exp~v000003", "other~v000002"):
            assert await told(f"versions/{other}") == (
                404,
                f"no version {other}: 'refitd versions' lists what there is",
            )


async def test_of_an_engine_that_is_away_only_what_it_served_is_said(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        stage.engines["b"].down = True
        id_ = await stage.served(1)
        stage.engines["a"].down = True
        async with asyncio.timeout(10):
            while stage.store.engines["a:1"].state is not EngineState.UNREACHABLE:
                await stage.store.changed.wait_after(stage.store.changed.count, within=0.05)
        said = (await stage.http.get("/v1/explain/a:1")).json()["sentences"]
        assert said[:3] == [
            "a:1 is UNREACHABLE: it does not answer, is asked again and again, and is brought up to date when it does.",
            "The reason: connection refused.",
            f"It served {id_} when it was last reached; that is the target of run run.",
        ]
        said = (await stage.http.get(f"/v1/explain/{id_}")).json()["sentences"]
        assert "Engine a:1 served it when it was last reached." in said
        assert "It is kept: engine a:1, which does not answer, may still serve it." in said
        decisions = {name: (await stage.http.get(f"/v1/log?subject={name}:1")).json()["items"] for name in "ab"}
        assert decisions["a"][0]["text"] == f"UNREACHABLE: served {id_} when it was last reached (connection refused)"
        assert "UNREACHABLE: has not been reached yet (connection refused)" in [line["text"] for line in decisions["b"]]


async def test_a_rollback_is_carried_out_while_updates_are_paused(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        await stage.served(2)
        await paused(stage)
        await stage.http.post("/v1/rollback", json={"run": "run"})
        async with asyncio.timeout(10):
            while stage.engines["a"].label != "1":
                await stage.store.changed.wait_after(stage.store.changed.count, within=0.05)
        assert stage.store.updates["run"].paused_since is not None


async def test_where_a_rollback_leads_is_told_before_and_nothing_is_done(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b"), keep_last=5) as stage:
        for step in (1, 2, 3):
            await stage.served(step)
        stage.engines["b"].down = True
        async with asyncio.timeout(10):
            while stage.store.engines["b:1"].state is not EngineState.UNREACHABLE:
                await stage.store.changed.wait_after(stage.store.changed.count, within=0.05)
        plan = (await stage.http.get("/v1/rollback", params={"run": "run"})).json()
        assert plan == {
            "run": "run",
            "leaves": "run~v000003",
            "goal": "run~v000002",
            "barred": ["run~v000003"],
            "unreachable": ["b:1"],
            "unknown": [],
        }
        further = (await stage.http.get("/v1/rollback", params={"run": "run", "to": "run~v000001"})).json()
        assert further["barred"] == ["run~v000003", "run~v000002"]
        assert not any(version.barred for version in stage.store.versions.values())
        for mistyped in ({"run": "none"}, {"run": "none", "to": "run~v000001"}, {"run": "none", "to": "1"}):
            unknown = await stage.http.get("/v1/rollback", params=mistyped)
            assert unknown.status_code == 404
            assert "no version of run none is known" in unknown.json()["detail"]


async def test_a_step_stands_for_the_run_s_version_to_a_rollback_and_for_the_only_one_to_a_pin(tmp_path: Path) -> None:
    """To a rollback in the newest generation that has it: the one that a trainer means by its step."""

    async def asked(method: str, route: str, **params: str) -> Any:
        answer = (await stage.http.request(method, route, params=params)).json()
        return next(answer[key] for key in ("goal", "detail", "id") if key in answer)

    async with serving(tmp_path, keep_last=9) as stage:
        for step in (1, 2, 3):
            await stage.served(step)
        publish(stage.root, "other", 2, tensors(1))
        publish(stage.root, "run", 1, tensors(7), generation=2)
        await stage.listed()
        await stage.until("run~v000001.g2", lambda record: record.state is VersionState.SEALED)
        goals = {
            to: await asked("GET", "/v1/rollback", run="run", to=to) for to in ("2", "1", "v000001", "run~v000001", "4")
        }
        assert goals == {
            "2": "run~v000002",
            "1": "run~v000001.g2",
            "v000001": "run~v000001",
            "run~v000001": "run~v000001",
            "4": "no version 4: 'refitd versions' lists what there is",
        }
        pinned = {word: await asked("PUT", f"/v1/versions/{word}/pin") for word in ("3", "2", "v000001.g2", "4")}
        assert pinned == {
            "3": "run~v000003",
            "2": "2 may be 2 versions: run~v000002, other~v000002",
            "v000001.g2": "run~v000001.g2",
            "4": "no version 4: 'refitd versions' lists what there is",
        }
        assert {id_ for id_, version in stage.store.versions.items() if version.pinned} == {
            "run~v000003",
            "run~v000001.g2",
        }


async def test_a_rollback_that_went_as_ordered_is_no_trouble_and_what_was_barred_says_why_it_is(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as stage:
        for step in (1, 2):
            await stage.served(step)
        await stage.http.post("/v1/rollback", json={"run": "run"})
        async with asyncio.timeout(10):
            while stage.store.engines["a:1"].serving != "run~v000001":
                await stage.store.changed.wait_after(stage.store.changed.count, within=0.05)
        (run,) = (await stage.http.get("/v1/overview")).json()["runs"]
        assert (run["standing"], run["headline"]) == ("ROLLED_BACK", "The engine serves step 1.")
        assert run["reasons"][0].startswith("Rolled back to step 1: newer versions, up to step 2, are barred.")


async def test_a_resync_of_an_engine_that_is_away_leaves_what_is_known_of_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        stage.engines["a"].down = True
        async with asyncio.timeout(10):
            while stage.store.engines["a:1"].state is not EngineState.UNREACHABLE:
                await stage.store.changed.wait_after(stage.store.changed.count, within=0.05)
        engine = (await stage.http.post("/v1/engines/a:1/resync")).json()
        assert (engine["state"], engine["step"], engine["known"]) == ("UNREACHABLE", 1, True)
        assert engine["unreachable_since"] is not None
        said = " ".join((await stage.http.get("/v1/explain/a:1")).json()["sentences"])
        assert "It served run~v000001 when it was last reached" in said
        assert "A resync was asked for: it will be loaded again when it is reachable." in said
        assert "refitd_engines_unknown_contents 0.0" in (await stage.http.get("/metrics")).text


async def test_a_rollback_of_a_run_without_a_good_version_says_where_to_look(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        publish(stage.root, "run", 1, {})
        await stage.rejected("run~v000001")
        answer = await stage.http.post("/v1/rollback", json={"run": "run"})
    assert answer.status_code == 409
    way_on = "'refitd explain run' says why, and what it waits for"
    assert answer.json()["detail"] == f"run run has no good version: {way_on}"


async def test_a_rollback_with_nowhere_to_go_offers_what_was_never_served(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        answer = await stage.http.post("/v1/rollback", json={"run": "run"})
        assert answer.status_code == 409
        told = answer.json()["detail"]
        assert "before run~v000001 was served and is still there, and no other good one is: publish" in told
        assert told.endswith("'refitd pause run'")
        await paused(stage)
        for step in (2, 3):
            publish(stage.root, "run", step, tensors(step))
            await stage.until(f"run~v00000{step}", lambda record: record.state is VersionState.SEALED)
        one = replace(stage.store.versions["run~v000001"], state=VersionState.DELETED)
        stage.store.put_version(one)
        answer = await stage.http.post("/v1/rollback", json={"run": "run"})
        assert (
            "good, but never served: run~v000002. Name one: 'refitd rollback run --to run~v000002'"
            in answer.json()["detail"]
        )


async def test_a_pause_outlives_a_restart_of_the_service(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        await paused(stage)
    async with serving(tmp_path) as stage:
        assert stage.store.updates["run"].paused_since is not None


async def test_a_run_that_has_no_update_cannot_be_paused(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.listed()
        answer = await stage.http.post("/v1/runs", json={"run": "none", "paused": True})
        assert (answer.status_code, answer.json()["type"]) == (404, "urn:refitd:problem:unknown-run")
        later = "it can be paused as soon as it has a good version"
        assert answer.json()["detail"] == f"no version of run none is known: {later}"
        publish(stage.root, "bad", 1, {})
        await stage.until("bad~v000001", lambda record: record.state is VersionState.REJECTED)
        answer = await stage.http.post("/v1/runs", json={"run": "bad", "paused": True})
        assert answer.json()["detail"] == f"run bad has no update yet: {later}"
