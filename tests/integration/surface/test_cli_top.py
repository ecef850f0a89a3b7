"""`refitd top`: the same facts as the dashboard, in any terminal."""

from collections.abc import Iterator
from io import StringIO

import pytest
from rich.console import Console

from refitd_client.contract.states import EngineState, Standing
from refitd_client.contract.wire import Attempt, Event
from refitd_console.top import BAR, Glance, bar, screen
from support.command_line import refitd
from support.stand_in_service import StandIn, make_engine, make_overview, make_run, make_version, stand_in

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


@pytest.mark.parametrize("height", [12, 24, 50, 200])
def test_it_fits_into_the_terminal_and_shows_trouble_first(height: int) -> None:
    shown = drawn(many(200), height)
    assert len(shown.splitlines()) <= height
    assert "zebra" in shown
    assert "more" in shown or height == 200


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
