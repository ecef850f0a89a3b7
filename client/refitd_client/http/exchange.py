"""One call on its way: the arguments of its HTTP request, what came of it, and the result or error that this is. Pure.

An answer that is not in refitd's form is an error that names its URL.

A try ends in an `HttpReply` or a `LostReply`. What is sent again (`RetryPolicy`):

    never sent (no connection)        always
    sent, reply lost or late          if the call is repeatable
    429, 503                          always: the service says that it did nothing
    502, 504                          if the call is repeatable: a proxy does not know what happened
    any other answer                  never

Of a group of services each is asked at once, in turns, until one leads (`asks_for_another`); then as above.

`Retry-After` is obeyed where an answer has it (RFC 9110, 10.2.3). Otherwise pauses double, with jitter, so that many
trainers that lost one service do not come back at the same moment. No try starts later than `deadline` after the first,
with one exception: a wait for a version goes on for all its time while the service answers 503, because a service that
has just started does not know the version yet.
"""

import logging
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypedDict, cast

import httpx
import msgspec

from refitd_client.backoff import backoff
from refitd_client.contract.decoding import from_json
from refitd_client.contract.wire import Event, Problem
from refitd_client.errors import ServiceError, ServiceUnreachableError, problem_error
from refitd_client.http import routes
from refitd_client.http.bounds import IDENTITY
from refitd_client.http.connection import Connection
from refitd_client.http.routes import Call, ResultT
from refitd_client.http.tls import why_refused

_NOT_YET = 503
_REFUSED_UNDONE = frozenset({429, _NOT_YET})
_PERHAPS_DONE = frozenset({502, 504})
TOO_MANY = "too-many"  # the problem of a service that has as many requests, or waits, as it takes
NOT_LEADING = "not-leading"  # the problem of a service that stands by while another of its group leads


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
        pause = backoff(tried, self.first_pause, self.longest_pause, chance)
        if asked is not None:
            pause = asked + chance * self.first_pause
        deadline = max(self.deadline, self.not_yet) if status == _NOT_YET else self.deadline
        return pause if elapsed + pause < deadline else None


def asks_for_another(call: Call[Any], outcome: HttpReply | LostReply) -> bool:
    """Whether another service of a group is to be asked: this one does not answer, or does not lead."""
    if isinstance(outcome, LostReply):
        return call.repeatable or not outcome.sent
    if outcome.status != _NOT_YET:
        return False
    try:
        return from_json(outcome.body, Problem).slug == NOT_LEADING
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


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


_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_HTTPX = logging.getLogger("httpx")
_QUOTED = 120  # characters of an answer in another form that an error quotes


_asking = ContextVar("refitd_client_asks", default=False)


@contextmanager
def quietly() -> Generator[None]:
    """Leave a request of refitd's out of httpx's log, which has a line for each at level INFO. A trainer's own requests
    stay in it, and so do refitd's where the trainer asks httpx for DEBUG.
    """
    _HTTPX.addFilter(_is_wanted)  # once: adding it again changes nothing
    token = _asking.set(True)
    try:
        yield
    finally:
        _asking.reset(token)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not _asking.get() or record.levelno > logging.INFO or _HTTPX.isEnabledFor(logging.DEBUG)


class HttpArguments(TypedDict):
    """The arguments of `httpx.Client.request` and `stream`."""

    method: str
    url: str
    params: dict[str, str]
    headers: dict[str, str]
    content: bytes | None
    timeout: httpx.Timeout


def http_request(connection: Connection, call: Call[Any], timeout: float) -> HttpArguments:
    """The HTTP request of a call. Reads the token file, if there is one: see `Connection.headers` for the errors.

    Args:
        connection: where the service is, and its token.
        call: the call.
        timeout: seconds for each step of the request; the service's time to think (`call.patience`) is added.
    """
    has_body = call.body is not None
    headers = connection.headers() | ({"Content-Type": "application/json"} if has_body else {})
    return HttpArguments(
        method=call.method,
        url=connection.url + call.path,
        params=call.params,
        headers=headers | {"Accept": "application/json"} | IDENTITY,
        content=msgspec.json.encode(call.body) if has_body else None,
        timeout=httpx.Timeout(timeout, read=timeout + call.patience),
    )


