"""One call on its way: the arguments of its HTTP request, what came of it, and the result or error that this is. Pure.

An answer that is not in refitd's form is an error that names its URL. What an answer to a wait means for the trainer is
returned or raised by `judge`.

A try ends in an `HttpReply` or a `LostReply`. What is sent again (`RetryPolicy`):

    never sent (no connection)        always
    sent, reply lost or late          if the call is repeatable
    429, 503                          always: the service says that it did nothing
    502, 504                          if the call is repeatable: a proxy does not know what happened
    any other answer                  never

Of a group of services each is asked at once, in turns, until one leads (`asks_for_another`); then as above.

A `Retry-After` in seconds is obeyed. Otherwise pauses double, with jitter, so that many trainers that lost one service
do not come back at the same moment. No try starts later than `deadline` after the first, with one exception: a wait for
a version goes on for all its time while the service answers 503, because a service that has just started does not know
the version yet.
"""

import logging
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypedDict, assert_never, cast

import httpx
import msgspec

from refitd_client.backoff import backoff
from refitd_client.contract.decoding import from_json
from refitd_client.contract.states import EngineState, VersionState, WaitOutcome
from refitd_client.contract.wire import EngineOnVersion, Problem, Version, WaitResult
from refitd_client.errors import (
    EngineFailedError,
    RefitError,
    ServiceError,
    ServiceUnreachableError,
    VersionFailedError,
    VersionLostError,
    VersionRejectedError,
    WaitTimeoutError,
    problem_error,
)
from refitd_client.http.connection import IDENTITY, Connection, why_refused
from refitd_client.http.routes import Call, ResultT

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
        return replace(self, deadline=max(0.0, min(self.deadline, seconds)))

    def waiting(self, seconds: float) -> "RetryPolicy":
        """The same for a wait of `seconds`, which goes on while the service does not know the version yet."""
        return replace(self.within(seconds), not_yet=seconds)

    def pause(
        self, call: Call[Any], outcome: HttpReply | LostReply, *, tried: int, elapsed: float, chance: float
    ) -> float | None:
        """The pause before the next try, in seconds; None if there is to be none.

        `tried` is the number of tries so far, `elapsed` are seconds since the first began. `chance` is random, in [0,
        1), for the jitter.
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
    """The pause in seconds that the answer asks for. A date, which refitd never sends, counts for nothing."""
    asked = "" if isinstance(outcome, LostReply) else outcome.headers.get("retry-after", "").strip()
    return float(asked) if asked.isdecimal() and asked.isascii() else None


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
    method: str
    url: str
    params: dict[str, str]
    headers: dict[str, str]
    content: bytes | None
    timeout: httpx.Timeout


def http_request(connection: Connection, call: Call[Any], timeout: float) -> HttpArguments:
    """The HTTP request of a call. Reads the token file, if there is one: see `Connection.headers` for the errors.

    `timeout` are seconds for each step of the request; the service's time to think (`call.patience`) is added.
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


def seconds_of(call: Call[Any], timeout: float) -> float:
    """The seconds for a whole try, of which each step may take `timeout`: to connect and send, and for the answer."""
    return 2 * timeout + call.patience


def reply_of(response: httpx.Response, body: bytes) -> HttpReply:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return HttpReply(url=str(response.url), status=response.status_code, headers=headers, body=body)


def late_reply(url: str, within: float) -> LostReply:
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


_ENGINES_NAMED = 3  # engines that an error names; `laggards` has all of them
_ROLLED_BACK = "it was rolled back from; what the trainer publishes next is served as usual"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """How a wait ended well. `outcome` is served, sealed or superseded; `engines` are those of the run, also those that
    do not answer: `state` and `version` say how each is and what it serves.
    """

    outcome: WaitOutcome
    engines: list[EngineOnVersion]
    version: Version


def judge(result: WaitResult, waited: float, digest: str | None = None) -> Served:
    """Return how a wait of `waited` seconds ended, if it ended well. `digest` is that of what was published, if the
    caller knows it.

    Raises:
        VersionFailedError: the version will not be served, or the service knows other content by its name.
        EngineFailedError: the version is good, and engines did not take it.
        WaitTimeoutError: the wait is over, and the update is not.
    """
    version = result.version
    is_other = digest is not None and version.digest is not None and version.digest != digest
    if is_other and result.outcome is not WaitOutcome.FAILED:
        raise VersionFailedError(
            f"the service knows {version.id} with other content ({version.digest}) than was published ({digest}): it "
            "watches another root, or remembers the run from before its root was emptied; a new publisher begins a "
            "new generation"
        )
    match result.outcome:
        case WaitOutcome.SERVED | WaitOutcome.SEALED | WaitOutcome.TAKEN | WaitOutcome.SUPERSEDED:
            return Served(outcome=result.outcome, engines=version.engines, version=version)
        case WaitOutcome.FAILED:
            raise _of_failed(version)
        case WaitOutcome.PENDING:
            raise _of_pending(version, waited)
        case _:
            assert_never(result.outcome)


def _of_failed(version: Version) -> RefitError:
    reason = version.reason or "the service gives no reason"
    if version.state is VersionState.REJECTED:
        return VersionRejectedError(f"version {version.id} was rejected and no engine has seen it: {reason}")
    if version.barred:
        return VersionFailedError(f"version {version.id} will not be served: {version.reason or _ROLLED_BACK}")
    if version.state is VersionState.LOST:
        return VersionLostError(f"version {version.id} was good, and its files have changed or gone: {reason}")
    failed = tuple(engine for engine in version.engines if engine.state.is_in_trouble)
    if not failed:
        return VersionFailedError(f"version {version.id} will not be served: {reason}")
    return EngineFailedError(
        f"version {version.id} is good, and engines did not take it: {_states_of(failed, version)}", engines=failed
    )


def _of_pending(version: Version, waited: float) -> WaitTimeoutError:
    if version.state.is_open:
        reason = f" ({version.reason})" if version.reason else ""
        failed = tuple(engine for engine in version.engines if engine.state.is_in_trouble)
        states = f"; {_states_of(failed, version)}" if failed else ""
        return WaitTimeoutError(
            f"version {version.id} is still {version.state} after {waited:g} s{reason}{states}", laggards=failed
        )
    late = tuple(engine for engine in version.engines if engine.state is not EngineState.IN_SYNC or not engine.serves)
    laggards = _states_of(late, version) or "no engine of the run is known to the service"
    return WaitTimeoutError(
        f"version {version.id} is not served after {waited:g} s, waiting for: {laggards}", laggards=late
    )


def _states_of(engines: Iterable[EngineOnVersion], version: Version) -> str:
    """Say where a few of the engines are, those that are not in sync first, and count the others."""
    ordered = sorted(engines, key=lambda engine: engine.state is EngineState.IN_SYNC)
    more = len(ordered) - _ENGINES_NAMED
    few = "; ".join(_state_of(engine, version) for engine in ordered[:_ENGINES_NAMED])
    return few + (f"; and {more:,} more" if more > 0 else "")


def _state_of(engine: EngineOnVersion, version: Version) -> str:
    reason = f" ({engine.reason})" if engine.reason else ""
    is_on_other = engine.state is EngineState.IN_SYNC and engine.version not in (None, version.id)
    return f"{engine.id} is {engine.state}{reason}" + (f", and serves {engine.version}" if is_on_other else "")
