"""`refitd log`, and words that are no commands."""

from collections.abc import Iterator
from urllib.parse import parse_qsl

import msgspec
import pytest

from refitd.cli.app import MEANT
from refitd_client.contract.states import LogSeverity
from refitd_client.contract.wire import Event, Page
from refitd_client.errors import ServiceUnreachableError
from refitd_client.http.client import RefitClient
from support.command_line import answer, refitd
from support.stand_in_service import StandIn, stand_in


@pytest.fixture
def service() -> Iterator[StandIn]:
    with stand_in() as state:
        yield state


class TestLog:
    def test_it_has_what_happened_and_can_be_asked_of_one_thing(self, service: StandIn) -> None:
        service.events = [
            Event(seq=7, at="2026-11-21T12:00:00.047Z", kind="engine", subject="b", text="IN_SYNC: [serves]")
        ]
        lines = refitd("log", "b", "--limit", "5", "--url", service.url).stdout.splitlines()
        assert lines[-1].split() == ["11-21", "12:00:00.047Z", "b", "IN_SYNC:", "[serves]"]
        assert service.asked == ["GET /v1/log?subject=b&limit=5"]
        assert answer("log", "--url", service.url, kind=Page[Event]) == Page(items=service.events)

    def test_its_filters_are_the_services(self, service: StandIn) -> None:
        words = ("--run", "exp/trial", "--engine", "gpu-0", "--severity", "warning", "--limit", "5")
        assert refitd("log", *words, "--url", service.url).exit_code == 0
        (asked,) = service.asked
        wanted = {"run": "exp/trial", "engine": "gpu-0", "severity": "warning", "limit": "5"}
        assert dict(parse_qsl(asked.partition("?")[2])) == wanted

    def test_it_follows_from_the_oldest_to_the_newest_and_on_with_the_same_filters(self, service: StandIn) -> None:
        service.events = [entry(2, "gpu-0", "IN_SYNC"), entry(1, "gpu-0", "VERIFYING")]
        service.news = [
            entry(2, "gpu-0", "IN_SYNC"),
            entry(3, "gpu-1", "BEHIND"),
            entry(4, "gpu-0", "away", grave=True),
        ]
        words = ("log", "--follow", "--engine", "gpu-0", "--url", service.url)
        assert [line.split()[2:] for line in refitd(*words).stdout.splitlines()] == [
            ["gpu-0", "VERIFYING"], ["gpu-0", "IN_SYNC"], ["gpu-0", "away"],
        ]  # fmt: skip
        lines = refitd(*words, "--severity", "warning", "--json").stdout.splitlines()
        assert msgspec.json.decode(lines[-1], type=Event) == service.news[-1]
        assert len(lines) == 3, "the stand-in's page is not filtered, and one of two events is a warning"

    def test_following_goes_on_where_it_was_when_the_service_restarts(
        self, service: StandIn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        service.events = [entry(1, "gpu-0", "BEHIND")]
        asked: list[str] = []

        def events(_client: RefitClient, last_event_id: str) -> Iterator[Event]:
            asked.append(last_event_id)
            if len(asked) == 1:
                yield entry(2, "gpu-0", "IN_SYNC")
                raise ServiceUnreachableError("connection refused")

        monkeypatch.setattr(RefitClient, "events", events)
        monkeypatch.setattr("refitd.cli.log._ASK_AGAIN_SECONDS", 0.0)
        result = refitd("log", "--follow", "--url", service.url)
        assert (result.exit_code, asked) == (0, ["1", "2"])
        assert [line.split()[-1] for line in result.stdout.splitlines()] == ["BEHIND", "IN_SYNC"]
        assert "connection refused; trying again" in result.stderr

    def test_where_a_page_begins_says_nothing_of_what_is_to_come(self, service: StandIn) -> None:
        result = refitd("log", "--follow", "--before", "7", "--url", service.url)
        assert (result.exit_code, "leave out --before" in result.stderr) == (2, True)


def entry(seq: int, engine: str, text: str, *, grave: bool = False) -> Event:
    severity = LogSeverity.WARNING if grave else LogSeverity.INFO
    at = f"2026-11-21T12:00:00.{seq:03d}Z"
    return Event(seq=seq, at=at, kind="engine", subject=engine, text=text, run="exp", severity=severity)


class TestUnknownCommands:
    @pytest.mark.parametrize("word", MEANT)
    def test_the_word_of_another_tool_leads_to_the_command(self, word: str) -> None:
        result = refitd(word, "anything")
        assert result.exit_code == 2
        assert f"No such command '{word}'. Did you mean '{MEANT[word]}'?" in " ".join(result.stderr.split())
        assert refitd(*MEANT[word].split(), "--help").exit_code == 0
        assert refitd(word, "--help").exit_code == 2, "it is a command itself"

    def test_a_slip_of_the_fingers_is_met(self) -> None:
        assert "Did you mean 'versions'?" in refitd("versoins").stderr

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ("wait --for servd ID", "'servd' is not one of 'served', 'sealed'. Did you mean 'served'?"),
            ("wait --for x ID", "'x' is not one of 'served', 'sealed'."),
        ],
    )
    def test_a_value_that_is_none_of_those_that_there_are_is_met_in_a_plain_sentence(
        self, words: str, said: str
    ) -> None:
        result = refitd(*words.split())
        told = " ".join(result.stderr.replace("│", " ").split())
        assert (result.exit_code, said in told, "Value error" in told) == (2, True, False), told
