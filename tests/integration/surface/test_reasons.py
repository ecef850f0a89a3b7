"""What is said to people is so, and can be done: reasons, counts, advice."""

import asyncio
import inspect
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from refitd.cli import render
from refitd.clock import SystemClock
from refitd.explain.version import explain_engine, explain_version
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.update.entry import log_line
from refitd.update.targets import Targets
from refitd_client import Publication, RefitClient, WeightPublisher
from refitd_client.contract.follow import HostEngine, HostEngines
from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import ReclaimPlan
from support.checkpoints import tensors
from support.records import engine, version
from support.services import Stage, serving
from support.stand_in_service import make_engine, make_version

ID = "run~v000001"


async def announced(stage: Stage, publication: Publication) -> None:
    """Send the notice that the publisher has made."""
    body = msgspec.to_builtins(publication.notice)
    assert (await stage.http.post("/v1/versions", json=body)).status_code in {200, 202}


@pytest.mark.parametrize("word", ["allow_missing", "allow_extra"])
async def test_what_a_rejection_tells_the_trainer_to_say_publish_can_say(tmp_path: Path, word: str) -> None:
    weights = tensors(1) | {"more.weight": np.ones((2, 2), np.float32)}
    if word == "allow_missing":
        weights = dict(list(tensors(1).items())[1:])
    async with serving(tmp_path) as stage:
        with WeightPublisher(stage.root, "run") as publisher:
            await asyncio.to_thread(publisher.publish, weights, step=1)
            await stage.rejected(ID)
            reason = stage.store.versions[ID].reason or ""
            allowed = ["layer.0.*"] if word == "allow_missing" else True
            assert f"{word}={True if word == 'allow_extra' else '['}" in reason
            assert f"refitd publish --{word.replace('_', '-')}" in reason
            told = await asyncio.to_thread(lambda: publisher.publish(weights, step=2, **{word: allowed}))
            await announced(stage, told)
            await stage.until("run~v000002", lambda record: record.served_at is not None)


@pytest.mark.parametrize(
    ("contested", "told"),
    [
        ({"contest": "another writer loads /their/v9"}, "serves what another writer has loaded or labelled"),
        ({"taken": "b:1 is the same server"}, "serves what was loaded under another name or by another service"),
    ],
)
def test_an_engine_that_another_writer_loads_is_not_said_to_serve_its_start_up_weights(
    tmp_path: Path, contested: dict[str, str], told: str
) -> None:
    left = engine(state=EngineState.CONTESTED, reason="left alone", **contested)
    store = Store(Journal(tmp_path), SystemClock())
    store.put_version(version(1))
    store.put_engine(left)
    store.journal.close()
    targets, plan = Targets(store), ReclaimPlan(items=[], freed_bytes=0)
    said = [*explain_engine(left, store, targets), *explain_version(version(1), store, targets, plan)]
    assert sum(told in sentence for sentence in said) == 2
    assert told in log_line(left)
    assert not any("start-up" in sentence for sentence in [*said, log_line(left)])
    shown = make_engine(state=EngineState.CONTESTED, version=None, step=None)
    assert render.steps_behind(shown, make_version(3).id) == "-", "WHY says what is known"


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        ([7, 9], "serves run~v000007, run~v000009, as the host says"),
        ([], "serves no version that the host has proved"),
    ],
)
def test_a_host_that_serves_what_its_hub_has_not_is_not_said_to_serve_start_up_weights(
    tmp_path: Path, versions: list[int], told: str
) -> None:
    named = [HostEngine(id=str(each), state=EngineState.IN_SYNC, version=version(each).id) for each in versions]
    of = HostEngines(follower="host", states={EngineState.IN_SYNC: 2}, engines=tuple(named))
    host = engine(state=EngineState.NACKED, reason="it is barred there", pulls=True, host=of)
    store = Store(Journal(tmp_path), SystemClock())
    store.put_version(version(1))
    store.put_engine(host)
    store.journal.close()
    said = explain_engine(host, store, Targets(store))
    assert any(told in sentence for sentence in said)
    assert told in log_line(host)
    assert not any("start-up" in sentence for sentence in [*said, log_line(host)])
    for state in (EngineState.NACKED, EngineState.IN_SYNC):
        shown = make_engine(state=state, version=None, step=None, host=of)
        assert (render.steps_behind(shown, make_version(3).id), render.step(shown)) == ("-", "-")


async def test_the_overview_says_whether_a_token_is_wanted(tmp_path: Path) -> None:
    async with serving(tmp_path / "open") as stage:
        assert (await stage.http.get("/v1/overview")).json()["wants_token"] is False
    async with serving(tmp_path / "closed", token="secret") as stage:
        assert (await stage.http.get("/v1/overview")).json()["wants_token"] is True


async def test_no_two_routes_have_the_same_title(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        paths = (await stage.http.get("/openapi.json")).json()["paths"]
    titles = [route["summary"] for routes in paths.values() for route in routes.values()]
    assert len(titles) > 20
    assert sorted(titles) == sorted(set(titles))


async def test_all_that_can_be_waited_for_is_documented_wherever_one_can_wait(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        document = (await stage.http.get("/openapi.json")).json()
    route = document["paths"]["/v1/versions/{version_id}/wait"]["get"]
    (waits_for,) = (each for each in route["parameters"] if each["name"] == "for")
    words = waits_for["schema"]["enum"]
    assert "taken" in words
    told = [route["description"], *(inspect.getdoc(wait) or "" for wait in (RefitClient.wait, Publication.wait))]
    for text in told:
        assert not [word for word in words if not re.search(rf"\b{word}\b", text)], text
