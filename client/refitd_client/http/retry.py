"""When to send a request again: pure. One try's outcome goes in; out comes a pause in seconds, or None to give up.

A try ends in an `Answer` or is `Lost`. What is tried again:

    never sent (no connection)        always
    sent, reply lost or late          if the call is repeatable
    429, 503                          always: the service says that it did nothing
    502, 504                          if the call is repeatable: a proxy does not know what happened
    any other answer                  never

`Retry-After` is obeyed where an answer has it (RFC 9110, 10.2.3). Otherwise pauses double, with jitter, so that many
trainers that lost one service do not come back in step. No try starts later than `deadline` after the first; but a wait
for a version goes on for all its time while the service answers 503, since the service does not know the version yet.
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
class Answer:
    """An answer from whoever listens there. `headers` has lower-case names."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """No (whole) answer came. `sent` says that the request may have been carried out."""

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
        self, call: Call[Any], outcome: Answer | Lost, *, tried: int, elapsed: float, chance: float
    ) -> float | None:
        """The pause before the next try, None if there is to be none.

        `tried` counts the tries so far, `elapsed` is the time since the first began, `chance` is random in [0, 1).
        """
        if not may_repeat(call, outcome):
            return None
        asked = retry_after(outcome)
        pause = self._backoff(tried, chance) if asked is None else asked + chance * self.first_pause
        is_not_yet = isinstance(outcome, Answer) and outcome.status == _NOT_YET
        deadline = max(self.deadline, self.not_yet) if is_not_yet else self.deadline
        return pause if elapsed + pause < deadline else None

    def _backoff(self, tried: int, chance: float) -> float:
        doubled = self.first_pause * 2.0 ** min(tried - 1, 30)
        return min(doubled, self.longest_pause) * (0.5 + chance / 2)


def may_repeat(call: Call[Any], outcome: Answer | Lost) -> bool:
    """Whether the same call may be sent again after this outcome."""
    match outcome:
        case Lost():
            return call.repeatable or not outcome.sent
        case Answer():
            return outcome.status in _REFUSED_UNDONE or (call.repeatable and outcome.status in _PERHAPS_DONE)


def retry_after(outcome: Answer | Lost) -> float | None:
    """The pause in seconds that the answer asks for. A time of day counts from the answer's `Date`, not our clock."""
    if isinstance(outcome, Lost):
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
