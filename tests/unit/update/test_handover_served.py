"""A version that is offered from memory, as the service sees it: taken, served, and good only when its files are."""

from pathlib import Path
from typing import Any

from refitd.engine.port import Outcome, Refit
from refitd_client.contract.states import EngineState, VersionState
from support.checkpoints import publish, tensors
from support.services import Stage, serving

OFFER = f".offer-{7:016x}"
ONE, TWO, THREE = (f"run~v{step:06d}" for step in (1, 2, 3))


async def offer(stage: Stage, step: int, **more: Any) -> Any:
    notice = {"run": "run", "step": step, "path": f"run/v{step:06d}", "kind": "handover"}
    return await stage.http.post("/v1/versions", json=notice | (more or {"offer": OFFER}))


async def taken(stage: Stage, id_: str) -> dict[str, Any]:
    answer = (await stage.http.get(f"/v1/versions/{id_}/wait", params={"for": "taken", "timeout": "10"})).json()
    assert answer["outcome"] == "taken"
    return answer["version"]


async def outcome(stage: Stage, id_: str, wait_for: str) -> str:
    params = {"for": wait_for, "timeout": "0"}
    return (await stage.http.get(f"/v1/versions/{id_}/wait", params=params)).json()["outcome"]


async def explained(stage: Stage, subject: str) -> list[str]:
    return (await stage.http.get(f"/v1/explain/{subject}")).json()["sentences"]


def takes_offers(stage: Stage, name: str = "a") -> None:
    stage.engines[name].takes_offers = True


async def ready(stage: Stage, *names: str) -> None:
    """Engines on step 1, of which some are known to take offers."""
    for name in names:
        stage.engines[name].takes_offers = True
    await stage.served(1)
    await stage.until(
        ONE, lambda _: sum(engine.seen.takes_offers for engine in stage.store.engines.values()) == len(names)
    )


