"""Commands about several trainings: runs, runs close, runs reopen, engines move."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from refitd_client.contract.states import Standing
from refitd_client.contract.wire import Page, RunChange, RunGlance
from support.command_line import answer, refitd
from support.stand_in_service import StandIn, make_engine, make_run, make_version, stand_in

CLOSED = [make_run(run=f"old-{n}", standing=Standing.CLOSED, target=None, engines={}, closed_at="t") for n in range(5)]


@pytest.fixture
def service() -> Iterator[StandIn]:
    with stand_in() as state:
        state.engines = [make_engine("engine-0"), make_engine("engine-1")]
        yield state


@pytest.fixture
def a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refitd.cli.options.can_ask", lambda: True)


class TestMove:
    @pytest.mark.usefixtures("a_person")
    def test_a_person_is_asked_about_what_an_open_run_would_lose(self, service: StandIn) -> None:
        args = ("engines", "move", "engine-0", "--run", "next", "--url", service.url)
        assert refitd(*args, stdin="n\n").exit_code == 1
        assert [body.insist for body in service.bodies] == [False]
        result = refitd(*args, stdin="y\n")
        assert "engine-0 follows exp, which is not closed" in result.stdout
        assert result.stdout.endswith("engine-0 follows next from now on.\n")
        assert [body.insist for body in service.bodies] == [False, False, True]


@pytest.mark.parametrize(
    "command",
    [
        ("engines", "move", "engine-0", "--run", "next"),
        ("runs", "close", "exp"),
        ("reclaim",),
        ("rollback", "exp"),
    ],
)
def test_every_command_that_asks_ends_with_2_where_there_is_no_terminal_to_ask_on(
    service: StandIn, command: tuple[str, ...]
) -> None:
    service.versions = [make_version(2), make_version(1)]
    for more, why in (((), "there is no terminal to ask on"), (("--json",), "with --json nothing is asked")):
        result = refitd(*command, *more, "--url", service.url)
        assert result.exit_code == 2, (command, more)
        assert f"{why}: say --yes" in result.stderr + result.stdout


class TestRuns:
    def test_runs_are_listed_with_how_they_stand(self, service: StandIn) -> None:
        lost = make_run(run="new", standing=Standing.UNFOLLOWED, headline="No engine follows this run.", engines={})
        lost = replace(lost, reasons=["'refitd engines move ID --run new' brings an engine here", "Step 1 is UNKNOWN"])
        service.runs = [make_run(), lost, CLOSED[0]]
        shown = refitd("runs", "--url", service.url).stdout
        rows = [line for line in shown.splitlines()[2:] if not line.startswith(" ")]
        assert [row.split()[0] for row in rows] == ["exp", "new", "old-0"]
        assert "UNFOLLOWED" in shown
        assert "'refitd engines move ID --run new'" in shown, "what to do"
        page = answer("runs", "--url", service.url, kind=Page[RunGlance])
        assert page.items == service.runs

    def test_nobody_is_asked_what_a_script_closes(self, service: StandIn) -> None:
        refused = refitd("runs", "close", "exp", "--url", service.url)
        assert refused.exit_code == 2
        assert "say --yes" in refused.stderr
        assert service.bodies == []
        said = refitd("runs", "close", "exp", "--yes", "--url", service.url).stdout
        assert said.startswith("exp is closed. 2 engines go on with what they serve:")
        assert "'refitd reclaim --dry-run' lists them" in said
        assert service.bodies == [RunChange(run="exp", closed=True)]

    @pytest.mark.usefixtures("a_person")
    def test_a_person_hears_what_closing_deletes_and_is_asked(self, service: StandIn) -> None:
        result = refitd("runs", "close", "exp", "--url", service.url, stdin="n\n")
        assert "Collection deletes the others" in " ".join(result.stdout.split())
        assert service.bodies == []


class TestDelete:
    ARGS = ("runs", "delete", "exp/old")

    @pytest.fixture(autouse=True)
    def old(self, service: StandIn) -> None:
        service.runs = [make_run(run="exp/old")]

    @pytest.mark.usefixtures("a_person")
    @pytest.mark.parametrize("typed", ["\n", "y\n", "exp\n"])
    def test_anything_but_the_name_of_the_run_deletes_nothing(self, service: StandIn, typed: str) -> None:
        result = refitd(*self.ARGS, "--url", service.url, stdin=typed)
        assert result.exit_code == 1
        assert "All versions of exp/old are deleted, for good." in result.stdout
        assert not [each for each in service.asked if each.startswith("DELETE")]

    @pytest.mark.usefixtures("a_person")
    def test_a_person_types_the_name_of_the_run(self, service: StandIn) -> None:
        result = refitd(*self.ARGS, "--url", service.url, stdin="exp/old\n")
        assert result.stdout.endswith("exp/old is deleted. 2 versions go; the files go in the background.\n")

    def test_a_script_says_yes(self, service: StandIn) -> None:
        refused = refitd(*self.ARGS, "--url", service.url)
        assert refused.exit_code == 2
        assert "this deletes all versions of the run, for good; there is no terminal to ask on: say --yes" in (
            refused.stderr
        )
        assert answer(*self.ARGS, "--yes", "--url", service.url) == {"run": "exp/old", "versions": 2}
        assert "a publisher holds run exp/old" in refitd(*self.ARGS, "--yes", "--url", service.url).stderr
