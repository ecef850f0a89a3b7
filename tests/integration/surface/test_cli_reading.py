"""Commands that only look: status, versions, engines, explain."""

import re
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from refitd.cli import render
from refitd.cli.status import StatusSummary
from refitd.cli.versions import version_list
from refitd_client.contract.states import EngineState, Kind, Standing, VersionState
from refitd_client.contract.wire import Attempt, Engine, Explanation, Faults, Page, Problem, Version
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

    def test_a_version_that_was_rolled_back_from_is_no_target(self, service: StandIn) -> None:
        service.versions = [make_version(5, barred=True), make_version(2)]
        service.engines = [make_engine()]
        summary = answer("status", "--url", service.url, kind=StatusSummary)
        assert [(run.run, run.target.step, run.in_sync, run.engines) for run in summary.runs] == [("exp", 2, 1, 1)]

    def test_what_engines_serve_from_memory_alone_is_the_target_and_says_so(self, service: StandIn) -> None:
        service.versions = [make_version(5, state=VersionState.ANNOUNCED, in_memory=True), make_version(2)]
        service.engines = [make_engine("a", version="exp~v000005", step=5, in_memory=True)]
        shown = refitd("status", "--url", service.url).stdout
        assert "exp → step 5 (exp~v000005), served by 1 of 1 engines, in memory alone" in shown
        assert line_with(shown, "12:00:00Z")[2:6] == ["full", "arriving", "in", "memory"]
        assert line_with(refitd("engines", "--url", service.url).stdout, "in sync")[3:7] == [
            "in",
            "sync",
            "in",
            "memory",
        ]

    def test_a_pause_is_seen_and_what_ends_it(self, service: StandIn) -> None:
        service.versions, service.engines = [make_version(2)], [make_engine()]
        one = {EngineState.IN_SYNC: 1}
        service.runs = [make_run(paused_since="2026-11-21T12:00:00Z", engines=one, in_sync=1)]
        shown = refitd("status", "--url", service.url).stdout
        assert "served by 1 of 1 engines, paused since 2026-11-21T12:00:00Z: refitd resume exp" in shown
        summary = answer("status", "--url", service.url, kind=StatusSummary)
        assert [run.paused_since for run in summary.runs] == ["2026-11-21T12:00:00Z"]

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
        summary = answer("status", "--url", service.url, kind=StatusSummary)
        assert summary.standing is Standing.TROUBLED
        assert [(run.standing, run.reasons) for run in summary.runs] == [
            (Standing.CURRENT, []),
            (Standing.TROUBLED, ["gpu-1 is UNREACHABLE"]),
        ]

    def test_what_is_wrong_with_the_service_itself_is_trouble_and_a_rollback_as_ordered_is_none(
        self, service: StandIn
    ) -> None:
        service.versions, service.runs = [make_version(2)], [make_run(standing=Standing.ROLLED_BACK)]
        assert "is ready, ◀ ROLLED_BACK" in refitd("status", "--url", service.url).stdout
        service.faults = Faults(root="the root is gone")
        assert "is ready, ▲ TROUBLED" in refitd("status", "--url", service.url).stdout

    def test_an_engine_that_does_not_answer_says_since_when(self, service: StandIn) -> None:
        away = make_engine(state=EngineState.UNREACHABLE, reason="no", unreachable_since="2026-11-22T02:14:03.500Z")
        assert render.why_there(away, "2026-11-22T02:17:04.000Z") == "since 02:14Z (3 min): no"
        named = replace(away, reason=f"{away.url} cannot be reached: connection refused")
        assert render.why_there(named, None) == "since 02:14Z: connection refused"
        service.engines = [away]
        assert "since 02:14Z (" in refitd("status", "--url", service.url).stdout

    def test_before_anything_is_published_engines_serve_what_they_were_started_with(self, service: StandIn) -> None:
        service.engines = [make_engine(version=None, step=None)]
        shown = refitd("status", "--url", service.url).stdout
        assert line_with(shown, "in sync")[3:] == [
            "in",
            "sync",
            "start-up",
            "-",
            *["no", "version", "to", "serve", "yet"],
        ]

    def test_a_run_without_a_good_version_is_named(self, service: StandIn) -> None:
        service.versions = [make_version(1, state=VersionState.REJECTED, reason="shape of w")]
        service.runs = [make_run(target=None, headline="No good version yet.")]
        result = refitd("status", "--url", service.url)
        assert "exp: No good version yet" in result.stdout
        assert "shape of w" in result.stdout

    def test_what_came_last_stands_first_whatever_its_generation_and_what_is_deleted_is_left_out(
        self, service: StandIn
    ) -> None:
        rejected = make_version(31, state=VersionState.REJECTED, reason="NaN in w", created_at="2026-11-21T13:00:00Z")
        deleted = make_version(9, generation=4, state=VersionState.DELETED, created_at="2026-11-21T14:00:00Z")
        served = [make_version(step, generation=3) for step in (1, 2, 3)]
        service.versions = [deleted, *served, rejected]
        summary = answer("status", "--limit", "3", "--url", service.url, kind=StatusSummary)
        assert [version.id for version in summary.versions] == ["exp~v000031", "exp~v000003.g3", "exp~v000002.g3"]

    def test_versions_that_were_found_in_one_second_stand_by_step(self, service: StandIn) -> None:
        found = {52: "16:27:33.204", 51: "16:27:33.197", 53: "16:27:33.155"}
        service.versions = [make_version(step, created_at=f"2026-11-27T{at}Z") for step, at in found.items()]
        summary = answer("status", "--url", service.url, kind=StatusSummary)
        assert [version.step for version in summary.versions] == [53, 52, 51]

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

    def test_a_long_reason_is_one_line_that_fills_the_window_and_the_rest_is_named_once(self, service: StandIn) -> None:
        first = "tensor lm_head.weight in model.safetensors has 1 non-finite value, the first at flat index 0"
        nan = f"{first}; tensor w has another; and 24 more tensors: the trainer has diverged or wrote damage"
        service.versions = [make_version(step, state=VersionState.REJECTED, reason=nan) for step in (6, 7)]
        for command in ("status", "versions"):
            shown = refitd(command, "--url", service.url, env={"COLUMNS": "80"}).stdout
            *_, row, beneath, rest = shown.splitlines()
            assert row.startswith("exp~v000006")
            assert beneath.startswith("    tensor lm_head.weight in model.safetensors has 1 non-finite value")
            assert (len(beneath), beneath.endswith("…")) == (80, True)
            assert rest == "Where a reason ends in '…', 'refitd explain VERSION' has all of it."
            assert shown.count(rest) == 1
            wide = refitd(command, "--url", service.url, env={"COLUMNS": "150"}).stdout
            assert f"    {first}; tensor w has another…\n{rest}\n" in wide
            assert f"    {first}…\n{rest}\n" in refitd(command, "--url", service.url, env={"COLUMNS": "115"}).stdout
            assert f"    {nan}\n" in refitd(command, "--url", service.url, env={"COLUMNS": "200"}).stdout
            piped = refitd(command, "--url", service.url).stdout
            assert (piped.count(nan), rest in piped) == (2, False)
        summary = answer("status", "--url", service.url, kind=StatusSummary)
        assert [version.reason for version in summary.versions] == [nan, nan]
        assert [each.reason for each in answer("versions", "--url", service.url, kind=Page[Version]).items] == [nan] * 2

    def test_what_was_rolled_back_from_says_so_where_others_have_a_reason(self, service: StandIn) -> None:
        service.versions = [make_version(5, barred=True), make_version(4, barred=True, reason="the canary failed")]
        service.versions.append(make_version(3, barred=True, state=VersionState.REJECTED, reason="NaN in w"))
        shown = refitd("status", "--url", service.url).stdout
        assert "barred" not in " ".join(line_with(shown, "exp~v000003")), "no engine ever served it"
        assert line_with(shown, "exp~v000003")[-3:] == ["NaN", "in", "w"]
        assert line_with(shown, "exp~v000005")[-4:] == ["barred:", "rolled", "back", "from"]
        assert line_with(shown, "exp~v000004")[-4:] == ["barred:", "the", "canary", "failed"]

    def test_what_is_wrong_with_the_service_itself_is_said(self, service: StandIn) -> None:
        service.ready, service.faults = False, Faults(root="the root is gone", engines="engines.yaml is no YAML")
        result = refitd("status", "--url", service.url)
        assert result.stdout.splitlines()[1:3] == ["the root is gone", "engines.yaml is no YAML"]
        assert result.exit_code == 3

    def test_what_closed_runs_left_behind_stands_below_what_is_served(self, service: StandIn) -> None:
        unread = [
            make_version(step, run="old", state=VersionState.UNKNOWN, created_at=f"2026-11-22T12:00:0{step}Z")
            for step in range(6)
        ]
        service.versions = [make_version(2), *unread]
        service.runs = [make_run(), make_run(run="old", standing=Standing.CLOSED, target=None, closed_at="t")]
        summary = answer("status", "--url", service.url, kind=StatusSummary)
        assert [version.id for version in summary.versions][:2] == ["exp~v000002", "old~v000005"]
        assert len(summary.versions) == 5

    def test_what_is_over_the_disk_budget_and_what_is_not_taken_in_is_said(self, service: StandIn) -> None:
        service.faults = Faults(disk="over the disk budget", folders="3 folders are not taken in yet")
        shown = refitd("status", "--url", service.url).stdout
        assert shown.splitlines()[1:3] == ["over the disk budget", "3 folders are not taken in yet"]
        assert "▲ TROUBLED" in shown
        top = refitd("top", "--once", "--url", service.url).stdout
        assert top.splitlines()[1:3] == ["▲ over the disk budget", "▲ 3 folders are not taken in yet"]

    def test_what_is_barred_does_not_look_good(self) -> None:
        assert render.version_state(make_version(1)).style == "green"
        assert render.version_state(make_version(1, barred=True)).style == "dim"
        assert render.version_state(make_version(1, barred=True, state=VersionState.LOST)).style == "bold red"

    def test_an_empty_service_says_so(self, service: StandIn) -> None:
        result = refitd("status", "--url", service.url)
        assert result.exit_code == 0
        assert "No engines." in result.stdout
        assert "No versions." in result.stdout

    def test_a_service_that_is_not_ready_is_shown_and_ends_with_3(self, service: StandIn) -> None:
        service.ready = False
        result = refitd("status", "--url", service.url)
        assert result.exit_code == 3
        assert "not ready" in result.stdout


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

    def test_engines_are_counted_that_serve_the_very_version_as_the_api_says_whatever_their_state(
        self, service: StandIn
    ) -> None:
        """Its step may have been published again; what engines hold while updates are paused, they serve."""
        again, first = "exp~v000002.g2", "exp~v000002"
        held = [
            make_engine("a", version=again),
            make_engine("b", version=again, state=EngineState.BEHIND),
            make_engine("c", version=again, state=EngineState.UNREACHABLE),
            make_engine("d", version=again, state=EngineState.TAINTED, known=False),
        ]
        service.versions = [
            make_version(2, generation=2, engines=[on_version(engine, again) for engine in held]),
            make_version(2, barred=True, engines=[on_version(engine, first) for engine in held]),
        ]
        lines = refitd("versions", "--url", service.url).stdout.splitlines()
        assert [(line.split()[0], "3/4" in line, "0/4" in line) for line in lines[2:4]] == [
            (again, True, False),
            (first, False, True),
        ]

    def test_filters_are_handed_on_whatever_their_case(self, service: StandIn) -> None:
        refitd("versions", "--url", service.url, "--run", "a/b", "--state", "rejected", "--limit", "3", "--cursor", "6")
        assert service.asked[0] == "GET /v1/versions?run=a%2Fb&state=REJECTED&limit=3&cursor=6"

    def test_the_run_may_be_named_without_its_option(self, service: StandIn) -> None:
        refitd("versions", "a/b", "--url", service.url)
        refitd("versions", "a/b", "--run", "a/b", "--url", service.url)
        assert service.asked.count("GET /v1/versions?run=a%2Fb&limit=20") == 2
        two = refitd("versions", "a/b", "--run", "c", "--url", service.url)
        assert (two.exit_code, "of which run, a/b or c? Name one" in two.stderr) == (2, True)

    def test_the_rest_of_the_list_is_pointed_to(self, service: StandIn) -> None:
        service.versions = [make_version(step) for step in range(3)]
        result = refitd("versions", "--url", service.url, "--limit", "2")
        assert result.stderr == "there are more: --limit N, or --cursor 2\n"
        page = answer("versions", "--url", service.url, "--limit", "2", "--cursor", "2", kind=Page[Version])
        assert [version.step for version in page.items] == [0]

    def test_json_is_the_services_own_document(self, service: StandIn) -> None:
        service.versions = [make_version(1)]
        assert answer("versions", "--url", service.url, kind=Page[Version]) == Page(items=service.versions)

    def test_a_pipe_gets_whole_lines(self, service: StandIn) -> None:
        reason = "tensor " + "x" * 300 + " is missing"
        service.versions = [make_version(1, state=VersionState.REJECTED, reason=reason)]
        assert reason in refitd("versions", "--url", service.url).stdout

    def test_what_others_wrote_cannot_steer_the_terminal(self, service: StandIn) -> None:
        service.versions = [make_version(1, reason="\x1b]0;owned\x07[red]tensor[/red]")]
        output = refitd("versions", "--url", service.url, env={"FORCE_COLOR": "1"}).stdout
        assert "\x1b]" not in output
        assert "[red]tensor[/red]" in output

    def test_no_color_is_obeyed(self, service: StandIn) -> None:
        service.versions = [make_version(1)]
        green = "\x1b[32m"
        assert green in refitd("versions", "--url", service.url, env={"FORCE_COLOR": "1"}).stdout
        both = {"FORCE_COLOR": "1", "NO_COLOR": "1"}
        assert green not in refitd("versions", "--url", service.url, env=both).stdout
        assert "\x1b" not in refitd("versions", "--url", service.url).stdout


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

    def test_a_version_says_its_kind_and_where_there_is_no_room_only_if_one_is_not_full(self) -> None:
        full = make_version(21, run="exp/trial", pinned=True, bytes=999_900_000, engines=[on_version(make_engine())])
        delta = replace(full, id="exp~trial~v000022", kind=Kind.DELTA)
        adapter = replace(full, id="exp~trial~v000023", kind=Kind.LORA)
        title, _, *rows = self.shown(adapter, delta, full, width=90)
        assert [line.split()[2] for line in (title, *rows)] == ["KIND", "lora", "delta", "full"]
        assert "KIND" in self.shown(full, width=84)[0]
        narrow = self.shown(full, width=74)
        assert narrow[0].split()[2] == "STATE"
        assert max(map(len, narrow)) <= 74
        assert "KIND" in self.shown(full, delta, width=74)[0]

    def test_a_row_that_is_wider_still_breaks_no_word(self) -> None:
        long = make_version(21, run="a-run-with-quite-a-long-name/and-a-trial", pinned=True, barred=True)
        lines = self.shown(long)
        assert long.id in lines[2]
        assert " ".join(lines[2:]).split()[1:6] == ["21", "good", "pinned", "barred", "3.1"]
        assert lines[-1] == "    barred: rolled back from"

    def test_lines_are_not_filled_up(self) -> None:
        bad = make_version(21, state=VersionState.REJECTED, reason=self.LONG)
        assert all(line == line.rstrip() for line in self.shown(bad, make_version(20), width=1000))
        engines = [make_engine("a", reason=self.LONG), make_engine("b", reason="short")]
        assert all(line == line.rstrip() for line in as_text(render.engines_table(engines, {}), 1000).splitlines())


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
        assert result.stdout == refitd("engines", "list", "--url", service.url).stdout

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
        chosen = answer("engines", "list", "--run", "other", "--url", service.url, kind=Page[Engine])
        assert [each.id for each in chosen.items] == ["e052"]
        glance = refitd("status", "--url", service.url).stdout
        assert "and 36 more (36 in sync): 'refitd engines' lists them" in glance
        assert glance.index("e041") < glance.index("e052") < glance.index("e000")

    def test_an_address_is_not_said_twice(self, service: StandIn) -> None:
        service.engines = [make_engine("127.0.0.1:30000")]
        service.versions = [make_version(2)]
        shown = refitd("engines", "--url", service.url).stdout
        assert line_with(shown, "127.0.0.1") == ["127.0.0.1:30000", "exp", "in", "sync", "2", "0", "-"]
        service.engines.append(make_engine("b"))
        shown = refitd("engines", "--url", service.url).stdout
        assert line_with(shown, "127.0.0.1:30000 ")[:3] == ["127.0.0.1:30000", "-", "exp"]
        assert line_with(shown, "b ")[:2] == ["b", "http://127.0.0.1:30000"]

    def test_json_is_the_services_own_document(self, service: StandIn) -> None:
        service.engines = [make_engine()]
        assert answer("engines", "--url", service.url, kind=Page[Engine]) == Page(items=service.engines)
        assert answer("engines", "list", "--url", service.url, kind=Page[Engine]) == Page(items=service.engines)


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

    def test_a_url_that_is_none_is_wrong_usage(self) -> None:
        result = refitd("status", "--url", "ftp://x")
        assert result.exit_code == 2
        assert "ftp://x" in result.stderr

    def test_the_environment_says_where_the_service_is(self, service: StandIn) -> None:
        assert refitd("status", env={"REFITD_URL": service.url}).exit_code == 0


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999949, "999.9 kB"),
        (999950, "1.0 MB"),
        (3087467144, "3.1 GB"),
        (10**18, "1000.0 PB"),
    ],
)
def test_sizes(count: int | None, text: str) -> None:
    assert render.size(count) == text


