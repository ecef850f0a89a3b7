"""Several trainings on one service: runs that no engine follows, engines that go over to another run, runs that end."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from refitd.catalog.files import DiskFiles
from refitd.engine.port import Outcome, Refit
from refitd.policy.leases import leases
from refitd.reclaim.books import Books
from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.states import EngineState, UpdateState, VersionState
from support.checkpoints import publish, tensors
from support.services import Stage, serving

MINE = {"engines": "mine"}


def at(run: str, step: int) -> str:
    return version_id(run, Order(1, step))


async def told(stage: Stage, run: str, step: int, **more: Any) -> Any:
    """Publish a step and tell the service; its answer, once the version has its verdict."""
    publish(stage.root, run, step, tensors(1000 * len(run) + step))
    answer = await stage.http.post("/v1/versions", json={"run": run, "step": step, **more})
    await stage.until(at(run, step), lambda record: record.state is VersionState.SEALED)
    return answer


async def served(stage: Stage, run: str, step: int, **more: Any) -> str:
    """Publish a step, and wait until the run's engines serve it."""
    assert (await told(stage, run, step, **more)).is_success
    await stage.until(at(run, step), lambda record: record.served_at is not None)
    return at(run, step)


async def until(stage: Stage, what: Callable[[], bool]) -> None:
    """Wait for something to become true of the store."""
    seen = stage.store.changed.count
    async with asyncio.timeout(10):
        while not what():
            seen = await stage.store.changed.wait_after(seen, within=0.05)


async def asked(answer: Awaitable[Any], status: int = 200) -> Any:
    found = await answer
    assert found.status_code == status, found.text
    return found.json()


async def moved(stage: Stage, *engines: str, run: str, status: int = 200, **more: Any) -> Any:
    body = {"engines": [f"{name}:1" for name in engines], "run": run, **more}
    return await asked(stage.http.post("/v1/engines/move", json=body), status)


async def closed(stage: Stage, run: str) -> Any:
    return await asked(stage.http.post("/v1/runs", json={"run": run, "closed": True}))


async def glance(stage: Stage, run: str) -> Any:
    runs = (await asked(stage.http.get("/v1/overview")))["runs"]
    return next(seen for seen in runs if seen["run"] == run)


async def metric(stage: Stage, line: str) -> bool:
    return line in (await stage.http.get("/metrics")).text.splitlines()


def follows(stage: Stage) -> dict[str, str | None]:
    return {name.removesuffix(":1"): engine.run for name, engine in stage.store.engines.items()}


def serves(stage: Stage) -> dict[str, str | None]:
    return {name.removesuffix(":1"): engine.serving for name, engine in stage.store.engines.items()}


def leased(stage: Stage, version: str) -> list[str]:
    held = leases(Books(stage.store, stage.targets, DiskFiles(Path("unused")), stage.catalog.judging).views())
    return [str(lease) for lease in held.get(version, ())]


