"""When to send a request again. Pure: the outcome of one try goes in; a pause in seconds comes out, or None to give up.

A try ends in an `HttpReply` or a `LostReply`. What is tried again:

    never sent (no connection)        always
    sent, reply lost or late          if the call is repeatable
    429, 503                          always: the service says that it did nothing
    502, 504                          if the call is repeatable: a proxy does not know what happened
    any other answer                  never

`Retry-After` is obeyed where an answer has it (RFC 9110, 10.2.3). Otherwise pauses double, with jitter, so that many
trainers that lost one service do not come back at the same moment. No try starts later than `deadline` after the first,
with one exception: a wait for a version goes on for all its time while the service answers 503, because a service that
has just started does not know the version yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from refitd_client.http.routes import Call

_NOT_YET = 503
_REFUSED_UNDONE = frozenset({429, _NOT_YET})
_PERHAPS_DONE = frozenset({502, 504})


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReply:
    """An answer to one try, by refitd or by whatever else listens there. `headers` has lower-case names."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LostReply:
    """One try without a whole answer. `sent`: the request may have been carried out."""

    url: str
    sent: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to go on. All in seconds; `deadline=0` tries once.

    While the service answers 503 the deadline is `not_yet`, where that is longer.
    """

    deadline: float = 30.0
    first_pause: float = 0.1
    longest_pause: float = 5.0
    not_yet: float = 0.0

    def within(self, seconds: float) -> "RetryPolicy":
        """The same, with a deadline of at most `seconds`."""
        return replace(self, deadline=max(0.0, min(self.deadline, seconds)))

    def waiting(self, seconds: float) -> "RetryPolicy":
        """The same for a wait of `seconds`, which goes on while the service does not know the version yet."""
        return replace(self.within(seconds), not_yet=seconds)

    def pause(
        self, call: Call[Any], outcome: HttpReply | LostReply, *, tried: int, elapsed: float, chance: float
    ) -> float | None:
        """The pause before the next try, in seconds; None if there is to be none.

        Args:
            call: what was sent.
            outcome: how the last try ended.
            tried: the number of tries so far.
            elapsed: seconds since the first try began.
            chance: random, in [0, 1), for the jitter.
        """
        if isinstance(outcome, LostReply):
            status, may_repeat = 0, call.repeatable or not outcome.sent
        else:
            status = outcome.status
            may_repeat = status in _REFUSED_UNDONE or (call.repeatable and status in _PERHAPS_DONE)
        if not may_repeat:
            return None
        asked = retry_after(outcome)
        pause = self._backoff(tried, chance) if asked is None else asked + chance * self.first_pause
        deadline = max(self.deadline, self.not_yet) if status == _NOT_YET else self.deadline
        return pause if elapsed + pause < deadline else None

    def _backoff(self, tried: int, chance: float) -> float:
        doubled = self.first_pause * 2.0 ** min(tried - 1, 30)
        return min(doubled, self.longest_pause) * (0.5 + chance / 2)


def retry_after(outcome: HttpReply | LostReply) -> float | None:
    """The pause in seconds that the answer asks for. A time of day counts from the answer's `Date`, not our clock."""
    if isinstance(outcome, LostReply):
        return None
    asked = outcome.headers.get("retry-after", "").strip()
    if asked.isdecimal() and asked.isascii():
        return float(asked)
    until, now = _moment(asked), _moment(outcome.headers.get("date", ""))
    if until is None or now is None:
        return None
    return max(0.0, (until - now).total_seconds())


def _moment(text: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    return None if moment.tzinfo is None else moment
