"""Attacks with a version's directory, through the running service: whoever can write below the root tries to have
something else read, run, loaded or deleted. The engine hears of none of it, and what lies outside stays as it was.
"""

import json
import os
import pickle
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.contract.states import VersionState
from refitd_client.validation import contents
from support.checkpoints import publish, tensors, write_model
from support.rawfiles import raw
from support.services import Stage, serving

ID = "run~v000001"
SHARD = "model-00001-of-00002.safetensors"
PASSWD = Path("/etc/passwd")


class Bomb:
    """Runs code in whoever loads it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


async def refused(stage: Stage, *says: str) -> None:
    """Announce the version; it is rejected with a reason that says so, and no engine has heard of it."""
    answer = await stage.http.post("/v1/versions", json={"run": "run", "step": 1})
    if answer.status_code in {200, 202}:
        await stage.rejected(ID)
        answer = await stage.http.get(f"/v1/versions/{ID}")
        text = answer.json()["reason"]
    else:
        assert answer.status_code == 422, answer.text
        text = answer.json()["detail"]
    for part in says:
        assert part in text
    assert stage.engines["a"].loads == []


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
async def test_a_pickle_is_refused_by_name_and_never_loaded(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path, settle=0.0) as stage:
        folder = stage.root / "run" / "v000001"
        folder.mkdir(parents=True)
        (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
        await refused(stage, name, "pickle", "safetensors")
        assert not (tmp_path / "exploded").exists()
        pickle.loads((folder / name).read_bytes())  # noqa: S301 - shows that the bomb is one
        assert (tmp_path / "exploded").exists()


async def test_a_pickle_that_is_called_safetensors_is_refused_and_never_loaded(tmp_path: Path) -> None:
    async with serving(tmp_path, settle=0.0) as stage:
        folder = write_model(stage.root / "run" / "v000001")
        (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
        await refused(stage, "model.safetensors")
        assert not (tmp_path / "exploded").exists()


async def test_a_version_that_is_a_link_out_of_the_root_is_not_followed(tmp_path: Path) -> None:
    outside = write_model(tmp_path / "outside")
    before = sorted(os.listdir(outside))
    async with serving(tmp_path) as stage:
        (stage.root / "run").mkdir()
        (stage.root / "run" / "v000001").symlink_to(outside)
        (stage.root / "linked").symlink_to(tmp_path)
        await refused(stage, "link")
        answer = await stage.http.post("/v1/versions", json={"run": "run", "step": 2, "path": "linked/outside"})
        assert answer.status_code == 422
        assert "link" in answer.json()["detail"]
        await stage.http.post("/v1/reclaim")
        assert sorted(os.listdir(outside)) == before


@pytest.mark.parametrize("path", ["..", "../outside", "run/../../outside", "/etc", "/", ".refitd", "run/.incoming-1"])
async def test_a_notice_for_a_path_outside_the_root_is_refused(tmp_path: Path, path: str) -> None:
    write_model(tmp_path / "outside")
    async with serving(tmp_path) as stage:
        answer = await stage.http.post("/v1/versions", json={"run": "run", "step": 1, "path": path})
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:refitd:problem:path-outside-root")
        assert stage.store.versions == {}


def link(path: Path) -> None:
    path.symlink_to(PASSWD)


def device(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero: without end


def petabyte(path: Path) -> None:
    size = 2**43  # as large as ext4 and tmpfs let it be; nothing of it takes a block
    header = {
        "layer.0.weight": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]},
        "layer.1.weight": {"dtype": "F32", "shape": [0], "data_offsets": [size, size]},
    }
    path.write_bytes(raw(json.dumps(header).encode()))
    os.truncate(path, path.stat().st_size + size)


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (link, "symbolic link"),
        (os.mkfifo, "FIFO"),
        pytest.param(device, "device", marks=pytest.mark.skipif(os.geteuid() != 0, reason="mknod is root's")),
        (Path.mkdir, "folder"),
        (petabyte, "shape"),
        (lambda path: os.link(PASSWD, path), "header"),
    ],
    ids=["link", "FIFO", "device", "folder", "sparse petabyte", "hard link to passwd"],
)
async def test_what_is_planted_in_place_of_a_shard_is_refused(
    tmp_path: Path, plant: Callable[[Path], None], says: str
) -> None:
    async with serving(tmp_path, settle=0.0) as stage:
        shard = publish(stage.root, "run", 1, tensors(1)).rename(tmp_path / "kept") / SHARD
        shard.unlink()
        (shard.parent / MANIFEST_NAME).unlink()
        try:
            plant(shard)
        except OSError as error:
            pytest.skip(f"not possible here: {error}")
        before = PASSWD.read_bytes()  # noqa: ASYNC240 - a few lines
        shard.parent.rename(stage.root / "run" / "v000001")
        await refused(stage, says)
        await stage.http.post("/v1/reclaim")
        assert PASSWD.read_bytes() == before  # noqa: ASYNC240 - likewise


@pytest.mark.parametrize("swap", ["link", "fifo", "other"])
async def test_a_shard_that_is_swapped_while_it_is_validated_reaches_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    """Between the look at a file and its opening, and while it is read."""
    real, swapped = contents.read_contents, False

    def read(*args: Any, **named: Any) -> Any:
        nonlocal swapped
        result = real(*args, **named)
        shard = stage.root / "run" / "v000001" / SHARD
        if not swapped:
            shard.rename(tmp_path / "good")
            plants = {"link": link, "fifo": os.mkfifo, "other": lambda path: path.write_bytes(b"hostile")}
            plants[swap](shard)
            swapped = True
        return result

    from refitd_client.validation import examine

    monkeypatch.setattr(examine, "read_contents", read)
    async with serving(tmp_path) as stage:
        publish(stage.root, "run", 1, tensors(1))
        await stage.http.post("/v1/versions", json={"run": "run", "step": 1})
        await stage.until(ID, lambda record: record.state in {VersionState.REJECTED, VersionState.LOST})
        assert swapped
        assert stage.engines["a"].loads == []


@pytest.mark.parametrize("swap", ["link", "other"])
async def test_a_version_that_is_swapped_after_it_was_sealed_is_not_loaded(tmp_path: Path, swap: str) -> None:
    async with serving(tmp_path, names=()) as stage:
        folder = publish(stage.root, "run", 1, tensors(1))
        await stage.until(ID, lambda record: record.state is VersionState.SEALED)
        folder.rename(tmp_path / "good")
        if swap == "link":
            folder.symlink_to(tmp_path / "good")
        else:
            shutil.copytree(tmp_path / "good", folder)
            (folder / SHARD).write_bytes(b"hostile")
        added = await stage.http.post("/v1/engines", json={"url": "http://b:1"})
        assert added.status_code == 201
        await stage.until(ID, lambda record: record.state is VersionState.LOST)
        assert stage.engines["b"].loads == []
