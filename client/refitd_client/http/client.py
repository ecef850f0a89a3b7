"""The client of the service.

>>> with RefitClient("http://127.0.0.1:8700") as client:
...     version = client.announce(Notice(run="exp/trial", step=123))
...     client.wait(version.id, timeout=60).outcome
<WaitOutcome.SERVED: 'served'>

Threads may share one. A request that failed is sent again as `RetryPolicy` says. Errors of each method:
`ServiceUnreachableError` where no answer comes (or one that no refitd service gives), and the `ServiceProblemError`
that the service's problem document stands for: `UnauthorizedError`, `NotFoundError`, `ConflictError`, …
"""

import inspect
import os
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, get_args

import httpx
import msgspec

from refitd_client.contract.decoding import from_json
from refitd_client.contract.states import WaitOutcome
from refitd_client.contract.wire import Event, WaitResult
from refitd_client.errors import ServiceError, ServiceProblemError, ServiceUnreachableError
from refitd_client.http import routes
from refitd_client.http.connection import (
    ONE_CALL_EACH,
    Connection,
    blocking_transport,
    body_of,
    connect_to,
    ending_within,
    no_certificates,
)
from refitd_client.http.exchange import (
    TOO_MANY,
    HttpArguments,
    HttpReply,
    LostReply,
    RetryPolicy,
    asks_for_another,
    failure,
    http_request,
    late_reply,
    lost_reply,
    quietly,
    read_outcome,
    reply_of,
    seconds_of,
)
from refitd_client.http.routes import Call, ResultT, WaitFor

# The longest single poll: below the 30 to 60 s after which proxies give up on a silent connection.
_LONGEST_POLL = 25.0
# A service that says "pending" before the time is up is about to stop. Seconds before it is asked again.
_EARLY_PAUSE = 0.25
_EVENT_STREAM = routes.events()

P = ParamSpec("P")
R = TypeVar("R")


