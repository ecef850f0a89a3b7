"""Before a host goes anywhere by itself its hub is to have said that it does not lead it."""

import asyncio
from pathlib import Path

import pytest

from refitd.follow.orders import FIRST_WORD_SECONDS, Orders
from refitd.follow.reporting import UpstreamReporter
from refitd.follow.sources import FollowedSources
from refitd.follow.upstream import UnreachableError, UpstreamError, WrongError
from refitd.rollout.targets import Targets
from refitd.state.journal.journal import Journal
from refitd.state.observer import Notifier
from refitd.state.store import Store
from refitd_client.contract.follow import FollowerReport, ReportAnswer


class Time:
    """A clock that is set."""

    at = 100.0

    def monotonic(self) -> float:
        return self.at

    def now(self) -> str:
        return ""


class Hub:
    """An upstream that answers reports in a given way."""

    def __init__(self, answer: UpstreamError | ReportAnswer) -> None:
        self.answer = answer

    async def report(self, _: FollowerReport) -> ReportAnswer:
        if isinstance(self.answer, UpstreamError):
            raise self.answer
        return self.answer


def told(tmp_path: Path, answer: UpstreamError | ReportAnswer) -> tuple[Orders, Time]:
    """The orders of a host that has just started, after its first report."""
    clock = Time()
    store = Store(Journal(tmp_path), clock)
    orders = Orders(store, Targets(store), Notifier(), run=None)
    sources = FollowedSources([Hub(answer)])  # type: ignore[list-item]
    reporter = UpstreamReporter(sources, lambda: FollowerReport(follower="f"), orders.answered, orders.unanswered)
    asyncio.run(reporter.report())
    store.journal.close()
    return orders, clock


def test_a_host_whose_report_was_not_answered_waits_for_a_word_of_its_hub_and_not_for_ever(tmp_path: Path) -> None:
    orders, clock = told(tmp_path, UnreachableError("the answer was lost"))
    orders.heard()
    assert orders.is_untold
    clock.at += FIRST_WORD_SECONDS
    orders.heard()
    assert not orders.is_untold


def test_a_host_that_was_cut_off_since_its_start_waits_from_when_it_hears_its_hub(tmp_path: Path) -> None:
    orders, clock = told(tmp_path, UnreachableError("it cannot be reached"))
    clock.at += FIRST_WORD_SECONDS
    orders.heard()
    assert orders.is_untold, "what versions there are was answered first, and the next report will be"


@pytest.mark.parametrize("answer", [ReportAnswer(lease_seconds=30), WrongError("reports are refused")])
def test_a_host_that_is_not_led_or_whose_upstream_takes_no_reports_follows_at_once(
    tmp_path: Path, answer: UpstreamError | ReportAnswer
) -> None:
    orders, _ = told(tmp_path, answer)
    assert (orders.is_untold, orders.is_led) == (False, False)


def test_a_host_that_is_led_is_told_so(tmp_path: Path) -> None:
    orders, _ = told(tmp_path, ReportAnswer(lease_seconds=30, leads=True, leader="hub"))
    assert (orders.is_untold, orders.is_led) == (False, True)
