"""A notice that is refused stands in the log, so that an operator sees why a trainer's steps do not arrive."""

from pathlib import Path
from typing import Any

import pytest

from refitd.catalog import intake
from refitd.settings import Settings
from refitd_doctor.service import ask_service, judge_notice
from support.attackers import listening
from support.checkpoints import publish, tensors
from support.services import Stage, serving


async def warnings(stage: Stage, run: str | None = None) -> list[Any]:
    query = {"severity": "warning"} | ({} if run is None else {"run": run})
    return (await stage.http.get("/v1/log", params=query)).json()["items"]


async def refuse(stage: Stage, run: str, step: int = 1) -> str:
    answer = await stage.http.post("/v1/versions", json={"run": run, "step": step})
    assert 400 <= answer.status_code < 500
    return answer.json()["detail"]


async def test_a_refused_notice_is_a_warning_about_its_run_once_for_all_retries(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        publish(stage.root, "other", 1, tensors(2))
        detail, *_ = [await refuse(stage, "other") for _ in range(3)]
        (entry,) = await warnings(stage, "other")
    assert (entry["kind"], entry["subject"], entry["severity"]) == ("run", "other", "warning")
    assert entry["text"] == f"the notice of step 1 was refused: {detail}"
    assert entry["data"]["problem"] == "run-not-followed"


async def test_another_reason_and_another_run_are_told_as_well(tmp_path: Path) -> None:
    async with serving(tmp_path, run="run") as stage:
        await stage.served(1)
        for run in ("one", "two"):
            publish(stage.root, run, 1, tensors(2))
            await refuse(stage, run)
        await refuse(stage, "run", step=7)
        told = await warnings(stage)
    assert {(each["subject"], each["data"]["problem"]) for each in told} == {
        ("one", "run-not-followed"),
        ("two", "run-not-followed"),
        ("run", "path-missing"),
    }


async def test_a_name_that_no_run_can_have_is_told_of_the_root(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.listed()
        await refuse(stage, "../x")
        (entry,) = await warnings(stage)
    assert (entry["kind"], entry["subject"], entry["data"]["problem"]) == ("root", "root", "bad-name")


async def test_after_a_while_the_reason_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as stage:
        await stage.listed()
        await refuse(stage, "run", step=5)
        await refuse(stage, "run", step=6)
        monkeypatch.setattr(intake, "SAID_AGAIN_SECONDS", 0.0)
        await refuse(stage, "run", step=7)
        newest, oldest = await warnings(stage, "run")
    assert oldest["text"].startswith("the notice of step 5 was refused")
    assert newest["text"].startswith("the notice of step 7 was refused")


@pytest.mark.parametrize("options", [{}, {"run": "other"}])
async def test_the_notice_by_which_doctor_asks_leaves_nothing_in_the_log(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """It is to be refused, since nothing is at its path, or since engines follow another run."""
    async with serving(tmp_path, **options) as stage, listening(stage.api, within=100) as server:
        url = f"http://127.0.0.1:{server.port}"
        found = judge_notice(url, await ask_service(Settings(root=stage.root), url))
        told = await warnings(stage, intake.DOCTORS_RUN)
    assert (found.verdict, told) == ("ok", []), found


async def test_invented_names_of_runs_do_not_fill_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MOST", 2)
    async with serving(tmp_path) as stage:
        await stage.listed()
        for number in range(5):
            await refuse(stage, f"run-{number}")
        assert len(await warnings(stage)) == 2
