"""Delivers news to the operator's URLs, as Standard Webhooks (https://www.standardwebhooks.com).

The journal has a message from when it is made until it is taken or given up. It is queued for the journal together with
the change that it tells of, and sent when both are durable: no message tells of what a crash has undone, and a service
that was killed goes on with what was waiting. A receiver may get a message twice, where the service died between its
answer and the journal: `webhook-id` is the same then.

Each message is signed with every secret of the file, so that secrets can be exchanged. A receiver holds the signature
against its secret, and the timestamp against its clock, so that it believes nothing old.
"""

import asyncio
import random
import ssl
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import httpx
import structlog
from standardwebhooks import Webhook

from refitd.clock import Clock
from refitd.observe.telemetry import Telemetry
from refitd.observe.webhooks.news import News, Reporter
from refitd.observe.webhooks.rules import WebhookRules, WebhookSecretError, read_secrets
from refitd.rollout.targets import Targets
from refitd.state.delivery import KEPT, DeliveryRecord, Sent, after_try, give_up, refusal
from refitd.state.journal import reads, writes
from refitd.state.journal.journal import Journal, JournalError
from refitd.state.observer import Notifier
from refitd.state.store import Store
from refitd_client.contract.states import DeliveryState

SEND_SECONDS = 20.0
AT_A_TIME = 4
LOOK_SECONDS = 1.0
_RETRY_SECONDS = 5.0

log = structlog.get_logger("refitd")


class Post(Protocol):
    """The port to the network."""

    async def __call__(self, delivery: DeliveryRecord) -> Sent:
        """Try once. Raises nothing for what a receiver or the network does."""
        ...


class SignedPost:
    """Sends one message over HTTP: no redirects, no proxies of the environment, and a time limit.

    Signs with the secrets that the file holds now, so that they can be exchanged while the service runs.
    """

    def __init__(self, secret_file: Path) -> None:
        self._secret_file = secret_file

    async def __call__(self, delivery: DeliveryRecord) -> Sent:
        """See `Post`."""
        try:
            secrets = await asyncio.to_thread(read_secrets, self._secret_file)
        except (OSError, WebhookSecretError) as error:
            return Sent(trouble=f"it cannot be signed: {error}")
        now = datetime.now(UTC)
        headers = {
            "content-type": "application/json",
            "webhook-id": delivery.id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(Webhook(each).sign(delivery.id, now, delivery.body) for each in secrets),
        }
        try:
            async with asyncio.timeout(SEND_SECONDS):
                return await _send(delivery, headers)
        except TimeoutError:
            return Sent(trouble=f"there was no answer within {SEND_SECONDS:g} s")


async def _send(delivery: DeliveryRecord, headers: Mapping[str, str]) -> Sent:
    tls = await asyncio.to_thread(_certificates) if delivery.url.startswith("https") else False
    try:
        async with (
            httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=SEND_SECONDS, verify=tls) as http,
            http.stream("POST", delivery.url, content=delivery.body, headers=headers) as reply,
        ):  # the answer's body is not read: only its status counts
            again = reply.headers.get("retry-after", "")
            seconds = float(again) if again.isascii() and again.isdigit() else None
            return Sent(status=reply.status_code, retry_after=seconds)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Sent(trouble=f"it cannot be reached: {str(error) or type(error).__name__}")


@cache
def _certificates() -> ssl.SSLContext:
    """The system's. They take 20 ms to read, and are read once."""
    return ssl.create_default_context()


class DeliveryTask:
    """Owns the messages that wait, and sends them when they are due.

    Args:
        journal: keeps messages over restarts.
        clock: says when they are due.
        urls: the receivers.
        post: sends one message.
        ended: is called with the state of each delivery that is over.
        chance: jitter between tries.
    """

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
        """Queue a message for each URL. Returns at once."""
        at = self._clock.now()
        for url in self._urls:
            delivery = DeliveryRecord(
                id=f"msg_{uuid.uuid4().hex}", topic=news.topic.value, url=url, body=news.body(at), created_at=at
            )
            self._queue(delivery)
            if delivery.id in self._waiting:
                self._journal.append(writes.put_delivery(delivery))

    def _queue(self, delivery: DeliveryRecord) -> None:
        why_not = refusal(delivery.url, self._urls, len(self._waiting))
        if why_not is not None:
            self._end(give_up(delivery, why_not, self._clock.now()))
            return
        self._waiting[delivery.id] = delivery
        self._due[delivery.id] = self._clock.monotonic()
        self._work.notify()

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
        """Send what is due until cancelled. `look` is called before each turn, at least once a second."""
        while True:
            seen = self._work.count
            look()
            now = self._clock.monotonic()
            due = sorted((when, name) for name, when in self._due.items() if when <= now)[:AT_A_TIME]
            if not due:
                await self._work.wait_after(seen, within=LOOK_SECONDS)
                continue
            try:
                await self._journal.durable()
            except JournalError:
                await asyncio.sleep(_RETRY_SECONDS)  # what is told must not be undone by a restart
                continue
            await asyncio.gather(*(self._try(self._waiting[name]) for _, name in due))

    async def _try(self, delivery: DeliveryRecord) -> None:
        sent = await self._post(delivery)
        after, pause = after_try(delivery, sent, self._clock.now())
        if pause is None:
            self._end(after)
            return
        self._waiting[after.id] = after
        self._due[after.id] = self._clock.monotonic() + pause * (1 + 0.2 * self._chance.random())
        self._journal.append(writes.put_delivery(after))


def place_of(url: str) -> str:
    """Return a URL without what could be a secret: many receivers know their senders by a secret path."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "") + "/…"


class Webhooks:
    """Listens to the store from here on. Without `--webhook` nothing is told, and what waited is given up."""

    def __init__(
        self, rules: WebhookRules, store: Store, targets: Targets, telemetry: Telemetry, post: Post | None = None
    ) -> None:
        """Read back what waits. Blocks; `post` stands in for the network."""
        self.deliveries = DeliveryTask(
            store.journal,
            store.clock,
            rules.receivers,
            post or SignedPost(rules.secret_file or Path("/nonexistent")),
            ended=telemetry.meters.delivery_ended,
            chance=random.Random(),  # noqa: S311 - jitter, not a secret
        )
        telemetry.meters.count_waiting(lambda: self.deliveries.waiting)
        self._reporter = Reporter(
            store,
            targets,
            telemetry.unserved,
            self.deliveries.tell,
            topics=rules.topics if rules.receivers else (),
            stalled_after=rules.stalled_after,
        )
        store.observe(self._reporter)

    async def run(self) -> None:
        """Send until cancelled."""
        await self.deliveries.run(self._reporter.look)