def stream_request(connection: Connection, resume: Mapping[str, str], timeout: float) -> HttpArguments:
    """The HTTP request that opens the event stream.

    Args:
        connection: where the service is, and its token.
        resume: the headers that say after which event the stream resumes.
        timeout: seconds to connect and to send.
    """
    request = http_request(connection, routes.events(), timeout)
    request["headers"] = {**request["headers"], **resume}
    request["timeout"] = httpx.Timeout(timeout, read=SILENCE)
    return request


def is_event_stream(response: httpx.Response) -> bool:
    """Whether the body of a response is an event stream."""
    return response.status_code == 200 and response.headers.get("content-type", "").startswith("text/event-stream")


def seconds_of(call: Call[Any], timeout: float) -> float:
    """The seconds for a whole try: to connect and send, and for the answer.

    Args:
        call: the call.
        timeout: seconds for each step.
    """
    return 2 * timeout + call.patience


def reply_of(response: httpx.Response, body: bytes) -> HttpReply:
    """A response with this body."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    return HttpReply(url=str(response.url), status=response.status_code, headers=headers, body=body)


def late_reply(url: str, within: float) -> LostReply:
    """A try that took too long in all."""
    return LostReply(url=url, sent=True, reason=f"it did not answer in whole within {within:g} s")


def lost_reply(url: str, error: httpx.RequestError) -> LostReply:
    """What httpx raised, as an outcome: the request may have been carried out unless it never left."""
    reason = why_refused(error) or str(error) or type(error).__name__
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):  # in plain words: Python's name the errno
            reason = "connection refused (is refitd running there?)"
        cause = cause.__cause__ or cause.__context__
    return LostReply(url=url, sent=not isinstance(error, _NEVER_SENT), reason=reason)


def read_outcome(call: Call[ResultT], outcome: HttpReply | LostReply) -> ResultT:
    """The result of a call.

    Raises:
        ServiceProblemError: the service answered with a problem document, or a proxy wants a login (401, 403).
        ServiceUnreachableError: no answer came, or one that no refitd service gives.
    """
    if isinstance(outcome, LostReply) or not 200 <= outcome.status < 300:
        raise failure(call, outcome)
    if call.result is type(None):
        return cast("ResultT", None)
    try:
        return from_json(outcome.body, call.result)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ServiceUnreachableError(
            f"{outcome.url} answered HTTP {outcome.status} in a form that this client does not know ({error}): "
            f"{_quoted(outcome)}; is this refitd's URL, and is the service as new as the client?"
        ) from error


def failure(call: Call[Any], outcome: HttpReply | LostReply) -> ServiceError:
    """The error that an outcome other than 2xx stands for."""
    if isinstance(outcome, LostReply):
        perhaps = " after it was sent, so it may have been carried out" if outcome.sent else ""
        return ServiceUnreachableError(f"{call.method} {outcome.url} got no answer{perhaps}: {outcome.reason}")
    if 300 <= outcome.status < 400:
        target = outcome.headers.get("location", "elsewhere")
        return ServiceUnreachableError(
            f"{outcome.url} redirects to {target} (HTTP {outcome.status}); redirects are not followed, because the "
            "token would go along: give the service's own URL"
        )
    try:
        return problem_error(from_json(outcome.body, Problem))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        answered = f"{outcome.url} answered HTTP {outcome.status}, but not as refitd does: {_quoted(outcome)}"
    if outcome.status not in {401, 403}:
        return ServiceUnreachableError(f"{answered}; is this refitd's URL, and the proxy before it in order?")
    detail = f"{answered}; a proxy before the service seems to want a login"
    return problem_error(Problem(type="about:blank", title="Not authorised", status=outcome.status, detail=detail))


def _quoted(reply: HttpReply) -> str:
    text = " ".join(reply.body[: 4 * _QUOTED].decode("utf-8", "replace").split())
    kind = reply.headers.get("content-type", "no content type").partition(";")[0]
    return f"{kind}, {text[:_QUOTED]!r}"


MAX_EVENT_BYTES = 2**20
# The service sends a comment every few seconds: a stream that is silent for this long is dead.
SILENCE = 60.0

_LINE_END = re.compile(rb"\r\n|\n|\r")


class BadStreamError(ServiceUnreachableError):
    """What came is not refitd's event stream."""


