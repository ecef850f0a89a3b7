"""What both clients share around httpx: how a request is built, and how what httpx raises becomes an outcome."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import httpx
import msgspec

from refitd_client.http import routes
from refitd_client.http.connection import Connection
from refitd_client.http.events import SILENCE
from refitd_client.http.retry import Answer, Lost
from refitd_client.http.routes import Call

# The longest single poll: below the 30 to 60 s after which proxies give up on a silent connection.
LONGEST_POLL = 25.0
# A service that says "pending" before the time is up is about to stop: let it.
EARLY_PAUSE = 0.25
# A connection is not used twice: an answer that a proxy on the way repeats would be taken for that of the next call.
ONE_CALL_EACH = httpx.Limits(max_keepalive_connections=0)

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class Request(TypedDict):
    """The arguments of `httpx.Client.build_request`."""

    method: str
    url: str
    params: dict[str, str]
    headers: dict[str, str]
    content: bytes | None
    timeout: httpx.Timeout


def request_of(connection: Connection, call: Call[Any], timeout: float) -> Request:
    """The request for a call. Reads the token file, if there is one: see `Connection.headers` for what that raises."""
    has_body = call.body is not None
    headers = connection.headers() | ({"Content-Type": "application/json"} if has_body else {})
    return Request(
        method=call.method,
        url=connection.url + call.path,
        params=call.params,
        headers=headers | {"Accept": "application/json"},
        content=msgspec.json.encode(call.body) if has_body else None,
        timeout=httpx.Timeout(timeout, read=timeout + call.patience),
    )


def stream_request_of(connection: Connection, last: Mapping[str, str], timeout: float) -> Request:
    """The request that opens the event stream. `last` are the headers with which it resumes."""
    request = request_of(connection, routes.events(), timeout)
    request["headers"] = {**request["headers"], **last}
    request["timeout"] = httpx.Timeout(timeout, read=SILENCE)
    return request


def is_event_stream(response: httpx.Response) -> bool:
    """Whether what follows are events."""
    return response.status_code == 200 and response.headers.get("content-type", "").startswith("text/event-stream")


def answer_of(response: httpx.Response) -> Answer:
    """An answer whose body was read."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(url=str(response.url), status=response.status_code, headers=headers, body=response.content)


def lost(url: str, error: httpx.RequestError) -> Lost:
    """No answer, and whether the request may have been carried out all the same."""
    return Lost(url=url, sent=not isinstance(error, _NEVER_SENT), reason=_spoken(error))


def _spoken(error: httpx.RequestError) -> str:
    """Why there is no answer; that nobody listens there not in the words of Python, which have its number."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return "connection refused (is refitd running there?)"
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


@dataclass(slots=True)
class LongPoll:
    """A wait of any length, cut into polls. Times are of the monotonic clock."""

    ends: float

    def next_poll(self, now: float) -> float:
        """How long the next poll may last. The first is made even when there is no time at all."""
        return min(max(0.0, self.ends - now), LONGEST_POLL)

    def pause(self, began: float, asked: float, now: float) -> float | None:
        """The pause after a poll that ended "pending", None when the time is up."""
        if now >= self.ends:
            return None
        return min(EARLY_PAUSE, self.ends - now) if now - began < asked / 2 else 0.0
