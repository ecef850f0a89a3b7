"""One call on its way: the arguments of its HTTP request, what came of it, and the result or error that this is. Pure.

An answer that is not in refitd's form is an error that names its URL.
"""

from collections.abc import Mapping
from typing import Any, TypedDict, cast

import httpx
import msgspec

from refitd_client.contract.wire import Problem
from refitd_client.errors import ServiceError, ServiceUnreachableError, problem_error
from refitd_client.http import routes
from refitd_client.http.connection import Connection
from refitd_client.http.events import SILENCE
from refitd_client.http.retry import HttpReply, LostReply
from refitd_client.http.routes import Call, ResultT

# A connection is not used twice: an answer that a proxy on the way repeats would be taken for that of the next call.
ONE_CALL_EACH = httpx.Limits(max_keepalive_connections=0)

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_QUOTED = 120  # characters of an answer in another form that an error quotes


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
        headers=headers | {"Accept": "application/json"},
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


def reply_of(response: httpx.Response) -> HttpReply:
    """A response whose body was read."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    return HttpReply(url=str(response.url), status=response.status_code, headers=headers, body=response.content)


def lost_reply(url: str, error: httpx.RequestError) -> LostReply:
    """What httpx raised, as an outcome: the request may have been carried out unless it never left."""
    reason = str(error) or type(error).__name__
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
        return msgspec.json.decode(outcome.body, type=call.result)
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
        return problem_error(msgspec.json.decode(outcome.body, type=Problem))
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
