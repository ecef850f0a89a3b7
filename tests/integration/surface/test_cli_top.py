"""`refitd top`: the same facts as the dashboard, in any terminal."""

from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from refitd.cli.render import span
from refitd.cli.top import BAR, STAGES, Glance, bar, screen, took
from refitd_client.contract.states import EngineState, Standing, UpdateState, VersionState
from refitd_client.contract.wire import Attempt, Event, Faults, Overview
from support.command_line import answer, refitd
from support.stand_in_service import StandIn, make_engine, make_overview, make_run, make_version, on_version, stand_in

TIMINGS = {"publish": 100.0, "validate": 100.0, "load": 200.0}


@pytest.fixture(scope="module")
def service() -> Iterator[StandIn]:
    with stand_in() as state:
        load = Attempt(engine="gpu-1", version="exp~v000002", started_at="", outcome="ACK", timings={"load": 1234.0})
        state.engines = [
            make_engine("gpu-0", behind=0),
            make_engine("gpu-1", state=EngineState.UNREACHABLE, behind=1, reason="timed out", last_attempt=load),
        ]
        state.versions = [make_version(2, timings=TIMINGS)]
        trouble = {"standing": Standing.TROUBLED, "headline": "1 of 2.", "reasons": ["gpu-1 is UNREACHABLE"]}
        state.runs = [make_run(target="exp~v000003", **trouble)]
        state.events = [
            Event(seq=1, at="2026-11-21T12:00:00.5Z", kind="version", subject="exp~v000002", text="served\x1b[2J")
        ]
        yield state


def drawn(glance: Glance, height: int | None = None, width: int = 100) -> str:
    out = StringIO()
    Console(file=out, width=width, color_system=None).print(screen(glance, height, width))
    return out.getvalue()


def many(engines: int) -> Glance:
    state = StandIn()
    state.engines = [make_engine(f"gpu-{number:03d}", behind=0) for number in range(engines)]
    state.engines[-1] = make_engine("zebra", state=EngineState.TAINTED)
    state.runs = [make_run()]
    event = Event(seq=1, at="2026-11-21T12:00:00Z", kind="engine", subject="gpu-0", text="IN_SYNC")
    return Glance(
        url="http://x",
        overview=make_overview(state),
        versions=[make_version(step, timings=TIMINGS) for step in range(50)],
        events=[event] * 50,
    )


def test_one_look_answers_in_its_first_lines_and_names_whom_somebody_has_to_see_to(service: StandIn) -> None:
    result = refitd("top", "--once", "--url", service.url)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[1].startswith("▲ TROUBLED exp: 1 of 2.")
    assert lines[2].strip() == "gpu-1 is UNREACHABLE"
    first = next(line for line in lines if line.startswith("gpu-"))
    assert first.split()[:5] == ["gpu-1", "away", "2", "1", "1.23"]
    assert any("p" * 8 + "v" * 8 + "l" * 16 in line for line in lines)
    assert "served" in lines[-1]
    assert "in capitals the engine stands still" in result.stdout
    assert "\x1b" not in result.stdout


def test_into_a_pipe_it_looks_once(service: StandIn) -> None:
    assert refitd("top", "--url", service.url).exit_code == 0


def test_json_is_the_overview(service: StandIn) -> None:
    assert answer("top", "--url", service.url, kind=Overview).runs[0].headline == "1 of 2."


def test_nobody_there_ends_with_3() -> None:
    assert refitd("top", "--once", "--url", "http://127.0.0.1:9").exit_code == 3


@pytest.mark.parametrize("height", [12, 24, 50, 200])
def test_it_fits_into_the_terminal_and_shows_trouble_first(height: int) -> None:
    shown = drawn(many(200), height)
    assert len(shown.splitlines()) <= height
    assert "zebra" in shown
    assert "more" in shown or height == 200