async def test_what_an_engine_took_is_served_and_is_good_only_when_its_files_are(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await ready(stage, "a")
        assert (await offer(stage, 2)).status_code == 202
        version = await taken(stage, TWO)
        assert (version["state"], version["kind"], version["engines"][0]["serves"]) == ("ANNOUNCED", "full", True)
        await stage.until(TWO, lambda record: record.served_at is not None)
        assert (await outcome(stage, TWO, "served"), await outcome(stage, TWO, "sealed")) == ("served", "pending")
        goals = stage.targets.of_run("run")
        assert goals.target is not None
        assert goals.loadable is not None
        assert goals.last_good is not None
        assert (goals.target.id, goals.loadable.id, goals.last_good.id) == (TWO, ONE, ONE)
        (engine,) = stage.store.engines.values()
        assert (engine.state, engine.serving) == (EngineState.IN_SYNC, TWO)
        publish(stage.root, "run", 2, tensors(2))
        assert (await stage.http.post("/v1/versions", json={"run": "run", "step": 2})).status_code == 200
        await stage.until(TWO, lambda record: record.state is VersionState.SEALED)
        good = stage.targets.of_run("run").last_good
        assert good is not None
        assert good.id == TWO
        assert stage.engines["a"].taken == [TWO]
        one, two = reversed((await stage.http.get("/v1/history")).json()["updates"])
        assert (one["kind"], one["done"], two["kind"], two["done"]) == (
            "full",
            {"full": 1},
            "handover",
            {"handover": 1},
        )
        assert len(stage.engines["a"].loads) == 2  # and not once more by its files


async def test_engines_without_the_plugin_wait_for_the_files(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        await ready(stage, "a")
        await offer(stage, 2)
        version = await taken(stage, TWO)
        assert {engine["id"]: engine["serves"] for engine in version["engines"]} == {"a:1": True, "b:1": False}
        assert await outcome(stage, TWO, "served") == "pending"
        publish(stage.root, "run", 2, tensors(2))
        await stage.until(TWO, lambda record: record.served_at is not None)
        assert stage.engines["b"].taken == []
        assert stage.engines["b"].label == "2"


async def test_an_engine_that_declines_goes_on_as_before_and_loads_the_files(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await ready(stage, "a")
        stage.engines["a"].script.append(Refit(outcome=Outcome.NACK, resumed=True, reason="another host"))
        await offer(stage, 2)
        version = await taken(stage, TWO)
        (engine,) = stage.store.engines.values()
        assert (engine.serving, engine.trouble.failures, version["engines"][0]["reason"]) == (ONE, 0, "another host")
        publish(stage.root, "run", 2, tensors(2))
        await stage.until(TWO, lambda record: record.served_at is not None)


async def test_an_engine_that_broke_is_repaired_by_files_alone(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await ready(stage, "a")
        stage.engines["a"].script.append(Refit(outcome=Outcome.TAINTED, resumed=False, reason="died"))
        await offer(stage, 2)
        await taken(stage, TWO)
        await stage.until(ONE, lambda _: next(iter(stage.store.engines.values())).serving == ONE)
        assert stage.engines["a"].taken == [TWO]


async def test_everyone_can_see_that_what_is_served_is_in_memory_alone_until_its_files_are_good(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await ready(stage, "a")
        await offer(stage, 2)
        version = await taken(stage, TWO)
        (engine,) = (await stage.http.get("/v1/engines")).json()["items"]
        assert (version["in_memory"], engine["in_memory"]) == (True, True)
        back = f"It has no good files yet: until it has, a restart of an engine or a rollback leads to {ONE}."
        assert f"It has that from its trainer's memory. {back}" in await explained(stage, "a:1")
        sentences = await explained(stage, TWO)
        assert f"It was handed over from its trainer's memory. {back}" in sentences
        assert "Engine a:1 serves it." in sentences
        publish(stage.root, "run", 2, tensors(2))
        await stage.until(TWO, lambda record: record.state is VersionState.SEALED)
        (engine,) = (await stage.http.get("/v1/engines")).json()["items"]
        version = (await stage.http.get(f"/v1/versions/{TWO}")).json()
        assert (version["in_memory"], engine["in_memory"], engine["version"]) == (False, False, TWO)
        assert not any("memory" in sentence for sentence in await explained(stage, "a:1") + await explained(stage, TWO))


async def test_an_engine_that_restarts_before_the_files_are_there_goes_to_the_last_good_version(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await ready(stage, "a")
        await offer(stage, 2)
        await taken(stage, TWO)
        stage.engines["a"].restart()
        await stage.until(TWO, lambda _: next(iter(stage.store.engines.values())).serving == ONE)
        publish(stage.root, "run", 2, tensors(2))
        await stage.until(TWO, lambda _: next(iter(stage.store.engines.values())).serving == TWO)


async def test_what_failed_to_get_files_is_marked_so_stays_served_and_is_never_good(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await ready(stage, "a")
        await offer(stage, 2)
        await taken(stage, TWO)
        assert (await offer(stage, 2, failed="no space\x1b[2J\n left")).status_code == 200
        version = stage.store.versions[TWO]
        told = (
            "its files will not come: no space\N{REPLACEMENT CHARACTER}[2J left"  # on one line, and steers no terminal
        )
        assert (version.state, version.reason) == (VersionState.REJECTED, told)
        assert await outcome(stage, TWO, "sealed") == "failed"
        lack = f"It has no good files: a restart of an engine or a rollback leads to {ONE}."
        assert f"It has that from its trainer's memory. {lack}" in await explained(stage, "a:1")
        goals = stage.targets.of_run("run")
        assert goals.last_good is not None
        assert goals.last_good.id == ONE
        (engine,) = stage.store.engines.values()
        assert (engine.serving, engine.state) == (TWO, EngineState.IN_SYNC)
        await stage.served(3)
        assert next(iter(stage.store.engines.values())).serving == THREE


async def test_files_that_never_come_are_not_waited_for_once_their_trainer_went_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await ready(stage, "a")
        await offer(stage, 2)
        await taken(stage, TWO)
        await stage.served(3)
        await stage.rejected(TWO)
        assert stage.store.versions[TWO].reason == f"its files never came: its trainer went on to {THREE}"


async def test_a_version_that_is_to_have_no_files_is_served_is_never_good_and_is_retired_after_the_next_is_served(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as stage:
        await ready(stage, "a")
        await offer(stage, 2, offer=OFFER, metadata={"durable": "never"})
        await taken(stage, TWO)
        await stage.until(TWO, lambda record: record.served_at is not None)
        lack = "It has no files, and gets none where all engines have it (durable=never): a restart of an engine or a "
        assert any(lack in each and ONE in each for each in await explained(stage, TWO))
        goals = stage.targets.of_run("run")
        assert goals.last_good is not None
        assert goals.last_good.id == ONE
        publish(stage.root, "run", 3, {})  # bad: engines stay where they are, and so does what they hold
        await stage.rejected(THREE)
        assert stage.store.versions[TWO].state is VersionState.ANNOUNCED
        target = stage.targets.of_run("run").target
        assert target is not None
        assert target.id == TWO
        await stage.served(4)
        await stage.until(TWO, lambda record: record.state is not VersionState.ANNOUNCED)
        version = stage.store.versions[TWO]
        assert (version.state, version.reason) == (
            VersionState.RETIRED,
            "it had no files (durable=never), and its run went on to run~v000004",
        )
        await stage.sweep()
        assert TWO not in stage.store.versions


async def test_one_that_is_to_have_no_files_follows_another_and_a_rollback_goes_past_both(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await ready(stage, "a")
        for step, id_ in ((2, TWO), (3, THREE)):
            await offer(stage, step, offer=f".offer-{step:016x}", metadata={"durable": "every=10"})
            await taken(stage, id_)
            await stage.until(id_, lambda record: record.served_at is not None)
        assert stage.engines["a"].taken == [TWO, THREE]
        assert (await stage.http.post("/v1/rollback", json={"run": "run", "to": TWO})).status_code == 409
        assert (await stage.http.post("/v1/rollback", json={"run": "run"})).json()["id"] == ONE
        await stage.until(THREE, lambda _: next(iter(stage.store.engines.values())).serving == ONE)


async def test_what_no_engine_holds_any_more_is_no_target_and_one_that_restarted_is_in_sync_with_the_last_good(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        await ready(stage, "a", "b")
        await offer(stage, 2, offer=OFFER, metadata={"durable": "never"})
        await taken(stage, TWO)
        await stage.until(TWO, lambda record: record.served_at is not None)
        a, b = stage.store.engines
        stage.engines["a"].restart()
        await stage.until(TWO, lambda _: stage.store.engines[a].serving == ONE)
        target = stage.targets.of_run("run").target
        assert target is not None
        assert (target.id, stage.store.engines[b].serving) == (TWO, TWO)  # the other one goes on with it
        assert stage.store.engines[a].state is EngineState.BEHIND
        stage.engines["b"].restart()
        await stage.until(TWO, lambda _: stage.store.engines[b].serving == ONE)
        target = stage.targets.of_run("run").target
        assert target is not None
        assert target.id == ONE
        assert {engine.state for engine in stage.store.engines.values()} == {EngineState.IN_SYNC}


async def test_a_trainer_hears_who_follows_its_run_and_needs_files(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await ready(stage, "a")
        for name, run in (("mine", "run"), ("new", None), ("other", "another")):
            report = {"told": {"follower": name, "upstream": "", "upstreams": [], "run": run}}
            assert (await stage.http.put(f"/v1/hosts/{name}", json=report)).status_code == 200
        await offer(stage, 2)
        params = {"for": "taken", "timeout": "10"}
        answer = (await stage.http.get(f"/v1/versions/{TWO}/wait", params=params)).json()
        assert answer["followers"] == ["mine", "new"]


async def test_a_version_that_is_to_have_no_files_and_gets_some_is_good(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await ready(stage, "a")
        await offer(stage, 2, offer=OFFER, metadata={"durable": "every=10"})
        await taken(stage, TWO)
        publish(stage.root, "run", 2, tensors(2))
        await stage.until(TWO, lambda record: record.state is VersionState.SEALED)


async def test_a_rollback_from_what_was_handed_over_goes_to_the_last_good_version(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await ready(stage, "a")
        await offer(stage, 2)
        await taken(stage, TWO)
        assert (await stage.http.post("/v1/rollback", json={"run": "run"})).json()["id"] == ONE
        await stage.until(TWO, lambda _: next(iter(stage.store.engines.values())).serving == ONE)


async def test_nobody_takes_an_offer_while_updates_are_paused(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await ready(stage, "a")
        await stage.http.post("/v1/runs", json={"run": "run", "paused": True})
        await offer(stage, 2)
        assert not (await taken(stage, TWO))["engines"][0]["serves"]
        assert stage.engines["a"].taken == []


async def test_the_same_offer_again_is_the_same_version_and_is_taken_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await ready(stage, "a")
        assert [(await offer(stage, 2)).status_code for _ in range(2)] == [202, 200]
        await taken(stage, TWO)
        await offer(stage, 2)
        await taken(stage, TWO)
        assert stage.engines["a"].taken == [TWO]


async def test_what_is_no_offer_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await ready(stage, "a")
        for more in ({"offer": "../x"}, {"offer": OFFER, "failed": "both"}, {"failed": "x" * 501}):
            assert (await offer(stage, 2, **more)).status_code == 422
        plain = {"run": "run", "step": 2, "offer": OFFER}
        assert (await stage.http.post("/v1/versions", json=plain)).status_code == 422
        assert (await offer(stage, 1)).status_code == 409  # its files are there
        assert (await offer(stage, 2, failed="nobody knows it")).status_code == 404
