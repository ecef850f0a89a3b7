"""The log: where it is JSON, every line that the service prints is."""

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from refitd.observe.logs import announce, configure_logs


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Logging as the other tests have it."""
    level = logging.root.level
    yield
    logging.root.setLevel(level)
    structlog.reset_defaults()


def test_what_is_ready_and_what_libraries_log_is_json_where_the_log_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    configure_logs("json")
    structlog.get_logger("refitd").info("update 1", version="exp~v000001")
    logging.getLogger("somebody.else").warning("Invalid %s", "request")
    announce("refitd ready on http://127.0.0.1:8700")
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in (out + err).splitlines()]
    assert [line["event"] for line in lines] == [
        "refitd ready on http://127.0.0.1:8700",
        "update 1",
        "Invalid request",
    ]
    assert {line["level"] for line in lines} == {"info", "warning"}
    assert all("timestamp" in line for line in lines)


def test_what_others_have_written_neither_steers_a_terminal_nor_looks_like_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    configure_logs("console")
    structlog.get_logger("refitd").info("rejected", reason="no\x1b[2J\n2026-01-01 [info] served  version=forged")
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "\x1b[2J" not in told


def test_for_people_it_is_a_line_with_the_address(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    configure_logs("console")
    announce("refitd ready on http://127.0.0.1:8700")
    assert "refitd ready on http://127.0.0.1:8700\n" in capsys.readouterr().out
