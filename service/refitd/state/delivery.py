"""One message to one URL, and what comes after each try. Pure.

    WAITING ── 2xx ──▶ DELIVERED
       └────── 410, its last try, its URL is not configured ──▶ GIVEN_UP

Tries are spread over some hours: what is not delivered by then is known by other ways. `Retry-After` is obeyed.
"""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from refitd_client.contract.decoding import from_json
from refitd_client.contract.states import DeliveryState

PAUSES = (5.0, 30.0, 300.0, 1800.0, 7200.0, 18000.0)  # seconds after each try but the last
MAX_WAITING = 1000
KEPT = 1000  # that are over, for an operator to look at
LONGEST_PAUSE = 18000.0
GONE = 410


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRecord:
    """A message for one URL. `id` is the same at each try, so that a receiver can tell a repetition."""

    id: str
    topic: str
    url: str
    body: str
    created_at: str
    state: DeliveryState = DeliveryState.WAITING
    tries: int = 0
    reason: str | None = None
    ended_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """How a try ended: the status of the answer, or why there was none. `retry_after` is in seconds."""

    status: int | None = None
    trouble: str | None = None
    retry_after: float | None = None


class _Data(msgspec.Struct):
    version: str | None = None
    run: str | None = None


class _Body(msgspec.Struct):
    data: _Data = msgspec.field(default_factory=_Data)


def after_try(delivery: DeliveryRecord, sent: Sent, now: str) -> tuple[DeliveryRecord, float | None]:
    """The delivery after a try, and the seconds until the next one; None where there is none."""
    tried = replace(delivery, tries=delivery.tries + 1)
    if sent.status is not None and 200 <= sent.status < 300:
        return replace(tried, state=DeliveryState.DELIVERED, reason=None, ended_at=now), None
    reason = sent.trouble or f"it answered {sent.status}"
    if sent.status == GONE:
        return give_up(tried, f"{reason}: it wants no more of these", now), None
    if tried.tries > len(PAUSES):
        return give_up(tried, f"{reason}, after {tried.tries} tries", now), None
    pause = max(PAUSES[tried.tries - 1], min(sent.retry_after or 0.0, LONGEST_PAUSE))
    return replace(tried, reason=reason), pause


def trial_message(url: str, at: str) -> DeliveryRecord:
    """What tells nothing but that it came. `at` is RFC 3339."""
    body = f'{{"type":"refitd.test","timestamp":"{at}","data":{{}}}}'
    return DeliveryRecord(id=f"msg_{uuid.uuid4().hex}", topic="test", url=url, body=body, created_at=at)


def subject_of(delivery: DeliveryRecord) -> str | None:
    """The id of the version that a message tells of, else its run; None where it tells of neither."""
    data = from_json(delivery.body, _Body).data
    return data.version or data.run


def give_up(delivery: DeliveryRecord, reason: str, now: str) -> DeliveryRecord:
    """It is not sent any more."""
    return replace(delivery, state=DeliveryState.GIVEN_UP, reason=reason, ended_at=now)


def refusal(url: str, urls: Iterable[str], waiting: int) -> str | None:
    """Why a message is not to be sent, None where it is."""
    if url not in urls:
        return "its URL is no longer among --webhook (REFITD_WEBHOOKS)"
    if waiting >= MAX_WAITING:
        return f"{MAX_WAITING} others are waiting already"
    return None
