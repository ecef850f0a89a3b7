"""What an operator looks at and does through the API: the overview, the log, loads of a version, pausing updates."""

import asyncio
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from refitd.state.journal.journal import JournalError
from refitd.state.journal.rows import JournalWrite
from refitd_client.contract.states import EngineState, VersionState
from refitd_client.contract.wire import WaitResult
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


async def test_a_pause_outlives_a_restart_of_the_service(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        await paused(stage)
    async with serving(tmp_path) as stage:
        assert stage.store.updates["run"].paused_since is not None
