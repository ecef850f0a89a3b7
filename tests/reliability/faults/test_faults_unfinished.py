"""Checkpoints that are not finished yet, or never will be: no engine hears of one before it is whole."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from faults.stand import Stand, Subject, standing, until
from refitd_client import WeightPublisher
from refitd_client.contract.naming import INDEX_NAME
from refitd_client.contract.states import VersionState
from support.jobs import RUN
from support.proxy import Proxy

LOAD = "/update_weights_from_disk"
SHARD = "model.safetensors"


def begun(stand: Stand, model: Path, step: int, *, index: bool = False) -> Path:
    """The folder of a checkpoint without its weights; with the index, by which others know that it is complete."""
    folder = stand.root / RUN / f"v{step:06d}"
    folder.mkdir(parents=True)
    shutil.copy(model / "config.json", folder)
    if index:
        with safe_open(model / SHARD, "np") as shard:
            names = list(shard.keys())
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, SHARD)}))
    return folder


def settling(stand: Stand, step: int) -> None:
    """Wait until the service has looked at it and waits for more."""
    stand.until(lambda event: event.subject.endswith(f"v{step:06d}"))
    until(lambda: stand.state_of(step) is VersionState.SETTLING)


def test_a_shard_that_is_still_growing_is_waited_for(engine: Subject, tmp_path: Path) -> None:
    with (
        Proxy(engine.server.port) as proxy,
        standing(tmp_path, engine, "--settle", "1", engines=[proxy.url]) as stand,
    ):
        whole = (engine.model(1) / SHARD).read_bytes()
        shard = begun(stand, engine.model(1), 1) / SHARD
        for part in range(5):
            with shard.open("ab") as file:
                file.write(whole[len(whole) * part // 5 : len(whole) * (part + 1) // 5])
            if part < 4:
                settling(stand, 1)
                assert proxy.count(LOAD) == 0
        stand.is_served(1)
        assert engine.serves(1)


@pytest.mark.parametrize("first", ["late", "truncated"])
def test_a_marker_that_comes_first_is_not_believed_while_its_shard_is_late_or_truncated(
    first: str, engine: Subject, tmp_path: Path
) -> None:
    with Proxy(engine.server.port) as proxy, standing(tmp_path, engine, engines=[proxy.url]) as stand:
        stand.serve(engine.model(1), 1)
        whole = (engine.model(2) / SHARD).read_bytes()
        never, late = begun(stand, engine.model(2), 2, index=True), begun(stand, engine.model(3), 3, index=True)
        if first == "truncated":
            for folder in (never, late):
                (folder / SHARD).write_bytes(whole[: len(whole) // 2])
        settling(stand, 3)
        (late / SHARD).write_bytes((engine.model(3) / SHARD).read_bytes())
        stand.is_served(3)
        assert engine.serves(3)
        stand.until(lambda event: event.data.get("state") == "REJECTED" and event.data.get("step") == 2)
        assert SHARD in (stand.version(2).reason or "")
        assert proxy.count(LOAD) == 2, "an engine heard of a checkpoint that is not whole"


@pytest.mark.parametrize("damage", ["gone", "truncated"])
def test_a_manifest_that_outlived_its_shard_is_not_believed(damage: str, engine: Subject, tmp_path: Path) -> None:
    """As a power cut leaves it where somebody did not sync."""
    with Proxy(engine.server.port) as proxy, standing(tmp_path, engine, engines=[proxy.url]) as stand:
        with WeightPublisher(tmp_path / "elsewhere", RUN) as publisher:
            folder = publisher.publish(engine.model(1), step=1).path
        if damage == "gone":
            (folder / SHARD).unlink()
        else:
            with (folder / SHARD).open("r+b") as shard:
                shard.truncate(shard.seek(0, 2) // 2)
        (stand.root / RUN).mkdir(parents=True)
        folder.rename(stand.root / RUN / folder.name)
        stand.until(lambda event: event.data.get("state") == "REJECTED")
        assert SHARD in (stand.version(1).reason or "")
        assert proxy.count(LOAD) == 0