async def test_a_run_that_no_engine_follows_is_unfollowed_and_says_what_to_do(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await served(stage, "old", 1)
        await told(stage, "new", 1)
        seen = await glance(stage, "new")
        assert (seen["standing"], seen["headline"]) == (
            "UNFOLLOWED",
            "No engine follows this run; step 1 is its target.",
        )
        assert "'refitd engines move a:1 --run new --yes'" in seen["reasons"][0]
        assert "a:1 (follows old)" in seen["reasons"][0]
        assert "'refitd runs close new'" in seen["reasons"][0]
        assert (await glance(stage, "old"))["standing"] == "CURRENT"
        assert await metric(stage, 'refitd_run_unfollowed{run="new"} 1.0')
        assert await metric(stage, 'refitd_run_unfollowed{run="old"} 0.0')
        explained = await asked(stage.http.get("/v1/explain/new"))
        assert explained["sentences"][0].startswith("Run new is UNFOLLOWED")


async def test_a_notice_of_a_run_that_no_engine_follows_says_how_to_bring_engines(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await served(stage, "old", 1)
        refused = await told(stage, "new", 1)
        assert (refused.status_code, refused.json()["type"]) == (409, "urn:refitd:problem:run-not-followed")
        told_to = "'refitd engines move a:1 --run new --yes' brings a:1 here from run old"
        assert refused.json()["detail"] == f"no engine follows run new: {told_to}"
        await closed(stage, "old")
        refused = await stage.http.post("/v1/versions", json={"run": "new", "step": 1})
        asks = "publish with engines='mine' ('refitd publish --engines mine') to take a:1"
        assert refused.json()["detail"] == f"no engine follows run new: {asks}"


async def test_an_engine_that_is_moved_serves_its_new_run_and_the_old_version_stays_until_it_does(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        old = await served(stage, "old", 1)
        await moved(stage, "a", run="new", insist=True)
        assert follows(stage) == {"a": "new", "b": "old"}
        assert serves(stage)["a"] == old, "it goes on serving what it serves"
        await moved(stage, "b", run="new", insist=True)
        assert "engine a:1 serves it" in leased(stage, old)
        new = await served(stage, "new", 1)
        assert serves(stage) == {"a": new, "b": new}
        assert not [lease for lease in leased(stage, old) if lease.startswith("engine")]
        assert (await glance(stage, "new"))["standing"] == "CURRENT"
        assert (await glance(stage, "old"))["standing"] == "UNFOLLOWED"
        assert stage.store.updates["old"].state is UpdateState.COMPLETE, "what was proved stays proved"


async def test_a_load_that_is_under_way_comes_to_its_end_and_counts_for_no_run(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await served(stage, "old", 1)
        gate = stage.engines["a"].gate = asyncio.Event()
        await told(stage, "old", 2)
        await until(stage, lambda: len(stage.engines["a"].loads) == 2)
        await moved(stage, "a", run="new", insist=True)
        assert "engine a:1 loads it" in " ".join(leased(stage, at("old", 2)))
        assert stage.store.engines["a:1"].state in {EngineState.UPDATING, EngineState.VERIFYING}
        gate.set()
        await until(stage, lambda: serves(stage)["a"] == at("old", 2))
        await served(stage, "new", 1)
        assert stage.store.versions[at("old", 2)].served_at is None, "no engine of its run serves it"
        assert [path.split("/")[-2] for path in stage.engines["a"].loads] == ["old", "old", "new"]


async def test_a_load_that_breaks_off_while_its_engine_is_moved_is_repaired_by_the_new_run(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await served(stage, "old", 1)
        engine = stage.engines["a"]
        engine.gate, engine.script = asyncio.Event(), [Refit(outcome=Outcome.TAINTED, resumed=False, reason="cut")]
        await told(stage, "old", 2)
        await until(stage, lambda: len(engine.loads) == 2)
        await moved(stage, "a", run="new", insist=True)
        engine.gate.set()
        await until(stage, lambda: not stage.store.engines["a:1"].known)
        assert engine.paused, "nobody knows what it holds"
        assert leased(stage, at("old", 2)), "nothing proved that the load has ended"
        await served(stage, "new", 1)
        assert not engine.paused


async def test_an_open_run_keeps_its_engines_unless_somebody_insists(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        await served(stage, "old", 1)
        problem = await moved(stage, "a", run="new", status=409)
        assert problem["type"] == "urn:refitd:problem:run-open"
        assert all(word in problem["detail"] for word in ("a:1 follows old", "refitd runs close old", "insist"))
        assert follows(stage) == {"a": "old", "b": "old"}
        await moved(stage, "a", run="old")  # it is there already
        await moved(stage, "a", run="new", insist=True)
        assert follows(stage) == {"a": "new", "b": "old"}


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"engines": ["a:1", "x"], "run": "new", "insist": True}, 404, "unknown-engine"),
        ({"engines": ["a:1"], "run": "../up", "insist": True}, 422, "bad-name"),
        ({"engines": ["a:1"], "run": "new", "force": True}, 422, "bad-request"),
    ],
)
async def test_a_move_that_cannot_be_made_moves_no_engine(tmp_path: Path, body: Any, status: int, kind: str) -> None:
    async with serving(tmp_path) as stage:
        await served(stage, "old", 1)
        problem = await asked(stage.http.post("/v1/engines/move", json=body), status)
        assert problem["type"] == f"urn:refitd:problem:{kind}"
        assert follows(stage) == {"a": "old"}


async def test_a_run_that_has_ended_is_closed_and_not_unfollowed_also_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path, names=()) as stage:
        await told(stage, "old", 1)
        assert (await closed(stage, "old"))["standing"] == "CLOSED"
    async with serving(tmp_path, names=()) as stage:
        seen = await glance(stage, "old")
        assert (seen["standing"], seen["reasons"]) == ("CLOSED", [])
        assert seen["headline"].endswith("no engine follows it.")
        assert "refitd_run_unfollowed{" not in (await stage.http.get("/metrics")).text


async def test_the_next_version_opens_a_closed_run_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await served(stage, "old", 1)
        assert (await closed(stage, "old"))["standing"] == "CLOSED"
        await served(stage, "old", 2)
        assert (await glance(stage, "old"))["standing"] == "CURRENT"
        assert any("open again" in event["text"] for event in (await asked(stage.http.get("/v1/log")))["items"])


async def test_engines_of_a_closed_run_and_of_no_run_are_for_the_asking(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b", "c")) as stage:
        await served(stage, "old", 1)
        await moved(stage, "c", run="other", insist=True)
        await served(stage, "other", 1)
        await closed(stage, "old")
        new = await served(stage, "new", 1, **MINE)
        assert serves(stage) == {"a": new, "b": new, "c": at("other", 1)}
        assert (await glance(stage, "new"))["standing"] == "CURRENT"
        assert all(stage.store.engines[f"{name}:1"].naming.moved for name in "abc")


async def test_no_engine_of_an_open_run_is_taken_for_the_asking(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await served(stage, "old", 1)
        refused = await told(stage, "new", 1, **MINE)
        assert (refused.status_code, refused.json()["type"]) == (409, "urn:refitd:problem:run-not-followed")
        assert refused.json()["detail"] == (
            "no engine is free for run new: each follows a run that is not closed. If run old has ended, say "
            "'refitd runs close old'"
        )
        assert follows(stage) == {"a": "old"}


async def test_what_a_trainer_hands_over_brings_engines_before_it_is_offered(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        stage.engines["a"].takes_offers = True
        await served(stage, "old", 1)
        await closed(stage, "old")
        notice = {"run": "new", "step": 1, "kind": "handover", "offer": ".offer-00000000000000aa", **MINE}
        await asked(stage.http.post("/v1/versions", json=notice), 202)
        await until(stage, lambda: stage.engines["a"].taken == [at("new", 1)])