@pytest.mark.parametrize("width", [40, 80, 200])
def test_what_to_do_is_told_to_its_end_however_narrow_the_terminal_is(width: int) -> None:
    remedy = "stop the other writer (another refitd with this engine, or a trainer), then 'refitd engines resync gpu-1'"
    state = StandIn()
    state.engines = [make_engine("gpu-1", state=EngineState.CONTESTED, reason=remedy)]
    state.runs = [make_run(standing=Standing.TROUBLED, reasons=[f"gpu-1 is CONTESTED: {remedy}", "Step 2 is bad"])]
    state.faults = Faults(disk="over the disk budget: 'refitd reclaim --dry-run' says what each is kept for")
    seen = Glance(url="http://x", overview=make_overview(state), versions=[], events=[])
    for height in (None, 40):
        shown = drawn(seen, height, width)
        words = " ".join(shown.split())
        assert f"gpu-1 is CONTESTED: {remedy} Step 2 is bad" in words
        assert "'refitd reclaim --dry-run' says what each is kept for" in words
        assert max(len(line) for line in shown.splitlines()) <= width
        assert height is None or len(shown.splitlines()) <= height


def test_where_engines_follow_several_runs_each_says_which() -> None:
    state = StandIn()
    state.runs = [make_run(run="monday"), make_run(run="tuesday")]
    state.engines = [make_engine("gpu-0", run="monday"), make_engine("gpu-1", run=None, reason="follows no run")]
    seen = Glance(url="http://x", overview=make_overview(state), versions=[], events=[])
    lines = drawn(seen).splitlines()
    head = next(line for line in lines if line.startswith("ENGINE"))
    assert head.split() == ["ENGINE", "RUN", "STATE", "STEP", "BEHIND", "TOOK", "WHY"]
    rows = {line.split()[0]: line.split()[1] for line in lines if line.startswith("gpu-")}
    assert rows == {"gpu-0": "monday", "gpu-1": "-"}
    state.engines, state.runs = state.engines[:1], state.runs[:1]
    assert "RUN" not in drawn(Glance(url="http://x", overview=make_overview(state), versions=[], events=[]))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_narrow_terminal_cuts_lines_and_breaks_none(width: int) -> None:
    assert max(len(line) for line in drawn(many(3), 30, width).splitlines()) <= width


def test_at_eighty_columns_numbers_are_whole_and_bars_give_way() -> None:
    glance = many(3)
    glance.versions[0] = make_version(100_000, pinned=True, timings=TIMINGS)  # type: ignore[index]
    reason = "http://127.0.0.1:39097 cannot be reached: [Errno 111] Connect call failed"
    glance.overview.engines[0] = make_engine("gpu-000", state=EngineState.UNREACHABLE, step=100_000, reason=reason)
    lines = drawn(glance, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = [line for line in lines if line.startswith("100,000")]
    assert row.split()[:3] == ["100,000", "good", "pinned"]
    assert row.endswith(f"{span(400.0)}        -  3.1 GB")
    (engine,) = [line for line in lines if line.startswith("gpu-000")]
    assert engine.split()[1:3] == ["away", "100,000"]
    assert engine.endswith("…")


def test_at_eighty_columns_the_legend_is_whole_and_it_says_how_to_leave() -> None:
    shown = drawn(many(3), 60, width=80)
    assert all(any(f"{letter} {name}" in line for line in shown.splitlines()) for name, (letter, _) in STAGES.items())
    assert "in capitals the engine stands still" in shown
    assert "e prepare, l load" in shown
    assert "q ends this" in shown.splitlines()[0]
    assert "ends this" not in drawn(many(3), width=80)  # one look has ended


def test_a_service_that_is_lost_is_said_above_what_was_last_known() -> None:
    shown = drawn(Glance(url="http://x", overview=many(2).overview, versions=[], events=[], lost="connection refused"))
    assert "not live since 12:00:00 UTC: connection refused" in shown
    assert "All 2 engines serve step 2" in shown


@pytest.mark.parametrize(
    ("timings", "letters"),
    [
        ({}, ""),
        ({"publish": 100.0, "pause": 100.0, "load": 200.0}, "p" * 8 + "P" * 8 + "L" * 16),
        ({"pause": 200.0, "resume": 0.01}, "P" * 16 + "R"),  # the shortest stage still shows
        (TIMINGS, "p" * 8 + "v" * 8 + "l" * 16),  # an adapter's
        ({"prepare": 200.0, "load": 100.0, "verify": 100.0}, "e" * 16 + "l" * 8 + "y" * 8),  # a host's
        ({"new-stage": 400.0}, "?" * BAR),
    ],
)
def test_a_bar_is_to_scale_and_can_be_read_without_colours(timings: dict[str, float], letters: str) -> None:
    assert bar(timings, 400.0).plain == letters


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0.42, "0.42 ms"),
        (42.0, "42 ms"),
        (1260.0, "1.26 s"),
        (119_700.0, "2 min"),
        (190_000.0, "3 min 10 s"),
        (7_500_000.0, "2 h 5 min"),
    ],
)
def test_durations_have_about_three_digits(milliseconds: float, text: str) -> None:
    assert span(milliseconds) == text


