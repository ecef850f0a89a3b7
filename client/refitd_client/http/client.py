"""The clients of the service: `RefitClient` blocks, `AsyncRefitClient` is awaited. Both have the same methods.

>>> with RefitClient("http://127.0.0.1:8700") as client:
...     version = client.announce(Notice(run="exp/trial", step=123))
...     client.wait(version.id, timeout=60).outcome
<WaitOutcome.SERVED: 'served'>

>>> async with AsyncRefitClient("http://127.0.0.1:8700") as client:
...     version = await client.announce(Notice(run="exp/trial", step=123))
...     await client.wait(version.id, timeout=60)

What a method sends and when it tries again is written once, as a generator (`Steps`): it yields the calls to send and
the pauses to make, and returns the result. Each client only carries that out, with httpx's own client and its own way
to sleep.

Threads may share one `RefitClient`, tasks of one event loop one `AsyncRefitClient`. A request that failed is sent again
as `RetryPolicy` says. Errors of each method: `ServiceUnreachableError` where no answer comes (or one that no refitd
service gives), and the `ServiceProblemError` that the service's problem document stands for: `UnauthorizedError`,
`NotFoundError`, `ConflictError`, …
"""

import asyncio
import inspect
import os
import random
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AsyncExitStack, ExitStack
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeAlias, TypeVar, cast, get_args, overload

import httpx

from refitd_client.contract.states import WaitOutcome
from refitd_client.contract.wire import Event, WaitResult
from refitd_client.errors import ServiceError, ServiceProblemError
from refitd_client.http import routes
from refitd_client.http.bounds import ONE_CALL_EACH, async_body_of, body_of, ending_within
from refitd_client.http.connection import connect_to
from refitd_client.http.exchange import (
    TOO_MANY,
    EventReader,
    HttpReply,
    LostReply,
    RetryPolicy,
    StreamRetry,
    asks_for_another,
    failure,
    http_request,
    is_event_stream,
    late_reply,
    lost_reply,
    quietly,
    read_outcome,
    reply_of,
    seconds_of,
    stream_request,
)
from refitd_client.http.routes import Call, ResultT, WaitFor
from refitd_client.http.tls import async_tls, blocking_transport, no_certificates

# The longest single poll: below the 30 to 60 s after which proxies give up on a silent connection.
_LONGEST_POLL = 25.0
# A service that says "pending" before the time is up is about to stop. Seconds before it is asked again.
_EARLY_PAUSE = 0.25

P = ParamSpec("P")
R = TypeVar("R")
Steps: TypeAlias = Generator[Call[Any] | float, HttpReply | LostReply, R]
"""Yields calls, each answered by its outcome, and pauses in seconds; returns the result."""


class ClientMethod(Generic[P, R]):
    """A method of both clients, as type checkers see it: a blocking one of `RefitClient`, else a coroutine's."""

    @overload
    def __get__(self, client: "RefitClient", owner: type) -> Callable[P, R]: ...
    @overload
    def __get__(self, client: "AsyncRefitClient", owner: type) -> Callable[P, Coroutine[Any, Any, R]]: ...
    @overload
    def __get__(self, client: None, owner: type) -> Callable[..., Any]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        raise NotImplementedError  # `method` and `request` return plain functions


