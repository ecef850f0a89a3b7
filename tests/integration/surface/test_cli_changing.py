"""Commands that change something: pin, unpin, rollback, engines, reclaim; and what opens the door to them."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from refitd_client.contract.wire import Problem, Reclaimable, ReclaimPlan, Rollback, Version
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


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("pin exp~v000001", "PUT /v1/versions/exp~v000001/pin"),
        ("unpin exp~v000001", "DELETE /v1/versions/exp~v000001/pin"),
        ("engines add http://e:1 --id e --run exp", "POST /v1/engines"),
        ("engines remove a", "DELETE /v1/engines/a"),
        ("engines resync a", "POST /v1/engines/a/resync"),
        ("engines move a --run exp", "POST /v1/engines/move"),
        ("runs reopen exp", "POST /v1/runs"),
        ("log b --severity warning --limit 5", "GET /v1/log?subject=b&severity=warning&limit=5"),
    ],
)
def test_a_command_asks_the_service_for_what_it_says(service: StandIn, words: str, asked: str) -> None:
    service.versions, service.engines = [make_version(1)], [make_engine("a")]
    said = refitd(*words.split(), "--url", service.url)
    assert (said.exit_code, said.stderr) == (0, "")
    assert asked in service.asked


class TestRollback:
    def test_it_goes_where_it_was_said_to_go(self, service: StandIn) -> None:
        service.versions = [make_version(1), make_version(2)]
        result = refitd("rollback", "exp", "--yes", "--url", service.url)
        assert result.stdout == "exp rolls back to exp~v000001 (step 1). What is newer is barred for good.\n"
        wanted = answer("rollback", "exp", "--to", "exp~v000002", "--yes", "--url", service.url, kind=Version)
        assert wanted == service.versions[1]
        assert service.bodies == [Rollback(run="exp", to="exp~v000001"), Rollback(run="exp", to="exp~v000002")]

    @pytest.mark.parametrize(("said", "code", "posts"), [("y\n", 0, 1), ("n\n", 1, 0), ("\n", 1, 0)])
    def test_a_person_hears_first_where_it_goes_what_it_bars_and_how_to_get_forward_again(
        self, service: StandIn, monkeypatch: pytest.MonkeyPatch, said: str, code: int, posts: int
    ) -> None:
        service.versions = [make_version(step) for step in range(1, 6)]
        monkeypatch.setattr("refitd.cli.options.can_ask", lambda: True)
        result = refitd("rollback", "exp", "--url", service.url, stdin=said)
        assert (result.exit_code, len(service.bodies)) == (code, posts)
        before = result.stdout.partition("Roll back?")[0]
        assert "exp goes from exp~v000005 back to exp~v000001." in before
        assert "Barred for good: exp~v000005, exp~v000004, exp~v000003 and 1 more." in before
        assert "collection deletes their files" in before
        assert "To go forward again, publish anew" in before
        assert "'refitd publish --new-generation'" in " ".join(before.split())


class TestReclaim:
    def test_a_dry_run_only_looks_and_gives_the_reasons(self, service: StandIn) -> None:
        service.plan = PLAN
        result = refitd("reclaim", "--dry-run", "--url", service.url)
        assert "engine-0 serves it; it is pinned" in result.stdout
        assert "2.0 GB would be freed: 1 to delete, 1 to keep" in result.stdout
        assert service.asked == ["GET /v1/reclaim/plan"]

    @pytest.mark.parametrize(("said", "code", "posts"), [("y\n", 0, 1), ("n\n", 1, 0), ("\n", 1, 0)])
    def test_a_person_is_asked_first(
        self, service: StandIn, monkeypatch: pytest.MonkeyPatch, said: str, code: int, posts: int
    ) -> None:
        service.plan = PLAN
        monkeypatch.setattr("refitd.cli.options.can_ask", lambda: True)
        result = refitd("reclaim", "--url", service.url, stdin=said)
        assert result.exit_code == code
        assert sum(line.startswith("POST") for line in service.asked) == posts
        assert ("2.0 GB freed" in result.stdout) is (posts == 1)


class TestTokens:
    def test_without_the_token_it_ends_with_4_and_says_how_to_give_one(self, service: StandIn) -> None:
        service.token, service.versions = "secret", [make_version(1)]
        result = refitd("pin", "exp~v000001", "--url", service.url)
        assert result.exit_code == 4
        assert "--token-file" in result.stderr
        result = refitd("pin", "exp~v000001", "--url", service.url, "--json")
        assert result.exit_code == 4
        assert msgspec.json.decode(result.stdout, type=Problem).slug == "unauthorized"

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
