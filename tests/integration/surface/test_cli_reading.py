"""Commands that only look: status, versions, engines, explain."""

from collections.abc import Iterator

import msgspec
import pytest
from rich.console import Console

from refitd.cli import render
from refitd.cli.render import version_list
from refitd_client.contract.states import EngineState, Standing, VersionState
from refitd_client.contract.wire import Engine, Explanation, Faults, Page, Problem, Version
from support.command_line import answer, refitd
from support.stand_in_service import StandIn, make_engine, make_run, make_version, on_version, stand_in


@pytest.fixture
def service() -> Iterator[StandIn]:
    with stand_in() as state:
        yield state


def as_text(shown: object, width: int = 300) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def line_with(output: str, word: str) -> list[str]:
    return next(line for line in output.splitlines() if word in line).split()


class TestStatus:
    def test_it_says_how_stale_each_engine_is_and_why(self, service: StandIn) -> None:
        service.versions = [make_version(5), make_version(2)]
        service.engines = [
            make_engine("fresh", version="exp~v000005", step=5),
            make_engine("late", state=EngineState.NACKED, reason="400 Bad Request"),
            make_engine("new", state=EngineState.BEHIND, version=None, step=None),
        ]
        result = refitd("status", "--url", service.url)
        assert result.exit_code == 0
        assert "is ready" in result.stdout
        assert "exp → step 5 (exp~v000005), served by 1 of 3 engines" in result.stdout
        assert line_with(result.stdout, "late")[3:] == ["troubled", "2", "3", "NACKED:", "400", "Bad", "Request"]
        assert line_with(result.stdout, "fresh")[3:7] == ["in", "sync", "5", "0"]
        assert "start-up weights" in result.stdout

    def test_a_pause_is_seen_and_what_ends_it(self, service: StandIn) -> None:
        service.versions, service.engines = [make_version(2)], [make_engine()]
        one = {EngineState.IN_SYNC: 1}
        service.runs = [make_run(paused_since="2026-11-21T12:00:00Z", engines=one, in_sync=1)]
        shown = refitd("status", "--url", service.url).stdout
        assert "served by 1 of 1 engines, paused since 2026-11-21T12:00:00Z: refitd resume exp" in shown

    def test_it_gives_the_verdict_of_each_run_and_that_of_the_worst(self, service: StandIn) -> None:
        service.versions = [make_version(2), make_version(2, run="other")]
        service.engines = [make_engine(), make_engine("b", run="other", version="other~v000002")]
        trouble = {"standing": Standing.TROUBLED, "headline": "1 of 2.", "reasons": ["gpu-1 is UNREACHABLE"]}
        service.runs = [make_run(), make_run(run="other", **trouble)]
        lines = refitd("status", "--url", service.url).stdout.splitlines()
        assert lines[0].endswith(" is ready, ▲ TROUBLED")
        assert lines[1].startswith("● CURRENT exp → step 2")
        assert lines[2].startswith("▲ TROUBLED other → step 2")
        assert lines[3] == "    gpu-1 is UNREACHABLE"
        told = answer("status", "--url", service.url)
        assert (told["standing"], [run["standing"] for run in told["runs"]]) == ("TROUBLED", ["CURRENT", "TROUBLED"])

    def test_it_says_once_why_a_version_was_rejected(self, service: StandIn) -> None:
        nan = "tensor w has 1 non-finite value"
        service.versions = [make_version(6, state=VersionState.REJECTED, reason=nan), make_version(5)]
        service.versions.append(make_version(4, state=VersionState.REJECTED, reason="shape of w"))
        service.runs = [make_run(target="exp~v000005", reasons=[f"Step 6 is REJECTED: {nan}"])]
        shown = refitd("status", "--url", service.url).stdout
        assert shown.count(nan) == 1
        narrow = refitd("status", "--url", service.url, env={"COLUMNS": "40"}).stdout
        assert "    Step 6 is REJECTED: tensor w has 1\n    non-finite value\n" in narrow
        assert line_with(shown, "exp~v000006")[-3:] == ["'refitd", "explain", "exp~v000006'"]
        assert "shape of w" in shown
        assert nan in refitd("versions", "--url", service.url).stdout

    def test_what_is_wrong_with_the_service_itself_is_said(self, service: StandIn) -> None:
        service.ready, service.faults = False, Faults(root="the root is gone", engines="engines.yaml is no YAML")
        result = refitd("status", "--url", service.url)
        assert result.stdout.splitlines()[1:3] == ["the root is gone", "engines.yaml is no YAML"]
        assert result.exit_code == 3


