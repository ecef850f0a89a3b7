"""What a trainer says about a version: by the notice, in the manifest, before and after the verdict."""

from dataclasses import replace
from pathlib import Path

import httpx

from refitd.policy.admit import MAX_CHARACTERS, MAX_ENTRIES, completed, fits
from refitd.state.journal.rows import read_events
from refitd_client.contract.manifest import parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.contract.states import VersionState
from support.checkpoints import Tensors, publish, tensors
from support.services import Stage, serving

ID = "run~v000001"


def publish_saying(stage: Stage, metadata: dict[str, str], weights: Tensors | None = None) -> None:
    """Publish step 1 with metadata in its manifest."""
    folder = publish(stage.root.parent / "staged", "run", 1, tensors(1) if weights is None else weights)
    manifest = parse_manifest((folder / MANIFEST_NAME).read_bytes())
    (folder / MANIFEST_NAME).write_bytes(replace(manifest, metadata=metadata).to_json())
    (stage.root / "run").mkdir()
    folder.rename(stage.root / "run" / folder.name)


async def announce(stage: Stage, **metadata: str) -> httpx.Response:
    return await stage.http.post("/v1/versions", json={"run": "run", "step": 1, "metadata": metadata})


async def sealed(stage: Stage) -> dict[str, str]:
    await stage.until(ID, lambda record: record.state is VersionState.SEALED)
    return stage.store.versions[ID].announced.metadata


def test_what_is_kept_has_limits() -> None:
    assert fits({"k": "v" * (MAX_CHARACTERS - 1)})
    assert not fits({"k": "v" * MAX_CHARACTERS})
    assert not fits({str(number): "" for number in range(MAX_ENTRIES + 1)})


def test_the_notice_wins_over_the_manifest_and_too_much_is_none() -> None:
    assert completed({"loss": "2"}, {"loss": "1", "lr": "3"}) == {"loss": "2", "lr": "3"}
    assert completed({"loss": "2"}, {"k": "v" * MAX_CHARACTERS}) is None


async def test_the_manifest_s_metadata_comes_with_a_version_that_nobody_announced(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        publish_saying(stage, {"loss": "1"})
        assert await sealed(stage) == {"loss": "1"}
        assert (await stage.http.get(f"/v1/versions/{ID}")).json()["metadata"] == {"loss": "1"}


async def test_a_notice_adds_to_the_metadata_of_a_version_that_is_sealed_and_changes_nothing_else(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as stage:
        publish_saying(stage, {"loss": "1"})
        await stage.until(ID, lambda record: record.served_at is not None)
        before = stage.store.versions[ID]
        answer = await announce(stage, eval="0.7")
        assert (answer.status_code, answer.json()["metadata"]) == (200, {"loss": "1", "eval": "0.7"})
        assert stage.store.versions[ID] == before.having(metadata={"loss": "1", "eval": "0.7"})
        said = stage.store.last_event
        assert (await announce(stage, eval="0.7")).status_code == 200
        assert stage.store.last_event == said
        assert len(stage.engines["a"].loads) == 1
    async with serving(tmp_path) as stage:
        assert stage.store.versions[ID].announced.metadata == {"loss": "1", "eval": "0.7"}


async def test_a_notice_adds_to_the_metadata_of_a_rejected_version_without_trying_it_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        publish_saying(stage, {}, {"other": tensors(1)["layer.0.weight"], "more": tensors(1)["layer.1.weight"]})
        await announce(stage)
        await stage.rejected(ID)
        await announce(stage, why="a test")
        record = stage.store.versions[ID]
        assert (record.state, record.announced.metadata) == (VersionState.REJECTED, {"why": "a test"})


async def test_more_metadata_than_is_kept_is_refused_in_a_notice_and_left_out_of_a_manifest(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        publish_saying(stage, {"k": "v" * MAX_CHARACTERS})
        await announce(stage, loss="1")
        await stage.until(ID, lambda record: record.served_at is not None)
        assert stage.store.versions[ID].announced.metadata == {"loss": "1"}
        answer = await announce(stage, k="v" * (MAX_CHARACTERS - 1))
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:refitd:problem:bad-request")
        assert stage.store.versions[ID].announced.metadata == {"loss": "1"}
        await stage.store.durable()
        said = stage.store.journal.read(lambda connection: read_events(connection, after=0, limit=100, subject=ID))
        assert any("the metadata in refit.json is left out" in event.text for event in said)