SEEN = "2026-11-21T11:56:40.000Z"  # 200 s before the look
PUBLISHED = {"publish": 6.0, "validate": 7.0}


@pytest.mark.parametrize(
    ("fields", "of_run", "text"),
    [
        ({}, {}, "3 min 20 s so far"),
        ({}, {"update": UpdateState.PENDING}, "3 min 20 s so far"),
        ({"state": VersionState.VALIDATING, "timings": {}}, {"target": None}, "3 min 20 s so far"),
        ({"created_at": "2026-11-21T11:59:59.623Z"}, {}, "500 ms so far"),
        ({"timings": PUBLISHED | {"load": 100.0}}, {}, "113 ms"),  # it was served before: engines go back to it
        ({}, {"paused_since": SEEN}, "13 ms"),
        ({}, {"target": "exp~v000008"}, "13 ms"),
        ({}, {"update": UpdateState.DEGRADED}, "13 ms"),
        ({"engines": []}, {}, "13 ms"),
        ({"state": VersionState.REJECTED}, {"target": "exp~v000001"}, "13 ms"),
        ({"state": VersionState.ANNOUNCED, "in_memory": True}, {"update": UpdateState.COMPLETE}, "13 ms"),
    ],
)
def test_an_update_under_way_says_how_long_it_has_been_not_what_its_first_stages_took(
    fields: dict[str, Any], of_run: dict[str, Any], text: str
) -> None:
    state = StandIn()
    state.runs = [make_run(**({"target": "exp~v000009", "update": UpdateState.ROLLING} | of_run))]
    there = {"created_at": SEEN, "timings": PUBLISHED, "engines": [on_version(make_engine())]}
    version = make_version(9, **(there | fields))
    overview = make_overview(state)
    assert took(version, overview) == text
    shown = drawn(Glance(url="http://x", overview=overview, versions=[version], events=[]), width=80)
    assert f" {text}  " in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_resume_says_that_an_engine_cannot_be_reached() -> None:
    with stand_in() as state:
        state.runs = [make_run(engines={EngineState.IN_SYNC: 1, EngineState.UNREACHABLE: 1})]
        said = refitd("resume", "exp", "--url", state.url).stdout
    assert "1 of its engines cannot be reached, and will follow when back." in said


def test_a_resume_of_what_is_paused_elsewhere_says_where() -> None:
    with stand_in() as state:
        state.runs = [make_run(standing=Standing.PAUSED, reasons=["one waits: refitd resume exp there"])]
        said = refitd("resume", "exp", "--url", state.url).stdout
    assert said.rstrip().endswith(" one waits: refitd resume exp there.")


def test_pause_and_resume_say_what_they_did(service: StandIn) -> None:
    paused = refitd("pause", "exp", "--url", service.url)
    assert (paused.exit_code, "are paused" in paused.stdout) == (0, True)
    resumed = refitd("resume", "exp", "--url", service.url)
    assert (resumed.exit_code, "go on" in resumed.stdout) == (0, True)


def test_updates_of_several_runs_name_their_runs_and_stand_as_the_service_lists_them() -> None:
    with stand_in() as state:
        state.versions = [make_version(100, run="old", place=1), make_version(1, run="new", place=2)]
        lines = refitd("top", "--once", "--url", state.url).stdout.splitlines()
        head = next(number for number, line in enumerate(lines) if line.startswith("STEP"))
        assert lines[head].split()[-1] == "RUN"
        rows = [line.split() for line in lines[head + 2 : head + 4]]
        assert [(row[0], row[-1]) for row in rows] == [("1", "new"), ("100", "old")]
