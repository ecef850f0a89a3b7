"""Which run an engine follows, and which notices there is nobody for."""

from pathlib import Path

import pytest

from refitd.policy.roster import bind, followed, why_unbound
from support.checkpoints import publish, tensors
from support.records import engine
from support.services import serving


@pytest.mark.parametrize(
    ("bound", "default", "runs", "expected"),
    [
        ("mine", "default", {"a", "b"}, "mine"),
        (None, "default", {"a", "b"}, "default"),
        (None, None, {"a"}, "a"),
        (None, None, {"a", "b"}, None),
        (None, None, set(), None),
    ],
)
def test_an_engine_follows_its_own_run_else_the_services_else_the_only_one(
    bound: str | None, default: str | None, runs: set[str], expected: str | None
) -> None:
    assert bind(bound, default, runs) == expected


def test_what_an_engine_came_to_follow_by_itself_gives_way_to_the_services_run() -> None:
    came, named = engine("a", run="old"), engine("b", run="old", run_named=True)
    assert followed([came, named], "new", {"old", "new"}) == {"new", "old"}
    assert followed([came], None, {"old", "new"}) == {"old"}


def test_why_an_engine_is_bound_to_nothing_names_the_runs_and_the_setting() -> None:
    assert "published" in why_unbound(set())
    assert all(word in why_unbound({"a", "b"}) for word in ("a, b", "--run", "engines file"))


async def test_a_notice_of_one_of_two_runs_is_refused_while_engines_are_bound_to_none(tmp_path: Path) -> None:
    for run in ("one", "two"):
        publish(tmp_path / "root", run, 1, tensors(1))
    async with serving(tmp_path) as stage:
        await stage.until("two~v000001", lambda _: True)
        for run in ("one", "two"):
            answer = await stage.http.post("/v1/versions", json={"run": run, "step": 1})
            assert (answer.status_code, answer.json()["type"]) == (409, "urn:refitd:problem:run-not-followed")
            assert "('refitd publish --engines mine') to take a:1" in answer.json()["detail"]
            assert not stage.store.versions[f"{run}~v000001"].announced.noticed
        assert stage.engines["a"].loads == []


async def test_a_notice_of_a_second_run_is_refused_and_the_engines_stay_with_the_first(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        publish(stage.root, "one", 1, tensors(1))
        await stage.until("one~v000001", lambda record: record.served_at is not None)
        publish(stage.root, "two", 1, tensors(2))
        answer = await stage.http.post("/v1/versions", json={"run": "two", "step": 1})
        assert answer.status_code == 409
        assert "'refitd engines move a:1 --run two --yes' brings a:1 here from run one" in answer.json()["detail"]
        assert (await stage.http.post("/v1/versions", json={"run": "one", "step": 1})).status_code == 200
        assert len(stage.engines["a"].loads) == 1


async def test_with_a_run_of_the_services_own_its_notices_are_taken_whatever_else_lies_in_the_root(
    tmp_path: Path,
) -> None:
    for run in ("one", "two"):
        publish(tmp_path / "root", run, 1, tensors(1))
    async with serving(tmp_path, run="two") as stage:
        answer = await stage.http.post("/v1/versions", json={"run": "two", "step": 1})
        assert answer.status_code in {200, 202}
        await stage.until("two~v000001", lambda record: record.served_at is not None)
        assert (await stage.http.post("/v1/versions", json={"run": "one", "step": 1})).status_code == 409
