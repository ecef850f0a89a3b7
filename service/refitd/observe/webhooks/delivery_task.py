"""Carries the news to the operator's URLs: written into the journal first, and there until it is over.

A message is queued for the journal together with what it tells of, and sent when both are durable: nothing is told that
did not happen, and a service that was killed goes on with what was waiting. A receiver may get a message twice, where
the service died between its answer and the journal: `webhook-id` is the same then.
"""

import asyncio
import random
import uuid
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import structlog

from refitd.clock import Clock
from refitd.observe.webhooks.news import News
from refitd.observe.webhooks.post import Post
from refitd.state.delivery import KEPT, DeliveryRecord, after_try, give_up, refusal
from refitd.state.journal import reads, writes
from refitd.state.journal.journal import Journal, JournalError
from refitd.state.notifier import Notifier
from refitd_client.contract.states import DeliveryState

AT_A_TIME = 4
LOOK_SECONDS = 1.0
_RETRY_SECONDS = 5.0

log = structlog.get_logger("refitd")


class Courier:
    """Owns what waits to be sent. `ended` hears of each delivery that is over, `look` is asked from time to time."""

    def __init__(
        self,
        journal: Journal,
        clock: Clock,
        urls: Sequence[str],
        post: Post,
        *,
        ended: Callable[[DeliveryState], None],
        chance: random.Random,
    ) -> None:
        """Read back what waits. Blocks; call it before serving."""
        self._journal = journal
        self._clock = clock
        self._urls = urls
        self._post = post
        self._ended = ended
        self._chance = chance
        self._work = Notifier()
        self._waiting: dict[str, DeliveryRecord] = {}
        self._due: dict[str, float] = {}
        for delivery in journal.read(reads.read_waiting_deliveries):
            self._queue(delivery)

    @property
    def waiting(self) -> int:
        """How many messages are not over."""
        return len(self._waiting)

    def tell(self, news: News) -> None:
        """Have every URL told. Returns at once."""
        at = self._clock.now()
        for url in self._urls:
            delivery = DeliveryRecord(
                id=f"msg_{uuid.uuid4().hex}", topic=news.topic.value, url=url, body=news.body(at), created_at=at
            )
            self._queue(delivery)
            self._write(self._waiting.get(delivery.id, delivery))

    def _queue(self, delivery: DeliveryRecord) -> None:
        why_not = refusal(delivery.url, self._urls, len(self._waiting))
        if why_not is not None:
            self._end(give_up(delivery, why_not, self._clock.now()))
            return
        self._waiting[delivery.id] = delivery
        self._due[delivery.id] = self._clock.monotonic()
        self._work.notify()

    def _write(self, delivery: DeliveryRecord) -> None:
        if delivery.id in self._waiting:
            self._journal.append(writes.put_delivery(delivery))

    def _end(self, delivery: DeliveryRecord) -> None:
        self._waiting.pop(delivery.id, None)
        self._due.pop(delivery.id, None)
        self._journal.append(writes.put_delivery(delivery), writes.drop_deliveries(KEPT))
        self._ended(delivery.state)
        if delivery.state is DeliveryState.GIVEN_UP:
            log.warning(
                "a webhook was given up", delivery=delivery.id, to=place_of(delivery.url), reason=delivery.reason
            )

    async def run(self, look: Callable[[], None] = lambda: None) -> None:
        """Send what is due until cancelled."""
        while True:
            seen = self._work.count
            look()
            due = self._next()
            if due:
                await self._send_all(due)
            else:
                await self._work.wait_after(seen, within=LOOK_SECONDS)

    def _next(self) -> list[DeliveryRecord]:
        now = self._clock.monotonic()
        due = sorted((when, name) for name, when in self._due.items() if when <= now)
        return [self._waiting[name] for _, name in due[:AT_A_TIME]]

    async def _send_all(self, due: Sequence[DeliveryRecord]) -> None:
        try:
            await self._journal.durable()
        except JournalError:
            await asyncio.sleep(_RETRY_SECONDS)  # what is told must not be undone by a restart
            return
        await asyncio.gather(*(self._send(delivery) for delivery in due))

    async def _send(self, delivery: DeliveryRecord) -> None:
        sent = await self._post(delivery)
        after, pause = after_try(delivery, sent, self._clock.now())
        if pause is None:
            self._end(after)
            return
        self._waiting[after.id] = after
        self._due[after.id] = self._clock.monotonic() + pause * (1 + 0.2 * self._chance.random())
        self._write(after)


def place_of(url: str) -> str:
    """The URL without what could be a secret: many receivers know their senders by a path that nobody can guess."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "") + "/…"