def test_steps_of_different_generations_and_runs_are_not_subtracted() -> None:
    assert render.steps_behind(make_engine(version="old~v000009", step=9), make_version(3).id) == "other run"
    target = make_version(3, generation=2).id
    assert render.steps_behind(make_engine(version="exp~v000009", step=9), target) == "other generation"
    assert render.steps_behind(make_engine(), None) == "-"


def test_an_engine_that_missed_a_rollback_is_ahead() -> None:
    assert render.steps_behind(make_engine(version="exp~v000009", step=9), make_version(7).id) == "2 ahead"


def test_what_nobody_vouches_for_is_not_called_start_up_weights() -> None:
    assert (
        render.steps_behind(
            make_engine(state=EngineState.TAINTED, version=None, step=None, known=False), make_version(3).id
        )
        == "unknown contents"
    )
    away = make_engine(state=EngineState.UNREACHABLE, version=None, step=None)  # and what it holds is no secret
    assert render.steps_behind(away, make_version(3).id) == "-"
    assert render.steps_behind(replace(away, known=False), make_version(3).id) == "unknown contents"
    assert (
        render.steps_behind(make_engine(state=EngineState.BEHIND, version=None, step=None), make_version(3).id)
        == "start-up weights"
    )


def test_a_run_that_nobody_knows_has_no_versions_and_is_no_success(service: StandIn) -> None:
    service.runs, service.versions = [make_run(run="exp")], []
    for more in ((), ("--json",)):
        result = refitd("versions", "--run", "none", *more, "--url", service.url)
        assert result.exit_code == 1
        assert "no run none is known: 'refitd runs' lists what there is" in result.stderr + result.stdout
    known = refitd("versions", "--run", "exp", "--url", service.url)
    assert (known.exit_code, known.stdout) == (0, "No versions.\n")
    assert refitd("versions", "--url", service.url).stdout == "No versions.\n"