class TestVersions:
    def test_newest_first_with_state_size_and_reason(self, service: StandIn) -> None:
        service.versions = [
            make_version(1, state=VersionState.REJECTED, reason="missing tensor lm_head.weight"),
            make_version(2, pinned=True, engines=[on_version(make_engine()), on_version(make_engine("b", step=1))]),
        ]
        lines = refitd("versions", "--url", service.url).stdout.splitlines()
        assert lines[2].split() == [
            "exp~v000002",
            "2",
            "full",
            "good",
            "pinned",
            "3.1",
            "GB",
            "1/2",
            "11-21",
            "12:00:00Z",
            "-",
        ]
        assert lines[3].endswith("missing tensor lm_head.weight")

    def test_json_is_the_services_own_document(self, service: StandIn) -> None:
        service.versions = [make_version(1)]
        assert answer("versions", "--url", service.url, kind=Page[Version]) == Page(items=service.versions)

    def test_what_others_wrote_cannot_steer_the_terminal(self, service: StandIn) -> None:
        service.versions = [make_version(1, reason="\x1b]0;owned\x07[red]tensor[/red]")]
        output = refitd("versions", "--url", service.url, env={"FORCE_COLOR": "1"}).stdout
        assert "\x1b]" not in output
        assert "[red]tensor[/red]" in output


class TestEightyColumns:
    """What a terminal has by default."""

    LONG = "tensor model.layers.3.mlp.up_proj.weight in model.safetensors has 1 non-finite value (NaN or infinity)"

    def shown(self, *versions: Version, width: int = 80) -> list[str]:
        return "".join(as_text(part, width) for part in version_list(versions, width)).splitlines()

    def test_an_id_is_whole_and_a_long_reason_is_a_line_beneath_its_row(self) -> None:
        bad = make_version(21, run="exp/trial", state=VersionState.REJECTED, reason=self.LONG)
        lines = self.shown(bad, make_version(20, run="exp/trial", reason="short"))
        assert max(map(len, lines)) <= 80
        row = ["exp~trial~v000021", "21", "full", "rejected", "3.1", "GB", "-", "11-21", "12:00:00Z"]
        assert lines[2].split() == row
        assert lines[3] == f"    {self.LONG[:75]}…"
        assert lines[4].endswith("11-21 12:00:00Z  short")
        assert lines[5:] == ["Where a reason ends in '…', 'refitd explain VERSION' has all of it."]


class TestEngines:
    def test_a_list_is_what_one_gets_without_a_verb(self, service: StandIn) -> None:
        service.engines = [make_engine(state=EngineState.QUARANTINED, paused=True, reason="restart it")]
        service.versions = [make_version(2)]
        result = refitd("engines", "--url", service.url)
        assert line_with(result.stdout, "engine-0")[3:] == [
            "troubled",
            "paused",
            "2",
            "0",
            "QUARANTINED:",
            "restart",
            "it",
        ]

    def test_of_many_those_that_need_an_operator_come_first_and_some_can_be_chosen(self, service: StandIn) -> None:
        service.engines = [make_engine(f"e{number:03d}") for number in range(60)]
        service.engines[41] = make_engine("e041", state=EngineState.TAINTED, reason="half a load")
        service.engines[52] = make_engine("e052", state=EngineState.UPDATING, run="other")
        service.versions = [make_version(2)]
        names = [line.split()[0] for line in refitd("engines", "--url", service.url).stdout.splitlines()]
        listed = [name for name in names if name.startswith("e")]  # and not the table's head
        assert listed[:4] == ["e041", "e052", "e000", "e001"]
        chosen = answer("engines", "--state", "tainted", "--url", service.url, kind=Page[Engine])
        assert [each.id for each in chosen.items] == ["e041"]
        chosen = answer("engines", "--run", "other", "--url", service.url, kind=Page[Engine])
        assert [each.id for each in chosen.items] == ["e052"]
        glance = refitd("status", "--url", service.url).stdout
        assert "and 36 more (36 in sync): 'refitd engines' lists them" in glance
        assert glance.index("e041") < glance.index("e052") < glance.index("e000")


class TestExplain:
    def test_sentences_come_one_a_line(self, service: StandIn) -> None:
        service.sentences = ["It is SEALED.", "Engine [b] serves it."]
        assert refitd("explain", "exp~v000001", "--url", service.url).stdout == "It is SEALED.\nEngine [b] serves it.\n"
        explained = answer("explain", "exp~v000001", "--url", service.url, kind=Explanation)
        assert explained == Explanation(id="exp~v000001", sentences=service.sentences)


class TestFailures:
    def test_nobody_there_ends_with_3_and_says_what_to_try(self) -> None:
        result = refitd("versions", "--url", "http://127.0.0.1:1")
        assert result.exit_code == 3
        assert result.stdout == ""
        assert "http://127.0.0.1:1/v1/versions got no answer" in result.stderr
        assert "--url" in result.stderr

    def test_a_problem_is_one_json_document_on_stdout(self, service: StandIn) -> None:
        service.trouble = Problem(type="urn:refitd:problem:disk-full", title="Full", status=507, detail="no room")
        result = refitd("versions", "--url", service.url, "--json")
        assert result.exit_code == 1
        assert result.stderr == ""
        assert msgspec.json.decode(result.stdout, type=Problem) == service.trouble


@pytest.mark.parametrize("state", list(VersionState))
def test_each_state_of_a_version_can_be_shown(state: VersionState) -> None:
    assert state.glance in as_text(version_list([make_version(1, state=state)], None)[0])


@pytest.mark.parametrize("state", list(EngineState))
def test_each_state_of_an_engine_can_be_shown(state: EngineState) -> None:
    assert state.glance in as_text(render.engines_table([make_engine(state=state)], {}))
