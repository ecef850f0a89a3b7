"""Orders of a hub to the hosts that it leads: the product's own adapter and routes, without HTTP between.

The calls go over a made-up link. What a host has heard it carries out, whether anybody waits for its answer or not.
"""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from refitd.api import follow
from refitd.engine.http import CallFailure, NoReply, Reply
from refitd.engine.plugin.leading import Leads
from refitd.engine.refitd.adapter import RefitdEngine
from refitd.problem import ProblemError
from refitd.state.observer import Notifier
from refitd_client.contract.follow import Following, HostOrder, HostTrial
from refitd_client.contract.plugin import Owner
from refitd_client.errors import ServiceProblemError, ServiceUnreachableError

from .life import Life
from .links import Damage, Link
from .server import MOUNT

LOAD_TIMEOUT = 60.0  # seconds without progress, after which a hub takes an order back
Answer = Callable[[Life], Awaitable[Any]]


class Stage(StrEnum):
    """How far an order is."""

    SENT = "the hub has sent it"
    ARRIVED = "the host has taken it, and has not answered yet"
    ANSWERED = "the hub has heard that the host has taken it"


class OrderBook:
    """What a hub has ordered, by host, and what hosts have answered.

    Attributes:
        given: the versions that were ordered; None among them for an order to serve nothing new.
        fences: the highest epoch of an order of which a host has said that it has taken it.
        newest: of the orders that a host has taken, the one that was sent last: its number, and its version.
        back: versions from which a host may go back, since the hub has ordered that.
        counts: how many orders have come to a stage.
        wrong: what must not be, in sentences.
    """

    def __init__(self) -> None:
        self.given: defaultdict[str, set[str | None]] = defaultdict(set)
        self.fences: dict[str, int] = {}
        self.newest: dict[str, tuple[int, str | None]] = {}
        self.back: defaultdict[str, set[str]] = defaultdict(set)
        self.counts: Counter[tuple[str, Stage]] = Counter()
        self.wrong: list[str] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self._moved = Notifier()

    def comes_to(self, host: str, stage: Stage) -> None:
        """An order to a host has come to a stage."""
        self.counts[host, stage] += 1
        self._moved.notify()

    async def reaches(self, host: str, stage: Stage, within: float) -> None:
        """Wait until one more order to a host has come to a stage, at most so many seconds."""
        before, loop = self.counts[host, stage], asyncio.get_running_loop()
        ends = loop.time() + within
        while self.counts[host, stage] == before and loop.time() < ends:
            await self._moved.wait_after(self._moved.count, within=ends - loop.time())

    def taken(self, host: str, order: HostOrder, before: int, number: int) -> None:
        """A host has obeyed, and has that written down. `before` is the highest epoch when it heard the order, `number`
        counts the orders that were sent to it.
        """
        newest, version = self.newest.get(host, (0, None))
        if number < newest and order.version != version:
            self.wrong.append(f"{host} obeys order {number}, {order}, after order {newest} to serve {version}")
        if number > newest:
            self.newest[host] = number, order.version
        if order.fence < before:
            self.wrong.append(f"{host} obeys an order of epoch {order.fence}, and has taken one of epoch {before}")
        self.fences[host] = max(order.fence, self.fences.get(host, 0))
        self.comes_to(host, Stage.ARRIVED)

    def close(self) -> None:
        """End what is under way."""
        for task in list(self.tasks):
            task.cancel()


class HostTransport:
    """The way of a hub's adapter to a host. `sends` hears of each order before it goes.

    Of what may happen to a link, `parts` happens to orders here, and `answers` to all else.
    """

    def __init__(self, link: Link, life: Life, book: OrderBook, sends: Callable[[HostOrder], None]) -> None:
        self._link = link
        self._life = life  # of the hub
        self._book = book
        self._sends = sends

    async def get(self, path: str, within: float) -> Reply | NoReply:
        """`GET /v1/follow`."""
        parts = urlsplit(path)
        assert parts.path == "/v1/follow", f"the simulation does not know {path}"
        held_back = float(parse_qs(parts.query).get("within", ["0"])[0])
        return await self._call(lambda life: follow.following(life.service, held_back), within, self._next())

    async def post(self, path: str, body: dict[str, Any], within: float) -> Reply | NoReply:
        """`POST /v1/follow/trial`."""
        assert path == "/v1/follow/trial", f"the simulation does not know {path}"
        asked = msgspec.convert(body, HostTrial)
        return await self._call(lambda life: follow.trial(asked, life.service), within, self._next())

    async def put(self, path: str, body: dict[str, Any], within: float) -> Reply | NoReply:
        """`PUT /v1/follow/desired`."""
        assert path == "/v1/follow/desired", f"the simulation does not know {path}"
        order, host = msgspec.convert(body, HostOrder), self._link.to.name

        async def carried_out(life: Life) -> Following:
            before = self._book.fences.get(host, 0)
            try:
                told = await follow.desire(order, life.service)
            except ProblemError as error:
                self._link.counts[error.kind.slug] += 1
                raise
            self._book.taken(host, order, before, number)
            return told

        self._is_alive()
        self._sends(order)
        self._book.comes_to(host, Stage.SENT)
        number = self._book.counts[host, Stage.SENT]
        answer = await self._call(carried_out, within, self._link.next_of(self._link.parts))
        if isinstance(answer, Reply) and answer.ok:
            self._book.comes_to(host, Stage.ANSWERED)
        return answer

    def _next(self) -> Damage | None:
        return self._link.next_of(self._link.answers)

    def _is_alive(self) -> None:
        if not self._life.alive:  # the hub was killed: it says nothing any more
            raise asyncio.CancelledError

    async def _call(self, act: Answer, within: float, damage: Damage | None) -> Reply | NoReply:
        self._is_alive()
        if damage is Damage.CUT:
            return NoReply(CallFailure.NO_ANSWER, "connection reset")
        task = asyncio.get_running_loop().create_task(self._answered(act, damage))
        self._book.tasks.add(task)
        task.add_done_callback(self._book.tasks.discard)
        done, _ = await asyncio.wait({task}, timeout=within)
        self._is_alive()
        return task.result() if done else NoReply(CallFailure.TIMED_OUT, f"no answer within {within:g} s")

    async def _answered(self, act: Answer, damage: Damage | None) -> Reply | NoReply:
        try:
            answer = await self._link.ask(act, damage)
        except ServiceUnreachableError as error:
            return NoReply(CallFailure.NO_ANSWER, str(error))
        except ServiceProblemError as error:
            data = msgspec.to_builtins(error.problem)
            return Reply(error.problem.status, json.dumps(data), data)
        data = msgspec.to_builtins(answer)
        return Reply(200, json.dumps(data), data)


class LedHostEngine(RefitdEngine):
    """The product's adapter, over a link. `leads` are the hub's name and epoch."""

    def __init__(self, url: str, transport: HostTransport, leads: Leads) -> None:
        super().__init__(url, root=MOUNT, load_timeout=LOAD_TIMEOUT, leads=leads)
        self._http = transport  # type: ignore[assignment]


def leads_as(service: str, epoch: int) -> Leads:
    """The lease of a service of this name, and of an epoch of its lead."""
    return Leads(owner=Owner(service=service, root="/root", host=service, pid=1, epoch=epoch))


async def is_refused(order: HostOrder, life: Life) -> bool:
    """Whether a host refuses an order, as from somebody who is not to lead it."""
    try:
        await follow.desire(order, life.service)
    except ProblemError as error:
        return error.kind.slug == "order-refused"
    return False