def method(steps: Callable[Concatenate[Any, P], Steps[R]]) -> ClientMethod[P, R]:
    """A method of both clients from the steps that it takes."""

    @wraps(steps)
    def run(client: "_Client", /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return client._run(steps(client, *args, **kwargs))  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    signature = inspect.signature(steps)
    *_, result = get_args(signature.return_annotation)
    shown = None if result is type(None) else result
    run.__signature__ = signature.replace(return_annotation=shown)  # pyright: ignore[reportAttributeAccessIssue]
    return cast("ClientMethod[P, R]", run)


def request(describe: Callable[P, Call[R]]) -> ClientMethod[P, R]:
    """A method of both clients that sends one call, with the signature and the docstring of the call's description."""

    @wraps(describe)
    def steps(client: "_Client", /, *args: P.args, **kwargs: P.kwargs) -> Steps[R]:
        return client._send(describe(*args, **kwargs))  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    signature, client = inspect.signature(describe), inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [client, *signature.parameters.values()]
    steps.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return method(steps)


class _Client:
    """What both clients have: where the service is, when to try again, and the methods."""

    def __init__(
        self,
        service_url: str | None,
        *,
        token: str | None,
        token_file: str | os.PathLike[str] | None,
        timeout: float,
        retry: RetryPolicy | None,
    ) -> None:
        self._connection = connect_to(service_url, token=token, token_file=token_file)
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        # Proxies and .netrc of the environment are not for a sidecar next door, and would see the token.
        self._httpx: dict[str, Any] = {
            "trust_env": False,
            "follow_redirects": False,
            "verify": no_certificates(),
            "limits": ONE_CALL_EACH,
        }

    @property
    def url(self) -> str:
        """The service's URL; of a group that of the service that is asked now."""
        return self._connection.url

    announce = request(routes.announce)
    versions = request(routes.versions)
    version = request(routes.version)

    @method
    def wait(self, version_id: str, wait_for: WaitFor = "served", timeout: float = 30.0) -> Steps[WaitResult]:
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
                result = yield from self._send(call, self._retry.waiting(ends - began))
            except ServiceProblemError as error:
                if error.problem.slug != TOO_MANY:
                    raise
                known = routes.wait(version_id, wait_for, 0.0)
                result = yield from self._send(known, self._retry.within(ends - time.monotonic()))
            now = time.monotonic()
            if result.outcome is not WaitOutcome.PENDING or now >= ends:
                return result
            if now - began < asked / 2:
                yield min(_EARLY_PAUSE, ends - now)

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

    @method
    def healthy(self) -> Steps[bool]:
        """Whether the service answers. Asks once."""
        return (yield from self._says_yes(routes.probe("/healthz")))

    @method
    def ready(self) -> Steps[bool]:
        """Whether the service is ready: its journal can be written, and it has listed the root. Asks once."""
        return (yield from self._says_yes(routes.probe("/readyz")))

    def _says_yes(self, call: Call[None]) -> Steps[bool]:
        try:
            yield from self._send(call, self._retry.within(0))
        except ServiceError:
            return False
        return True

    def _send(self, call: Call[ResultT], policy: RetryPolicy | None = None) -> Steps[ResultT]:
        policy = policy or self._retry
        began, tried = time.monotonic(), 0
        while True:
            outcome = yield call
            tried += 1
            if self._moved_on(call, outcome) and tried % (1 + len(self._connection.others)):
                continue
            elapsed, chance = time.monotonic() - began, random.random()  # noqa: S311 - jitter is no secret
            pause = policy.pause(call, outcome, tried=tried, elapsed=elapsed, chance=chance)
            if pause is None:
                return read_outcome(call, outcome)
            yield pause

    def _moved_on(self, call: Call[Any], outcome: HttpReply | LostReply) -> bool:
        """Ask the next service of the group from now on, if this one does not answer or does not lead."""
        if not self._connection.others or not asks_for_another(call, outcome):
            return False
        self._connection = self._connection.moved_on()
        return True

    def _run(self, steps: Steps[Any]) -> Any:
        raise NotImplementedError  # the blocking client and the coroutines' each have their own

    def _pause_of_stream(self, reader: EventReader, stream_retry: StreamRetry, outcome: HttpReply | LostReply) -> float:
        """Seconds before the event stream is opened again, or the error that ends it."""
        self._moved_on(routes.events(), outcome)
        pause = stream_retry.pause(outcome, time.monotonic(), random.random())  # noqa: S311 - jitter is no secret
        if pause is None:
            raise failure(routes.events(), outcome)
        return max(pause, reader.pause)


class RefitClient(_Client):
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
        super().__init__(service_url, token=token, token_file=token_file, timeout=timeout, retry=retry)
        self._http = httpx.Client(
            transport=transport or blocking_transport(self._connection.service_url), **self._httpx
        )

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, steps: Steps[R]) -> R:
        try:
            step = next(steps)
            while True:
                if isinstance(step, Call):
                    step = steps.send(self._try(step))
                else:
                    time.sleep(step)
                    step = next(steps)
        except StopIteration as end:
            return end.value

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
        reader, stream_retry = EventReader(self.url, last_event_id), StreamRetry(self._retry, time.monotonic())
        while True:
            reader.start()
            arguments = stream_request(self._connection, reader.headers, self._timeout)
            call, within = routes.events(), seconds_of(routes.events(), self._timeout)
            outcome: HttpReply | LostReply
            outcome = LostReply(url=arguments["url"], sent=True, reason="the event stream ended")
            try:
                with ExitStack() as opened:
                    with quietly(), ending_within(within):  # until it is open
                        response = opened.enter_context(self._http.stream(**arguments))
                        if response.status_code == 204:
                            return
                        if not is_event_stream(response):
                            outcome = reply_of(response, body_of(response, call.most))
                    if is_event_stream(response):
                        stream_retry.opened()
                        for chunk in response.iter_bytes():
                            yield from reader.feed(chunk)
            except TimeoutError:
                outcome = late_reply(arguments["url"], within)
            except httpx.RequestError as error:
                outcome = lost_reply(arguments["url"], error)
            time.sleep(self._pause_of_stream(reader, stream_retry, outcome))