class EventReader:
    """Reads one stream of server-sent events over any number of connections. Pure: bytes in, events out.

    The format is WHATWG's (https://html.spec.whatwg.org/multipage/server-sent-events.html): lines `field: value`, an
    empty line ends an event, `id` is what `Last-Event-ID` takes on the next connection, `retry` is a pause in
    milliseconds. The data of each event is one `Event` in JSON. Two reasons against a library: httpx's own lines also
    end at characters such as U+2028 that JSON may hold, and httpx-sse (0.4.3) keeps an event of any length in memory,
    while this reader refuses one above `MAX_EVENT_BYTES`.

    `last_event_id` is what the next connection resumes after, `pause` how many seconds the service asks to wait before
    that connection.
    """

    def __init__(self, url: str, last_event_id: str | None = None) -> None:
        self._url = url
        self.last_event_id = last_event_id
        self.pause = 0.0
        self.start()

    def start(self) -> None:
        """Begin a connection: drop the half of an event that the one before left behind."""
        self._rest = b""
        self._data: list[bytes] = []
        self._id = self.last_event_id

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the request that (re)opens the stream."""
        resume = {} if self.last_event_id is None else {"Last-Event-ID": self.last_event_id}
        return {"Accept": "text/event-stream", "Cache-Control": "no-store", **resume}

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Yield the events that end in this chunk. `last_event_id` moves as each is yielded, and not before.

        Raises:
            BadStreamError: an event is not in refitd's form, or longer than `MAX_EVENT_BYTES`.
        """
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        if chunk.endswith(b"\r"):  # half of \r\n, or a whole line end: the next byte decides
            self._rest = lines.pop() + b"\r"
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise BadStreamError(f"{self._url} sends an event longer than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line:
                self._take(line)
            elif (event := self._end()) is not None:
                yield event

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._data.append(value)
            case b"id" if b"\0" not in value:
                self._id = value.decode("ascii", "ignore") or None
            case b"retry" if value.isdigit():
                self.pause = min(int(value[:9]) / 1000, 60.0)
            case _:
                pass  # comments and unknown fields are ignored, as the format asks

    def _end(self) -> Event | None:
        data, self._data = b"\n".join(self._data), []
        self.last_event_id = self._id
        if not data:
            return None
        try:
            return from_json(data, Event)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadStreamError(
                f"{self._url} sends an event in a form that this client does not know: {error}"
            ) from error


class StreamRetry:
    """Decides when to open a broken stream again. Only time without a stream counts against the deadline."""

    def __init__(self, policy: RetryPolicy, now: float) -> None:
        self._policy = policy
        self._since = now
        self._tried = 0
        self._opened = False

    def opened(self) -> None:
        """Note that a stream has begun."""
        self._opened = True

    def pause(self, outcome: HttpReply | LostReply, now: float, chance: float) -> float | None:
        """The pause before the next connection, in seconds; None to give up.

        Args:
            outcome: how the last connection ended.
            now: the monotonic clock, in seconds.
            chance: random, in [0, 1), for the jitter.
        """
        if self._opened:
            self._tried, self._since, self._opened = 0, now, False
        self._tried += 1
        elapsed = now - self._since
        return self._policy.pause(routes.events(), outcome, tried=self._tried, elapsed=elapsed, chance=chance)