def request(describe: Callable[P, Call[R]]) -> Callable[Concatenate["RefitClient", P], R]:
    """A method that sends one call, with the signature and the docstring of the call's description."""

    @wraps(describe)
    def ask(client: "RefitClient", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return client._send(describe(*args, **kwargs))  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    signature, client = inspect.signature(describe), inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    (result,) = get_args(signature.return_annotation)
    ask.__signature__ = signature.replace(  # pyright: ignore[reportAttributeAccessIssue]
        parameters=[client, *signature.parameters.values()],
        return_annotation=None if result is type(None) else result,
    )
    return ask


class RefitClient:
    """Talks to one service. Close it, or use it as a context manager, to give its connections back."""

    def __init__(
        self,
        service_url: str | None = None,
        *,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        timeout: float = 10.0,
        transport: httpx.BaseTransport | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Settle on a service. Nothing is sent yet.

        Args:
            service_url: such as `http://127.0.0.1:8700`; else `REFITD_URL`, else that. Of a group the URLs of its
                services, separated by commas: the one that leads is found.
            token: the bearer token; else `token_file`, `REFITD_TOKEN`, `REFITD_TOKEN_FILE`.
            token_file: holds the token, and is read again for each request.
            timeout: seconds for each try to connect, to send, and to get the next byte of the answer. All of a try
                takes twice as long at most, besides what the service is asked to wait.
            transport: replaces the network, for tests.
            retry: how long to try again; 30 seconds by default.

        Raises:
            ValueError: the URL or the token cannot be one.
        """
        self._connection = connect_to(service_url, token=token, token_file=token_file)
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._http = httpx.Client(
            transport=transport or blocking_transport(self._connection.service_url), **httpx_options()
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The service's URL; of a group that of the service that is asked now."""
        return self._connection.url

    announce = request(routes.announce)
    versions = request(routes.versions)
    version = request(routes.version)

    def wait(self, version_id: str, wait_for: WaitFor = "served", timeout: float = 30.0) -> WaitResult:
        """Wait until a version is served, has failed or was superseded.

        The outcome is `PENDING` when the time is up. A restart of the service in between does not end the wait, and
        a service that does not know the version yet, since it has just started, is asked again. So is one for which
        too many wait already: at the end it says how far the version is all the same.

        Args:
            version_id: the version.
            wait_for: `served`; or `sealed`: the service has found it good; or `taken`: no engine copies it from its
                trainer's memory any more, or will, whatever happens to it then.
            timeout: seconds.
        """
        ends = time.monotonic() + timeout
        while True:
            began = time.monotonic()
            asked = min(max(0.0, ends - began), _LONGEST_POLL)
            call = routes.wait(version_id, wait_for, asked)
            try:
                result = self._send(call, self._retry.waiting(ends - began))
            except ServiceProblemError as error:
                if error.problem.slug != TOO_MANY:
                    raise
                known = routes.wait(version_id, wait_for, 0.0)
                result = self._send(known, self._retry.within(ends - time.monotonic()))
            now = time.monotonic()
            if result.outcome is not WaitOutcome.PENDING or now >= ends:
                return result
            if now - began < asked / 2:
                time.sleep(min(_EARLY_PAUSE, ends - now))

    pin = request(routes.pin)
    unpin = request(routes.unpin)
    rollback = request(routes.rollback)
    rollback_plan = request(routes.rollback_plan)
    attempts = request(routes.attempts)
    history = request(routes.history)
    engine_history = request(routes.engine_history)
    pause = request(routes.pause)
    resume = request(routes.resume)
    overview = request(routes.overview)
    log = request(routes.log)
    engines = request(routes.engines)
    engine = request(routes.engine)
    receivers = request(routes.receivers)
    add_engine = request(routes.add_engine)
    move_engines = request(routes.move_engines)
    close_run = request(routes.close_run)
    reopen_run = request(routes.reopen_run)
    delete_run = request(routes.delete_run)
    remove_engine = request(routes.remove_engine)
    resync = request(routes.resync)
    reclaim_plan = request(routes.reclaim_plan)
    reclaim = request(routes.reclaim)
    explain = request(routes.explain)
    report = request(routes.report)

    def healthy(self) -> bool:
        """Whether the service answers. Asks once."""
        return self._says_yes(routes.probe("/healthz"))

    def ready(self) -> bool:
        """Whether the service is ready: its journal can be written, and it has listed the root. Asks once."""
        return self._says_yes(routes.probe("/readyz"))

    def _says_yes(self, call: Call[None]) -> bool:
        try:
            self._send(call, self._retry.within(0))
        except ServiceError:
            return False
        return True

    def _send(self, call: Call[ResultT], policy: RetryPolicy | None = None) -> ResultT:
        policy = policy or self._retry
        began, tried = time.monotonic(), 0
        while True:
            outcome = self._try(call)
            tried += 1
            if self._moved_on(call, outcome) and tried % (1 + len(self._connection.others)):
                continue
            elapsed, chance = time.monotonic() - began, random.random()  # noqa: S311 - jitter is no secret
            pause = policy.pause(call, outcome, tried=tried, elapsed=elapsed, chance=chance)
            if pause is None:
                return read_outcome(call, outcome)
            time.sleep(pause)

    def _moved_on(self, call: Call[Any], outcome: HttpReply | LostReply) -> bool:
        """Ask the next service of the group from now on, if this one does not answer or does not lead."""
        if not self._connection.others or not asks_for_another(call, outcome):
            return False
        self._connection = self._connection.moved_on()
        return True

    def _try(self, call: Call[Any]) -> HttpReply | LostReply:
        arguments, within = http_request(self._connection, call, self._timeout), seconds_of(call, self._timeout)
        try:
            with quietly(), ending_within(within), self._http.stream(**arguments) as response:
                return reply_of(response, body_of(response, call.most))
        except TimeoutError:
            return late_reply(arguments["url"], within)
        except httpx.RequestError as error:
            return lost_reply(arguments["url"], error)

    def events(self, last_event_id: str | None = None) -> Generator[Event, None, None]:
        """The service's events as they come, without end: those after `last_event_id`, else from now on.

        A broken stream is resumed where it broke off. Close the generator (`contextlib.closing`) to hang up.
        """
        reader, tried, since = EventReader(self.url, last_event_id), 0, time.monotonic()
        while True:
            reader.start()
            opened_it = False
            arguments = stream_request(self._connection, reader.headers, self._timeout)
            within = seconds_of(_EVENT_STREAM, self._timeout)
            outcome: HttpReply | LostReply
            outcome = LostReply(url=arguments["url"], sent=True, reason="the event stream ended")
            try:
                with ExitStack() as opened:
                    with quietly(), ending_within(within):  # until it is open
                        response = opened.enter_context(self._http.stream(**arguments))
                        if response.status_code == 204:
                            return
                        if not is_event_stream(response):
                            outcome = reply_of(response, body_of(response, _EVENT_STREAM.most))
                    if is_event_stream(response):
                        opened_it = True
                        for chunk in response.iter_bytes():
                            yield from reader.feed(chunk)
            except TimeoutError:
                outcome = late_reply(arguments["url"], within)
            except httpx.RequestError as error:
                outcome = lost_reply(arguments["url"], error)
            self._moved_on(_EVENT_STREAM, outcome)
            if opened_it:  # only time without a stream counts against the deadline
                tried, since = 0, time.monotonic()
            tried += 1
            elapsed, chance = time.monotonic() - since, random.random()  # noqa: S311 - jitter is no secret
            pause = self._retry.pause(_EVENT_STREAM, outcome, tried=tried, elapsed=elapsed, chance=chance)
            if pause is None:
                raise failure(_EVENT_STREAM, outcome)
            time.sleep(pause)


def httpx_options() -> dict[str, Any]:
    # Proxies and .netrc of the environment are not for a sidecar next door, and would see the token.
    return {"trust_env": False, "follow_redirects": False, "verify": no_certificates(), "limits": ONE_CALL_EACH}


def stream_request(connection: Connection, resume: Mapping[str, str], timeout: float) -> HttpArguments:
    """The HTTP request that opens the event stream; `resume` are the headers that say after which event."""
    request = http_request(connection, _EVENT_STREAM, timeout)
    request["headers"] = {**request["headers"], **resume}
    request["timeout"] = httpx.Timeout(timeout, read=SILENCE)
    return request


def is_event_stream(response: httpx.Response) -> bool:
    return response.status_code == 200 and response.headers.get("content-type", "").startswith("text/event-stream")


MAX_EVENT_BYTES = 2**20
# The service sends a comment every few seconds: a stream that is silent for this long is dead.
SILENCE = 60.0


class BadStreamError(ServiceUnreachableError):
    """What came is not refitd's event stream."""


class EventReader:
    """Reads one stream of server-sent events over any number of connections. Pure: bytes in, events out.

    The format is WHATWG's (https://html.spec.whatwg.org/multipage/server-sent-events.html), as the service writes it:
    lines `field: value`, an empty line ends an event, `id` is what `Last-Event-ID` takes on the next connection. The
    data of each event is one `Event` in JSON. Two reasons against a library: httpx's own lines also end at characters
    such as U+2028 that JSON may hold, and httpx-sse (0.4.3) keeps an event of any length in memory.

    The next connection resumes after `last_event_id`.
    """

    def __init__(self, url: str, last_event_id: str | None = None) -> None:
        self._url = url
        self.last_event_id = last_event_id
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
        """Yield the events that end in this chunk. `last_event_id` moves as each is yielded, and not before. Raises
        BadStreamError if an event is not in refitd's form, or longer than `MAX_EVENT_BYTES`.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise BadStreamError(f"{self._url} sends an event longer than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            name, _, value = line.removesuffix(b"\r").partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                self._data.append(value)
            elif name == b"id" and b"\0" not in value:
                self._id = value.decode("ascii", "ignore") or None
            elif line in {b"", b"\r"} and (event := self._end()) is not None:
                yield event

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
