"""Verdicts that depend on more than the files: taken again when what they depended on may have changed."""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from refitd.catalog import examining
from refitd.catalog.examining import NoReference, References
from refitd.clock import SystemClock
from refitd.state.journal.journal import Journal
from refitd.state.observer import Observer
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.fault import Code
from refitd_client.checkpoint.inventory import Reference
from refitd_client.contract.states import EngineState, VersionState
from refitd_client.contract.wire import Notice
from refitd_client.validation.validate import Evidence
from support import catalogs
from support.catalogs import watching
from support.checkpoints import publish, tensors, write_model
from support.records import engine
from support.services import serving

ID = "run~v000001"


@dataclass
class Judged(Observer):
    """The steps that were found good, in that order."""

    steps: list[int] = field(default_factory=list)

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        if after.state is VersionState.SEALED:
            self.steps.append(after.order.step)


async def test_what_was_rejected_for_want_of_a_model_is_looked_at_again_at_the_next_start(tmp_path: Path) -> None:
    async with serving(tmp_path, base_model=None) as stage:
        publish(stage.root, "run", 1, tensors(1))
        await stage.rejected(ID)
        record = stage.store.versions[ID]
        assert record.verdict.code is Code.NO_REFERENCE
        assert "--base-model" in (record.reason or "")
    async with serving(tmp_path) as stage:
        await stage.until(ID, lambda record: record.served_at is not None)
        record = stage.store.versions[ID]
        assert (record.state, record.verdict.code, record.reason) == (VersionState.SEALED, None, None)


@pytest.mark.parametrize("cause", [PermissionError(errno.EACCES, "Permission denied"), OSError(errno.EIO, "I/O error")])
async def test_a_base_model_that_cannot_be_read_rejects_nothing_and_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: OSError
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(examining, "read_reference", _raising(cause))
        async with serving(tmp_path) as stage:
            publish(stage.root, "run", 1, tensors(1))
            await stage.until(ID, lambda record: record.state is VersionState.UNKNOWN)
            reason = stage.store.versions[ID].reason or ""
            assert f"base model {tmp_path / 'base'} cannot be read now" in reason
            assert isinstance(cause, PermissionError) == (f"user id {os.geteuid()}" in reason)
            broken.undo()
            await stage.until(ID, lambda record: record.served_at is not None)


async def test_a_start_up_model_that_cannot_be_read_rejects_nothing_where_one_that_is_not_here_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "state")
    store = Store(journal, SystemClock())
    store.put_engine(engine("a", run="run", startup_path=str(tmp_path / "elsewhere")))
    found = await References(store, None).of("run")
    assert isinstance(found, NoReference)
    assert found.final
    store.put_engine(engine("b", run="run", startup_path=str(write_model(tmp_path / "base"))))
    with monkeypatch.context() as broken:
        broken.setattr(examining, "read_reference", _raising(PermissionError(errno.EACCES, "Permission denied")))
        found = await References(store, None).of("run")
        assert isinstance(found, NoReference)
        assert not found.final
    assert isinstance(await References(store, None).of("run"), Reference), "one engine's model is enough"
    journal.close()


def _raising(error: OSError) -> Callable[[Path], Reference]:
    def read(_: Path) -> Reference:
        raise error

    return read


async def test_what_was_rejected_for_its_files_stays_rejected_at_the_next_start(tmp_path: Path) -> None:
    weights = tensors(1)
    del weights["layer.1.weight"]
    async with serving(tmp_path) as stage:
        publish(stage.root, "run", 1, weights)
        await stage.rejected(ID)
        assert stage.store.versions[ID].verdict.code is Code.MISSING_TENSOR
        before = stage.store.versions[ID]
    async with serving(tmp_path) as stage:
        publish(stage.root, "run", 2, tensors(2))
        await stage.until("run~v000002", lambda record: record.served_at is not None)
        assert stage.store.versions[ID] == before


async def test_when_an_engine_says_which_model_it_serves_the_versions_that_wait_for_that_are_judged_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not each when its next try is due: an old one may be first then, and engines would go to it."""
    monkeypatch.setattr("refitd.catalog.judge.RETRY_SECONDS", 3600.0)
    monkeypatch.setattr("refitd.catalog.judge.LONGEST_RETRY_SECONDS", 3600.0)
    monkeypatch.setattr("refitd.catalog.judge.JUDGES", 1)
    async with watching(tmp_path, base=False) as stage:
        for step in (1, 2, 3):
            publish(stage.root, "run", step, tensors(step))
        for step in (1, 2, 3):
            await stage.verdict(f"run~v{step:06d}", VersionState.UNKNOWN)
        judged = Judged()
        stage.store.observe(judged)
        model = write_model(tmp_path / "base")
        stage.store.put_engine(engine(state=EngineState.IN_SYNC, startup_path=str(model)))
        for step in (1, 2, 3):
            await stage.verdict(f"run~v{step:06d}", VersionState.SEALED)
        assert judged.steps == [3, 2, 1]


async def test_why_nobody_can_say_yet_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = f"{ID} cannot be read: Input/output error"
    with monkeypatch.context() as patch:
        patch.setattr("refitd.catalog.files.examine", lambda *_, **__: Evidence(failure=failure))
        async with serving(tmp_path) as stage:
            publish(stage.root, "run", 1, tensors(1))
            await stage.until(ID, lambda record: record.state is VersionState.UNKNOWN)
            assert stage.store.versions[ID].reason == failure


async def test_a_nan_that_the_scan_found_is_rejected_once_though_its_notice_comes_after(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        weights = tensors(1)
        weights["layer.2.weight"][1, 1] = np.nan
        publish(stage.root, "run", 1, weights)
        await stage.rejected(ID)
        answer = await stage.http.post("/v1/versions", json={"run": "run", "step": 1, "metadata": {"loss": "nan"}})
        assert (answer.status_code, answer.json()["state"]) == (200, "REJECTED")
        assert answer.json()["metadata"] == {"loss": "nan"}
        told = (await stage.http.get("/v1/log", params={"severity": "warning"})).json()["items"]
        assert [entry["text"].partition(":")[0] for entry in told].count("rejected") == 1


async def test_a_rejected_folder_that_was_mended_is_judged_again_when_it_is_announced_again(tmp_path: Path) -> None:
    model = write_model(tmp_path / "base", tensors(0))
    async with catalogs.watching(tmp_path, model=model) as stage:
        whole = tensors(1)
        folder = write_model(stage.root / "run/output", {**whole, "stranger": whole["layer.0.weight"]})
        notice = Notice(run="run", step=1, path="run/output")
        await stage.intake.take(notice)
        await stage.verdict(ID, VersionState.REJECTED)
        unchanged, _ = await stage.intake.take(notice)
        assert unchanged.state is VersionState.REJECTED  # the same files: the same verdict, without another reading
        write_model(folder, whole)
        await stage.intake.take(notice)
        await stage.verdict(ID, VersionState.SEALED)