class AsyncRefitClient(_Client):
    """Talks to one service. Close it, or use it as a context manager, to give its connections back."""

    def __init__(
        self,
        service_url: str | None = None,
        *,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        timeout: float = 10.0,
        transport: httpx.AsyncBaseTransport | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Settle on a service. Nothing is sent yet. Arguments and errors are those of `RefitClient`."""
        super().__init__(service_url, token=token, token_file=token_file, timeout=timeout, retry=retry)
        self._http = httpx.AsyncClient(transport=transport or async_tls(self._connection.service_url), **self._httpx)

    async def aclose(self) -> None:
        """Give the connections back."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _run(self, steps: Steps[R]) -> R:
        try:
            step = next(steps)
            while True:
                if isinstance(step, Call):
                    step = steps.send(await self._try(step))
                else:
                    await asyncio.sleep(step)
                    step = next(steps)
        except StopIteration as end:
            return end.value

    async def _try(self, call: Call[Any]) -> HttpReply | LostReply:
        # In a thread: it may read the token file.
        arguments = await asyncio.to_thread(http_request, self._connection, call, self._timeout)
        within = seconds_of(call, self._timeout)
        try:
            with quietly():
                async with asyncio.timeout(within), self._http.stream(**arguments) as response:
                    return reply_of(response, await async_body_of(response, call.most))
        except TimeoutError:
            return late_reply(arguments["url"], within)
        except httpx.RequestError as error:
            return lost_reply(arguments["url"], error)

    async def events(self, last_event_id: str | None = None) -> AsyncGenerator[Event, None]:
        """The service's events as they come, without end: those after `last_event_id`, else from now on.

        A broken stream is resumed where it broke off. Close the generator (`contextlib.aclosing`) to hang up.
        """
        reader, stream_retry = EventReader(self.url, last_event_id), StreamRetry(self._retry, time.monotonic())
        while True:
            reader.start()
            arguments = await asyncio.to_thread(stream_request, self._connection, reader.headers, self._timeout)
            call, within = routes.events(), seconds_of(routes.events(), self._timeout)
            outcome: HttpReply | LostReply
            outcome = LostReply(url=arguments["url"], sent=True, reason="the event stream ended")
            try:
                async with AsyncExitStack() as opened:
                    with quietly():
                        async with asyncio.timeout(within):  # until it is open
                            response = await opened.enter_async_context(self._http.stream(**arguments))
                            if response.status_code == 204:
                                return
                            if not is_event_stream(response):
                                outcome = reply_of(response, await async_body_of(response, call.most))
                    if is_event_stream(response):
                        stream_retry.opened()
                        async for chunk in response.aiter_bytes():
                            for event in reader.feed(chunk):
                                yield event
            except TimeoutError:
                outcome = late_reply(arguments["url"], within)
            except httpx.RequestError as error:
                outcome = lost_reply(arguments["url"], error)
            await asyncio.sleep(self._pause_of_stream(reader, stream_retry, outcome))
