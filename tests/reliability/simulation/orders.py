"""What a hub has told its hosts to serve, and how far they are with it: seen where replies go over the links."""

import asyncio
from collections import Counter, defaultdict
from enum import StrEnum

from refitd.state.observer import Notifier
from refitd_client.contract.follow import HostReply

LOAD_TIMEOUT = 60.0  # seconds without progress, after which a hub takes an order back


class Stage(StrEnum):
    """How far an order is."""

    DECIDED = "the hub has written down that it brings the host there, and has not replied since"
    SENT = "the hub has replied with it"
    ARRIVED = "the host has heard it, and has not reported since"
    ANSWERED = "the hub has heard a report of who has heard it"


class OrderBook:
    """What a hub has told its hosts, by host.

    Attributes:
        given: the versions that they were to serve; None among them for nothing new.
        fences: the highest epoch of a reply that a host has heard, by the names of hubs.
        back: versions from which a host may go back, since the hub has said that.
        counts: how many orders have come to a stage.
    """

    def __init__(self) -> None:
        self.given: defaultdict[str, set[str | None]] = defaultdict(set)
        self.fences: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self.back: defaultdict[str, set[str]] = defaultdict(set)
        self.counts: Counter[tuple[str, Stage]] = Counter()
        self._newest: dict[str, tuple[dict[str, str | None], int]] = {}
        self._is_heard: dict[str, bool] = {}
        self._moved = Notifier()

    def decided(self, host: str) -> None:
        self._comes_to(host, Stage.DECIDED)

    def reported(self, host: str) -> None:
        if self._is_heard.pop(host, False):
            self._comes_to(host, Stage.ANSWERED)

    def replied(self, host: str, reply: HostReply) -> bool:
        """The hub replies. Returns whether it says something new."""
        is_new = self._newest.get(host) != (said := (dict(reply.serve), reply.again))
        self._newest[host] = said
        if is_new and reply.serve:
            self._comes_to(host, Stage.SENT)
        return is_new and bool(reply.serve)

    def heard(self, host: str, reply: HostReply, *, is_new: bool) -> None:
        if reply.serve or host in self.fences:
            self.fences[host][reply.leader] = max(reply.epoch, self.fences[host].get(reply.leader, 0))
        if is_new:
            self._is_heard[host] = True
            self._comes_to(host, Stage.ARRIVED)

    def _comes_to(self, host: str, stage: Stage) -> None:
        self.counts[host, stage] += 1
        self._moved.notify()

    async def reaches(self, host: str, stage: Stage, within: float, since: int | None = None) -> None:
        """Wait until one more order to a host has come to a stage, at most so many seconds; one more than `since`."""
        before, loop = self.counts[host, stage] if since is None else since, asyncio.get_running_loop()
        ends = loop.time() + within
        while self.counts[host, stage] == before and loop.time() < ends:
            await self._moved.wait_after(self._moved.count, within=ends - loop.time())
