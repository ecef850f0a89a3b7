"""Commands that change something: pin, unpin, rollback, engines, reclaim; and what opens the door to them."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from refitd_client.contract.states import EngineState, VersionState
from refitd_client.contract.wire import Engine, NewEngine, Problem, Reclaimable, ReclaimPlan, Rollback, Version
from support.command_line import answer, refitd
from support.stand_in_service import StandIn, make_engine, make_version, stand_in

PLAN = ReclaimPlan(
    items=[
        Reclaimable(path="exp/v000009", keep=True, reasons=["engine-0 serves it", "it is pinned"]),
        Reclaimable(path="exp/v000001", keep=False, reasons=["no rule keeps it"], bytes=2_000_000_000),
    ],
    freed_bytes=2_000_000_000,
)


@pytest.fixture
def service() -> Iterator[StandIn]:
    with stand_in() as state:
        yield state


def test_pin_and_unpin(service: StandIn) -> None:
    service.versions = [make_version(1)]
    assert "is pinned" in refitd("pin", "exp~v000001", "--url", service.url).stdout
    assert service.versions[0].pinned
    assert not answer("unpin", "exp~v000001", "--url", service.url, kind=Version).pinned


@pytest.mark.parametrize("state", [VersionState.DELETED, VersionState.RETIRED])
def test_an_unpin_that_comes_too_late_says_so(service: StandIn, state: VersionState) -> None:
    service.versions = [make_version(1, state=state)]
    said = refitd("unpin", "exp~v000001", "--url", service.url).stdout
    assert said == f"exp~v000001 is no longer pinned: it is {state}, and nothing is left to keep.\n"


def test_a_version_that_is_not_there_is_said_to_be_so(service: StandIn) -> None:
    result = refitd("pin", "exp~v000001", "--url", service.url)
    assert result.exit_code == 1
    assert "no version exp~v000001" in result.stderr


class TestRollback:
    def test_it_goes_where_it_was_said_to_go(self, service: StandIn) -> None:
        service.versions = [make_version(1), make_version(2)]
        result = refitd("rollback", "exp", "--yes", "--url", service.url)
        assert result.stdout == "exp rolls back to exp~v000001 (step 1). What is newer is barred for good.\n"
        wanted = answer("rollback", "exp", "--to", "exp~v000002", "--yes", "--url", service.url, kind=Version)
        assert wanted == service.versions[1]
        assert service.bodies == [Rollback(run="exp", to="exp~v000001"), Rollback(run="exp", to="exp~v000002")]

    @pytest.mark.parametrize("json", [[], ["--json"]])
    def test_nothing_is_barred_where_nobody_can_be_asked(self, service: StandIn, json: list[str]) -> None:
        service.versions = [make_version(1), make_version(2)]
        result = refitd("rollback", "exp", "--url", service.url, *json, stdin="y\n")
        assert result.exit_code == 2
        assert "--yes" in result.output
        assert service.bodies == []

    @pytest.mark.parametrize(("said", "code", "posts"), [("y\n", 0, 1), ("n\n", 1, 0), ("\n", 1, 0)])
    def test_a_person_hears_first_where_it_goes_what_it_bars_and_how_to_get_forward_again(
        self, service: StandIn, monkeypatch: pytest.MonkeyPatch, said: str, code: int, posts: int
    ) -> None:
        service.versions = [make_version(step) for step in range(1, 6)]
        monkeypatch.setattr("refitd.cli.output.can_ask", lambda: True)
        result = refitd("rollback", "exp", "--url", service.url, stdin=said)
        assert (result.exit_code, len(service.bodies)) == (code, posts)
        before = result.stdout.partition("Roll back?")[0]
        assert "exp goes from exp~v000005 back to exp~v000001." in before
        assert "Barred for good: exp~v000005, exp~v000004, exp~v000003 and 1 more." in before
        assert "collection deletes their files" in before
        assert "To go forward again, publish anew" in before
        assert "'refitd publish --new-generation'" in " ".join(before.split())

    def test_of_one_version_the_files_are_its_own(self, service: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
        service.versions = [make_version(1), make_version(2)]
        monkeypatch.setattr("refitd.cli.output.can_ask", lambda: True)
        said = refitd("rollback", "exp", "--url", service.url, stdin="n\n").stdout
        assert "collection deletes its files" in " ".join(said.split())

    def test_engines_that_are_away_are_said_to_follow_later(self, service: StandIn) -> None:
        service.versions = [make_version(1), make_version(2)]
        service.engines = [make_engine("a"), make_engine("gone", state=EngineState.UNREACHABLE)]
        result = refitd("rollback", "exp", "--yes", "--url", service.url)
        assert "gone is UNREACHABLE: it follows when it is back." in result.stdout


class TestEngines:
    def test_add(self, service: StandIn) -> None:
        added = answer("engines", "add", "http://e:1", "--id", "e", "--run", "exp", "--url", service.url, kind=Engine)
        assert (added.id, added.url) == ("e", "http://e:1")
        assert service.bodies == [NewEngine(url="http://e:1", id="e", run="exp")]

    def test_remove(self, service: StandIn) -> None:
        service.engines = [make_engine("a"), make_engine("b")]
        assert answer("engines", "remove", "a", "--url", service.url) == {"id": "a", "removed": True}
        assert refitd("engines", "remove", "b", "--url", service.url).stdout == "b is removed.\n"
        assert service.engines == []

    def test_resync(self, service: StandIn) -> None:
        service.engines = [make_engine("a"), make_engine("b", state=EngineState.UNREACHABLE)]
        assert "a will be loaded: " in refitd("engines", "resync", "a", "--url", service.url).stdout
        assert service.asked == ["POST /v1/engines/a/resync"]
        said = refitd("engines", "resync", "b", "--url", service.url).stdout
        assert "b will be loaded when it is reachable: " in said


class TestReclaim:
    def test_a_dry_run_only_looks_and_gives_the_reasons(self, service: StandIn) -> None:
        service.plan = PLAN
        result = refitd("reclaim", "--dry-run", "--url", service.url)
        assert "engine-0 serves it; it is pinned" in result.stdout
        assert "2.0 GB would be freed: 1 to delete, 1 to keep" in result.stdout
        assert service.asked == ["GET /v1/reclaim/plan"]

    def test_names_for_machines_are_cut_for_people_alone(self, service: StandIn) -> None:
        path = f".refitd/slots/exp/{'ab12' * 16}-{'cd34' * 8}"
        service.plan = ReclaimPlan(items=[Reclaimable(path=path, keep=True, reasons=["a slot"])], freed_bytes=0)
        assert ".refitd/slots/exp/ab12ab12…-cd34cd34…  " in refitd("reclaim", "--dry-run", "--url", service.url).stdout
        assert answer("reclaim", "--dry-run", "--url", service.url, kind=ReclaimPlan).items[0].path == path

    def test_a_dry_run_stays_one_with_yes(self, service: StandIn) -> None:
        assert refitd("reclaim", "--dry-run", "--yes", "--url", service.url).exit_code == 0
        assert service.asked == ["GET /v1/reclaim/plan"]

    @pytest.mark.parametrize("json", [[], ["--json"]])
    def test_nothing_is_deleted_where_nobody_can_be_asked(self, service: StandIn, json: list[str]) -> None:
        result = refitd("reclaim", "--url", service.url, *json, stdin="y\n")
        assert result.exit_code == 2
        assert "--yes" in result.output
        assert not [line for line in service.asked if line.startswith("POST")]

    @pytest.mark.parametrize(("said", "code", "posts"), [("y\n", 0, 1), ("n\n", 1, 0), ("\n", 1, 0)])
    def test_a_person_is_asked_first(
        self, service: StandIn, monkeypatch: pytest.MonkeyPatch, said: str, code: int, posts: int
    ) -> None:
        service.plan = PLAN
        monkeypatch.setattr("refitd.cli.output.can_ask", lambda: True)
        result = refitd("reclaim", "--url", service.url, stdin=said)
        assert result.exit_code == code
        assert sum(line.startswith("POST") for line in service.asked) == posts
        assert ("2.0 GB freed" in result.stdout) is (posts == 1)

    def test_yes_deletes_and_says_what(self, service: StandIn) -> None:
        service.plan = PLAN
        done = answer("reclaim", "--yes", "--url", service.url, kind=ReclaimPlan)
        assert done.done
        assert service.asked == ["POST /v1/reclaim"]


class TestTokens:
    def test_without_the_token_it_ends_with_4_and_says_how_to_give_one(self, service: StandIn) -> None:
        service.token, service.versions = "secret", [make_version(1)]
        result = refitd("pin", "exp~v000001", "--url", service.url)
        assert result.exit_code == 4
        assert "--token-file" in result.stderr
        result = refitd("pin", "exp~v000001", "--url", service.url, "--json")
        assert result.exit_code == 4
        assert msgspec.json.decode(result.stdout, type=Problem).slug == "unauthorized"

    def test_a_token_that_may_only_look_is_not_asked_for_again(self, service: StandIn) -> None:
        scope = "urn:refitd:problem:insufficient-scope"
        service.trouble = Problem(type=scope, title="No", status=403, detail="the token only opens what looks")
        result = refitd("pin", "exp~v000001", "--url", service.url, env={"REFITD_TOKEN": "read"})
        assert result.exit_code == 4
        assert "The token that was sent may only look" in result.stderr

    def test_a_token_comes_from_a_file_or_the_environment(self, service: StandIn, tmp_path: Path) -> None:
        service.token, service.versions = "secret", [make_version(1)]
        good, bad = tmp_path / "good", tmp_path / "bad"
        good.write_text("secret\n")
        bad.write_text("other\n")
        pin = ("pin", "exp~v000001", "--url", service.url)
        assert refitd(*pin, "--token-file", str(good)).exit_code == 0
        assert refitd(*pin, env={"REFITD_TOKEN": "secret"}).exit_code == 0
        assert refitd(*pin, env={"REFITD_TOKEN_FILE": str(good)}).exit_code == 0
        assert refitd(*pin, "--token-file", str(good), env={"REFITD_TOKEN": "other"}).exit_code == 0
        assert refitd(*pin, "--token-file", str(bad), env={"REFITD_TOKEN": "secret"}).exit_code == 4

    def test_a_token_file_that_cannot_be_read_is_named(self, service: StandIn, tmp_path: Path) -> None:
        result = refitd("pin", "exp~v000001", "--url", service.url, "--token-file", str(tmp_path / "none"))
        assert result.exit_code == 1
        assert str(tmp_path / "none") in result.stderr
        assert not service.asked
