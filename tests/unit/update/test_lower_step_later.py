"""A step that appears after a later one, as when a training begins again in a folder that has another's checkpoints."""

from pathlib import Path

import pytest

from refitd.explain.run import glance_at
from refitd.policy.goals import passed_over, question_about
from refitd_client.contract.states import Standing, VersionState
from support.checkpoints import publish, tensors
from support.records import version
from support.services import serving

TEN = "run~v000010"
NEWEST = version(1000, served_at="2026-11-21T12:00:00Z")
LATE = version(10, after=NEWEST.id)


async def test_a_lower_step_that_appears_later_is_a_question_with_its_command(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1000)
        publish(stage.root, "run", 10, tensors(10))
        await stage.until(TEN, lambda record: record.state is VersionState.SEALED)
        found = glance_at(stage.store, stage.targets, "run")
        assert (found.standing, found.target) == (Standing.TROUBLED, "run~v001000")
        asked = (
            f"tep 10 appeared after step 1,000, which stays the target: if a new training began, 'refitd rollback run "
            f"--to {TEN}' goes there; if not, move run/v000010 away"
        )
        assert found.trouble == f"S{asked}"
        assert (await stage.http.get(f"/v1/versions/{TEN}")).json()["reason"] == f"s{asked}"
        assert f"S{asked}." in (await stage.http.get(f"/v1/explain/{TEN}")).json()["sentences"]

        assert (await stage.http.post("/v1/rollback", json={"run": "run", "to": TEN})).status_code == 200
        await stage.until(TEN, lambda record: record.served_at is not None)
        await stage.served(20)
        assert glance_at(stage.store, stage.targets, "run").standing is not Standing.TROUBLED


async def test_the_notice_of_a_lower_step_is_answered_with_the_question(tmp_path: Path) -> None:
    async with serving(tmp_path, scan_interval=60.0) as stage:
        await stage.served(1000)
        publish(stage.root, "run", 10, tensors(10))
        assert (await stage.http.post("/v1/versions", json={"run": "run", "step": 10})).status_code == 202
        waited = (await stage.http.get(f"/v1/versions/{TEN}/wait", params={"timeout": 10})).json()
        assert waited["outcome"] == "superseded"
        assert waited["version"]["reason"].startswith("step 10 appeared after step 1,000")


async def test_steps_that_one_listing_shows_together_raise_no_question(tmp_path: Path) -> None:
    for step in (10, 20, 1000):
        publish(tmp_path / "root", "run", step, tensors(step))
    async with serving(tmp_path) as stage:
        await stage.until("run~v001000", lambda record: record.served_at is not None)
        assert [each.announced.after for each in stage.store.versions.values()] == [None, None, None]
        assert glance_at(stage.store, stage.targets, "run").standing is Standing.CURRENT


@pytest.mark.parametrize(
    ("versions", "is_asked"),
    [
        ([NEWEST, LATE], True),
        ([version(1010), NEWEST, LATE], False),
        ([NEWEST, version(10)], False),
        ([NEWEST, version(10, after=NEWEST.id, barred=True)], False),
        ([NEWEST, version(10, after=NEWEST.id, state=VersionState.REJECTED)], False),
    ],
    ids=["asked", "the first training goes on", "was there before", "barred", "not good"],
)
def test_the_question_stands_until_it_is_answered_or_the_first_training_goes_on(
    versions: list[object], is_asked: bool
) -> None:
    known = [each for each in versions if isinstance(each, type(NEWEST))]
    assert (passed_over(known, known[0]) is not None) is is_asked
    assert len(question_about(LATE, NEWEST)) <= 240
