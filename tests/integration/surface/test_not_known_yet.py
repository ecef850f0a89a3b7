"""Not known yet is not unknown: what the service answers about versions before it has seen the whole root."""

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from refitd.catalog.files import DiskFiles
from refitd.root.scan import Listing, ListingFailed
from support.services import Stage, serving

ID = "run~v000001"
QUESTIONS = [
    ("GET", f"/v1/versions/{ID}", None),
    ("GET", f"/v1/versions/{ID}/wait?timeout=0", None),
    ("GET", f"/v1/versions/{ID}/attempts", None),
    ("PUT", f"/v1/versions/{ID}/pin", None),
    ("DELETE", f"/v1/versions/{ID}/pin", None),
    ("GET", f"/v1/explain/{ID}", None),
    ("GET", f"/v1/rollback?run=run&to={ID}", None),
    ("GET", "/v1/rollback?run=run", None),
    ("POST", "/v1/rollback", {"run": "run"}),
    ("POST", "/v1/runs", {"run": "run", "paused": True}),
    ("POST", "/v1/versions", {"run": "run", "step": 1, "kind": "handover", "failed": "the trainer gave up"}),
]


@pytest.fixture
def may_list(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The root is not listed before this is set."""
    listed, scan = asyncio.Event(), DiskFiles.scan

    async def late(self: DiskFiles) -> Listing | ListingFailed:
        await listed.wait()
        return await scan(self)

    monkeypatch.setattr(DiskFiles, "scan", late)
    return listed


async def ask(stage: Stage, question: tuple[str, str, dict[str, object] | None]) -> httpx.Response:
    method, path, body = question
    return await stage.http.request(method, path, json=body)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: f"{question[0]} {question[1]}")
async def test_before_the_first_listing_of_the_root_no_version_is_called_unknown(
    tmp_path: Path, may_list: asyncio.Event, question: tuple[str, str, dict[str, object] | None]
) -> None:
    async with serving(tmp_path) as stage:
        answer = await ask(stage, question)
        assert (answer.status_code, answer.headers.get("retry-after")) == (503, "1"), answer.text
        assert "has not been listed yet" in answer.json()["detail"]
        may_list.set()
        await stage.listed()
        assert (await ask(stage, question)).status_code == 404


async def test_the_service_is_ready_only_after_the_first_listing_of_the_root(
    tmp_path: Path, may_list: asyncio.Event
) -> None:
    async with serving(tmp_path) as stage:
        assert (await stage.http.get("/readyz")).status_code == 503
        may_list.set()
        await stage.listed()
        assert (await stage.http.get("/readyz")).status_code == 200


async def test_while_a_lost_journal_is_rebuilt_no_version_is_called_unknown_and_the_service_is_not_ready(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as stage:
        stage.engines["a"].down = True
        await stage.listed()
        stage.store.origin = replace(stage.store.origin, cause="it was corrupt", lost=True, rebuilt=False)
        answer = await stage.http.get(f"/v1/versions/{ID}")
        assert (answer.status_code, answer.headers.get("retry-after")) == (503, "1")
        assert "the journal was lost and is being rebuilt" in answer.json()["detail"]
        assert (await stage.http.get("/readyz")).status_code == 503
        assert "is being rebuilt" in (await stage.http.get("/v1/overview")).json()["faults"]["journal"]
        stage.store.rebuilt()
        assert (await stage.http.get(f"/v1/versions/{ID}")).status_code == 404
        assert (await stage.http.get("/readyz")).status_code == 200
