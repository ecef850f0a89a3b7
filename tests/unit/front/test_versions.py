"""AReaL's checkpoints become versions: once for all calls, with the reason where they do not."""

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from refitd_client.contract.states import WaitOutcome
from refitd_client.contract.wire import EngineOnVersion, Version
from refitd_client.http.exchange import Served
from refitd_client.publish.publication import Publication
from refitd_front import versions as module
from refitd_front.versions import Versions
from support.checkpoints import tensors, write_model
from support.front_app import named_versions
from support.published import versions
from support.scripted_server import problem, serve
from support.slime_updates import FILE, Weights, write_delta

RUN = "exp/trial"


class Place:
    """A trial's checkpoints on disk, and the root beside them."""

    def __init__(self, folder: Path, url: str) -> None:
        self.root, self.weights, self.url = folder / "root", folder / "weights", url
        self.root.mkdir()
        self.taken = self._made(None)

    def _made(self, base: Path | None) -> Versions:
        named = named_versions(self.root, self.url)
        return Versions(named, checkpoints=[self.weights], base_model=base, timeout=1.0)

    def restart(self, base: Path | None = None) -> None:
        """Another front comes, of a trainer that is new."""
        self.taken.close()
        self.taken = self._made(base)

    @property
    def versions(self) -> list[str]:
        return versions(self.root / RUN)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with serve(problem(401, "unauthorized")) as service:
        place = Place(tmp_path, service.url)
        yield place
        place.taken.close()


async def test_the_old_layout_s_one_folder_is_published_at_each_update(place: Place) -> None:
    for made in (1, 2):
        folder = write_model(place.weights / "weight_update", tensors(made))
        os.utime(folder, ns=(made, made))  # as a folder that is made again
        await place.taken.serve(folder)
    assert place.versions == ["v000001", "v000002"]


async def test_a_trainer_that_begins_its_numbers_again_is_taken_by_a_front_that_was_started_with_it(
    place: Place,
) -> None:
    """slime's and NeMo-RL's do after each start, and say nothing else of it where they update by disk."""
    await place.taken.serve(write_model(place.weights / "weight_v000003", tensors(3)), "3")
    again = write_model(place.weights / "weight_v000001", tensors(1))
    assert "not above 3" in str(await place.taken.serve(again, "1"))
    place.restart()
    await place.taken.serve(again, "1")
    await place.taken.serve(write_model(place.weights / "weight_v000002", tensors(2)), "2")
    assert place.versions == ["v000001.g2", "v000002.g2", "v000003"]
    place.taken.begin_anew()  # or it says so: by a group, or by pulling version 0
    await place.taken.serve(write_model(place.weights / "weight_v000001", tensors(4)), "1")
    assert place.versions == ["v000001.g2", "v000001.g3", "v000002.g2", "v000003"]


async def test_an_update_and_a_failure_are_one_line_of_the_log_for_all_engines_together(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AReaL tells every engine's address of the same folder."""
    folder = write_model(place.weights / "weight_update_v3")
    with capture_logs() as lines:
        await asyncio.gather(*(place.taken.serve(folder) for _ in range(3)))
    (line,) = lines
    assert line["log_level"] == "error"
    assert "401" in line.pop("error")
    assert line.pop("seconds") >= 0
    told = {"run": RUN, "path": str(folder), "version": "exp~trial~v000003", "outcome": "failed"}
    assert {name: line[name] for name in told} == told

    two = [cast("EngineOnVersion", engine) for engine in ("a", "b")]
    served = Served(outcome=WaitOutcome.SERVED, engines=two, version=cast("Version", None))
    monkeypatch.setattr(Publication, "wait", lambda *_: served)
    with capture_logs() as lines:
        await asyncio.gather(*(place.taken.serve(folder) for _ in range(3)))
    (line,) = lines
    told |= {"log_level": "info", "engines": 2, "outcome": "served"}
    assert {name: line[name] for name in told} == told


async def test_a_checkpoint_that_cannot_be_read_is_named_in_the_answer_and_in_the_log(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(place.weights / "weight_update_v3")
    scandir = os.scandir

    def denied(path: Any) -> Any:
        if path == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(module.os, "scandir", denied)
    with capture_logs() as lines:
        said = await place.taken.serve(folder)
    assert said is not None
    assert said.startswith(f"{folder} cannot be read: Permission denied")
    assert f"user id {os.geteuid()}" in said
    assert [line["error"] for line in lines] == [said]


def _weights(seed: int) -> Weights:
    return {name: torch.from_numpy(array) for name, array in tensors(seed).items()}


async def test_a_delta_of_what_the_engines_were_started_with_is_published_as_the_weights_that_it_leads_to(
    place: Place, tmp_path: Path
) -> None:
    delta = write_delta(place.weights, 1, _weights(0), _weights(1))
    assert "--base-model" in str(await place.taken.serve(delta))
    assert not list(place.root.rglob("v0*"))
    base = write_model(tmp_path / "base", tensors(0))
    place.taken.close()
    place.taken = Versions(
        named_versions(place.root, place.url), checkpoints=[place.weights], base_model=base, timeout=1.0
    )
    await place.taken.serve(delta)
    assert place.versions == ["v000001"]
    published = load_file(place.root / RUN / "v000001" / "model-00001-of-00001.safetensors")
    assert published.keys() == tensors(1).keys()
    assert all(torch.equal(published[name], tensor) for name, tensor in _weights(1).items())


async def test_a_delta_that_cannot_be_applied_is_no_version_and_the_reason_names_it(
    place: Place, tmp_path: Path
) -> None:
    base = write_model(tmp_path / "base", tensors(0))
    place.taken.close()
    place.taken = Versions(
        named_versions(place.root, place.url), checkpoints=[place.weights], base_model=base, timeout=1.0
    )
    wrong = write_delta(place.weights / "wrong", 1, _weights(5), _weights(1))
    assert "does not lead to the checksum" in str(await place.taken.serve(wrong))
    torn = write_delta(place.weights / "torn", 1, _weights(0), _weights(1))
    (torn / FILE).write_bytes((torn / FILE).read_bytes()[:-9])
    assert str(torn / FILE) in str(await place.taken.serve(torn))
    linked = write_delta(place.weights / "linked", 1, _weights(0), _weights(1))
    (linked / FILE).unlink()
    (linked / FILE).symlink_to(base / "model.safetensors")
    assert "link" in str(await place.taken.serve(linked))
    assert not list(place.root.rglob("v0*"))