@pytest.mark.parametrize("state", list(VersionState))
def test_each_state_of_a_version_can_be_shown(state: VersionState) -> None:
    assert state.glance in as_text(version_list([make_version(1, state=state)], None)[0])


@pytest.mark.parametrize("state", list(EngineState))
def test_each_state_of_an_engine_can_be_shown(state: EngineState) -> None:
    assert state.glance in as_text(render.engines_table([make_engine(state=state)], {}))


def test_engines_and_top_say_the_same_of_an_engine_in_the_same_words(service: StandIn) -> None:
    service.versions = [make_version(4200)]
    load = Attempt(engine="late", version="exp~v004198", started_at="", outcome="ACK", timings={"load": 41.0})
    service.engines = [
        make_engine(
            "late",
            step=4198,
            last_attempt=load,
            server="vLLM",
            server_version="0.32.0",
            plugin="0.1.0",
            through_loader="a cast",
            loads_whole=True,
        ),
        make_engine("new", state=EngineState.BEHIND, version=None, step=None),
        make_engine("ahead", version="exp~v004300", step=4300),
        make_engine("lost", state=EngineState.TAINTED, version=None, step=None, known=False, paused=True),
        make_engine("moved", version="old~v000009", step=9, run="exp"),
    ]
    tables: list[dict[str, dict[str, str]]] = []
    for words in (("engines",), ("top", "--once"), ("status",)):
        lines = refitd(*words, "--url", service.url).stdout.splitlines()
        start = next(number for number, line in enumerate(lines) if line.startswith("ENGINE "))
        head = {title: lines[start].index(title) for title in lines[start].split()}
        cut = [re.split(r" {2,}", line.strip()) for line in lines[start + 2 : start + 7]]
        assert all(len(row) >= len(head) - 1 for row in cut), head
        tables.append({row[0]: dict(zip(head, row, strict=False)) for row in cut})
    listed, live, glance = tables
    shared = {"ENGINE", "STATE", "STEP", "BEHIND", "SERVER", "LOADS"}
    assert {name: {title: row[title] for title in shared} for name, row in listed.items()} == {
        name: {title: row[title] for title in shared} for name, row in live.items()
    }
    assert glance == listed
    assert {name: row["BEHIND"] for name, row in live.items()} == {
        "late": "2", "new": "start-up weights", "ahead": "100 ahead", "lost": "unknown contents", "moved": "other run",
    }  # fmt: skip
    assert live["late"]["TOOK"] == "41 ms"
    assert live["lost"]["STATE"] == "troubled paused"
    assert live["late"]["LOADS"] == listed["late"]["LOADS"] == "loader"


def test_in_a_narrow_window_a_table_has_whole_titles(service: StandIn) -> None:
    service.versions = [make_version(5, run="a-long-run/name-of-it")]
    title, line, *_ = refitd("versions", "--url", service.url, env={"COLUMNS": "80"}).stdout.splitlines()
    assert title.split() == ["VERSION", "STEP", "STATE", "SIZE", "ENGINES", "SEEN"]
    assert len(line) == len(title)
    wide, *_ = refitd("versions", "--url", service.url, env={"COLUMNS": "120"}).stdout.splitlines()
    assert wide.endswith("  WHY")
