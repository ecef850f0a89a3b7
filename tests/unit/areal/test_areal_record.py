"""The watch of AReaL's record: each checkpoint becomes a version once, whatever fails in between."""

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from refitd_client.contract.states import WaitOutcome
from refitd_client.contract.wire import EngineOnVersion, Version
from refitd_client.errors import UnauthorizedError
from refitd_client.http.exchange import Served
from refitd_client.publish.publication import Publication
from refitd_front.areal import updates
from refitd_front.areal.record import RecordWatch
from refitd_front.areal.updates import Updates
from support.checkpoints import tensors, write_model
from support.published import versions
from support.scripted_server import problem, serve

RUN = "exp/trial"


class Place:
    """A trial as AReaL leaves it on disk, and the root beside it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.root, self.weights, self.trial = folder / "root", folder / "weights", folder / "trial"
        self.root.mkdir()
        self.updates = Updates(self.root, RUN, url, checkpoints=self.weights, timeout=1.0, token_file=None)
        self.watch = RecordWatch(self.trial, self.weights, self.updates)
        self._made = 0

    def announce(self, old: int, folder: str) -> None:
        self._made += 1
        write_model(self.weights / folder, tensors(self._made))
        entry = self.trial / f"update_weights_from_disk/{old}/ENTRY"
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_text("1.0")
        os.utime(entry, ns=(self._made, self._made))
        os.utime(self.weights / folder, ns=(self._made, self._made))  # as a folder that is made again

    def begin_again(self) -> None:
        """A restart of `refitd areal`."""
        self.updates.close()
        self.watch = RecordWatch(self.trial, self.weights, self.updates)

    @property
    def versions(self) -> list[str]:
        return versions(self.root / RUN)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with serve(problem(401, "unauthorized")) as service:
        place = Place(tmp_path, service.url)
        yield place
        place.updates.close()


async def test_the_old_layout_s_one_folder_is_published_at_each_update(place: Place) -> None:
    for old in (0, 1):
        place.announce(old, "weight_update")
        assert await place.watch.look()
    assert place.versions == ["v000001", "v000002"]


async def test_a_watch_that_begins_again_publishes_nothing_twice(place: Place) -> None:
    for old in (4, 5):
        place.announce(old, f"weight_update_v{old + 1}")
        assert await place.watch.look()
    place.begin_again()
    assert await place.watch.look()
    assert place.versions == ["v000005", "v000006"]
    place.announce(6, "weight_update_v7")
    assert await place.watch.look()
    assert place.versions == ["v000005", "v000006", "v000007"]


async def test_a_checkpoint_that_failed_is_tried_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.announce(0, "weight_update_v1")
    hold = place.updates.hold

    async def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(place.updates, "hold", full)
    assert not await place.watch.look()
    monkeypatch.setattr(place.updates, "hold", hold)
    assert await place.watch.look()
    assert place.versions == ["v000001"]


async def test_a_record_that_cannot_be_read_ends_nothing(place: Place) -> None:
    place.announce(0, "weight_update_v1")
    record = place.trial / "update_weights_from_disk"
    record.rename(place.trial / "aside")
    record.write_text("no folder")
    assert not await place.watch.look()
    record.unlink()
    (place.trial / "aside").rename(record)
    assert await place.watch.look()
    assert place.versions == ["v000001"]


async def test_a_notice_that_is_refused_is_the_cause_that_areal_hears_each_time(place: Place) -> None:
    folder = write_model(place.weights / "weight_update_v3")
    said = [await place.updates.serve(folder) for _ in range(2)]
    assert said[0] == said[1]
    assert "401" in (said[0] or "")
    assert place.versions == ["v000003"]
    with pytest.raises(UnauthorizedError):
        (await place.updates.hold(folder)).wait(1.0)


async def test_an_update_and_a_failure_are_one_line_of_the_log_for_all_engines_together(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AReaL tells every engine's facade of the same folder."""
    folder = write_model(place.weights / "weight_update_v3")
    with capture_logs() as lines:
        await asyncio.gather(*(place.updates.serve(folder) for _ in range(3)))
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
        await asyncio.gather(*(place.updates.serve(folder) for _ in range(3)))
    (line,) = lines
    told |= {"log_level": "info", "engines": 2, "outcome": "served"}
    assert {name: line[name] for name in told} == told


async def test_a_checkpoint_that_cannot_be_read_is_named_in_the_answer_and_in_the_log(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(place.weights / "weight_update_v3")
    stat = os.stat

    def denied(path: Any, **more: Any) -> os.stat_result:
        if path == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **more)

    monkeypatch.setattr(updates.os, "stat", denied)
    with capture_logs() as lines:
        said = await place.updates.serve(folder)
    assert said is not None
    assert said.startswith(f"{folder} cannot be read: Permission denied")
    assert f"user id {os.geteuid()}" in said
    assert [line["error"] for line in lines] == [said]
