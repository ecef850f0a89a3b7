"""`refitd log`, and words that are no commands."""

from collections.abc import Iterator

import pytest

from refitd.cli.app import MEANT
from refitd_client.contract.wire import Event, Page
from support.command_line import answer, refitd
from support.stand_in_service import StandIn, stand_in


@pytest.fixture
def service() -> Iterator[StandIn]:
    with stand_in() as state:
        yield state


class TestLog:
    def test_it_has_what_happened_and_can_be_asked_of_one_thing(self, service: StandIn) -> None:
        service.events = [Event(seq=7, at="2026-11-21T12:00:00Z", kind="engine", subject="b", text="IN_SYNC: [serves]")]
        lines = refitd("log", "b", "--limit", "5", "--url", service.url).stdout.splitlines()
        assert lines[-1].split() == ["11-21", "12:00:00Z", "b", "IN_SYNC:", "[serves]"]
        assert service.asked == ["GET /v1/log?subject=b&limit=5"]
        assert answer("log", "--url", service.url, kind=Page[Event]) == Page(items=service.events)


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
