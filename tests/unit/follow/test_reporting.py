"""A host's reports: replies that change places on the way."""

import asyncio
from collections.abc import Sequence
from typing import cast

from refitd_client.contract.follow import Following, HostReply, HostReport
from refitd_hosts.follow.reporting import UpstreamReporter
from refitd_hosts.follow.upstream import FollowedSources, Upstream

REPORT = HostReport(told=Following(follower="host0", upstream="http://hub:8700", upstreams=[]))


class _SlowHub:
    """Answers each report when the test says so: a real hub's replies change places only when a network delays them."""

    name = "http://hub:8700"

    def __init__(self) -> None:
        self.replies: list[asyncio.Future[HostReply]] = []

    async def report(self, _: HostReport) -> HostReply:
        self.replies.append(asyncio.get_running_loop().create_future())
        return await self.replies[-1]


async def _heard(versions_by_report: Sequence[str], answered: Sequence[int]) -> list[str | None]:
    hub, heard = _SlowHub(), list[str | None]()
    reporter = UpstreamReporter(
        FollowedSources([cast("Upstream", hub)]),
        lambda: REPORT,
        lambda reply: heard.append(reply.serve["run"]),
        lambda: False,
    )
    async with asyncio.TaskGroup() as group:
        reports = [group.create_task(reporter.report()) for _ in versions_by_report]
        await asyncio.sleep(0)  # each report is sent
        for number in answered:
            hub.replies[number].set_result(HostReply(lease_seconds=30.0, serve={"run": versions_by_report[number]}))
            await reports[number]
    return heard


async def test_a_reply_to_an_earlier_report_that_comes_after_a_later_one_orders_nothing() -> None:
    """It ordered step 50 when engines here already served 52: they went back."""
    assert await _heard(["run~v000050", "run~v000052"], answered=[1, 0]) == ["run~v000052"]


async def test_replies_in_the_order_of_their_reports_are_all_heard() -> None:
    """Two reports are under way, and both replies count."""
    assert await _heard(["run~v000050", "run~v000052"], answered=[0, 1]) == ["run~v000050", "run~v000052"]
