"""The client of the service for asyncio: `RefitClient`, awaited. Its docstrings say what each method does and raises.

>>> async with AsyncRefitClient("http://127.0.0.1:8700") as client:
...     version = await client.announce(Notice(run="exp/trial", step=123))
...     (await client.wait(version.id, timeout=60)).outcome
<WaitOutcome.SERVED: 'served'>

Tasks of one event loop may share one client.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Self

import httpx

from refitd_client.contract.states import VersionState, WaitOutcome
from refitd_client.contract.wire import (
    Attempt,
    Delivery,
    Engine,
    Event,
    Explanation,
    Faults,
    NewEngine,
    Notice,
    Overview,
    Page,
    ReclaimPlan,
    RollbackPlan,
    RunGlance,
    Version,
    WaitResult,
)
from refitd_client.errors import ServiceError
from refitd_client.http import routes
from refitd_client.http.answer import failure, read_outcome
from refitd_client.http.connection import connect_to, tls_of
from refitd_client.http.events import EventReader, Redial
from refitd_client.http.exchange import (
    ONE_CALL_EACH,
    LongPoll,
    answer_of,
    is_event_stream,
    lost,
    request_of,
    stream_request_of,
)
from refitd_client.http.retry import Answer, Lost, RetryPolicy
from refitd_client.http.routes import Call, ResultT, WaitFor


class AsyncRefitClient:
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
        """Settle on a service, without a word to it yet.

        Args:
            service_url: such as `http://127.0.0.1:8700`; else `REFITD_URL`, else that.
            token: the bearer token; else `token_file`, `REFITD_TOKEN`, `REFITD_TOKEN_FILE`.
            token_file: holds the token, and is read again for each request.
            timeout: seconds for each try to connect, to send, and to get the next byte of the answer.
            transport: stands in for the network.
            retry: how long to try again; 30 seconds by default.

        Raises:
            ValueError: the URL or the token cannot be one.
        """
        self._connection = connect_to(service_url, token=token, token_file=token_file)
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        # Proxies and .netrc of the environment are not for a sidecar next door, and would see the token.
        self._http = httpx.AsyncClient(
            transport=transport,
            trust_env=False,
            follow_redirects=False,
            verify=tls_of(self._connection),
            limits=ONE_CALL_EACH,
        )

    @property
    def url(self) -> str:
        """The service's URL."""
        return self._connection.url

    async def aclose(self) -> None:
        """Give the connections back."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def announce(self, notice: Notice) -> Version:
        """Say that weights are ready. Returns once the service has it on disk; the same notice again is harmless."""
        return await self._send(routes.announce(notice))

    async def versions(
        self, run: str | None = None, state: VersionState | None = None, limit: int = 50, cursor: str | None = None
    ) -> Page[Version]:
        """A page of the versions, newest first. `cursor` is `next_cursor` of the page before.

        Within one run they go by generation and step, across runs by when the service first saw them.
        """
        return await self._send(routes.versions(run, state, limit, cursor))

    async def version(self, version_id: str) -> Version:
        """One version."""
        return await self._send(routes.version(version_id))

    async def wait(
        self,
        version_id: str,
        wait_for: WaitFor = "served",
        timeout: float = 30.0,  # noqa: ASYNC109 - the service is told, and answers "pending" when it is over
    ) -> WaitResult:
        """Wait up to `timeout` seconds until a version is served, has failed or was superseded.

        With `wait_for="sealed"` until the service has found it good; with `"taken"` until no engine copies it from its
        trainer's memory any more, or will, whatever becomes of it then.

        The outcome is `PENDING` when the time is up. A restart of the service in between does not end the wait, and
        a service that does not know the version yet, since it has just started, is asked again.
        """
        poll = LongPoll(ends=time.monotonic() + timeout)
        while True:
            began = time.monotonic()
            asked = poll.next_poll(began)
            policy = self._retry.waiting(poll.ends - began)
            result = await self._send(routes.wait(version_id, wait_for, asked), policy)
            pause = poll.pause(began, asked, time.monotonic()) if result.outcome is WaitOutcome.PENDING else None
            if pause is None:
                return result
            await asyncio.sleep(pause)

    async def pin(self, version_id: str) -> Version:
        """Keep a version until it is unpinned."""
        return await self._send(routes.pin(version_id))

    async def unpin(self, version_id: str) -> Version:
        """Leave a version to the keep rules again."""
        return await self._send(routes.unpin(version_id))

    async def rollback(self, run: str, to: str | None = None) -> Version:
        """Bring a run's engines to the version `to`, else to the last good one before the current; returns it.

        Without `to` it is not sent again when the reply is lost, since twice would go back two versions.
        """
        return await self._send(routes.rollback(run, to))

    async def rollback_plan(self, run: str, to: str | None = None) -> RollbackPlan:
        """Where `rollback` would lead, and what it would bar for good. Nothing is done.

        Given its `goal` as `to`, `rollback` goes there and no further back, also where somebody else has been faster.
        """
        return await self._send(routes.rollback_plan(run, to))

    async def attempts(self, version_id: str, limit: int = 500) -> Page[Attempt]:
        """How engines were brought to a version: its newest loads, each with the time of its stages."""
        return await self._send(routes.attempts(version_id, limit))

    async def pause(self, run: str) -> RunGlance:
        """Bring no engine of a run to a newer version until it is resumed."""
        return await self._send(routes.pause(run))

    async def resume(self, run: str) -> RunGlance:
        """Let the rollouts of a run go on."""
        return await self._send(routes.resume(run))

    async def overview(self) -> Overview:
        """Everything at a glance. `event` is where the event stream goes on from there."""
        return await self._send(routes.overview())

    async def log(self, subject: str | None = None, before: str | None = None, limit: int = 50) -> Page[Event]:
        """A page of the log of decisions, newest first. `before` is `next_cursor` of the page before."""
        return await self._send(routes.log(subject, before, limit))

    async def deliveries(self, before: str | None = None, limit: int = 50) -> Page[Delivery]:
        """A page of the webhooks, newest first. `before` is `next_cursor` of the page before."""
        return await self._send(routes.deliveries(before, limit))

    async def engines(self) -> Page[Engine]:
        """The fleet."""
        return await self._send(routes.engines())

    async def engine(self, engine_id: str) -> Engine:
        """One engine."""
        return await self._send(routes.engine(engine_id))

    async def add_engine(self, new: NewEngine) -> Engine:
        """Take an engine into the fleet. It is brought to its run's target at once."""
        return await self._send(routes.add_engine(new))

    async def move_engines(self, engine_ids: Sequence[str], run: str, *, insist: bool = False) -> Page[Engine]:
        """Have engines follow another run from now on, which need not have published yet; returns them.

        They go on serving what they serve until they have loaded that run's target. It outlives restarts.

        Args:
            engine_ids: engines' ids or URLs; all are moved, or none.
            run: the run to follow.
            insist: also where one follows a run that is not closed, which loses it: a `ConflictError` else.
        """
        return await self._send(routes.move_engines(engine_ids, run, insist=insist))

    async def close_run(self, run: str) -> RunGlance:
        """Say that a run has ended: it wants no engines any more, and those that follow it are free for another run.

        Collection keeps its newest good version, with what engines need and what is pinned, and one without a verdict
        if it is newer. It deletes the others. The next version that is published opens it again.
        """
        return await self._send(routes.close_run(run))

    async def reopen_run(self, run: str) -> RunGlance:
        """Take back that a run has ended. What was deleted meanwhile stays deleted."""
        return await self._send(routes.reopen_run(run))

    async def remove_engine(self, engine_id: str) -> None:
        """Let an engine go. It goes on serving what it serves."""
        await self._send(routes.remove_engine(engine_id))

    async def resync(self, engine_id: str) -> Engine:
        """Load an engine again, whatever it claims to serve."""
        return await self._send(routes.resync(engine_id))

    async def reclaim_plan(self) -> ReclaimPlan:
        """What would be deleted and what kept, with the reasons."""
        return await self._send(routes.reclaim_plan())

    async def reclaim(self) -> ReclaimPlan:
        """Delete what nobody needs; returns what was done."""
        return await self._send(routes.reclaim())

    async def explain(self, subject: str) -> Explanation:
        """Why a run (by its name), a version (its id) or an engine (its id or URL) is where it is."""
        return await self._send(routes.explain(subject))

    async def faults(self) -> Faults:
        """What the service cannot do now, and why."""
        return await self._send(routes.faults())

    async def healthy(self) -> bool:
        """Whether the service answers. Asks once."""
        return await self._says_yes(routes.healthy())

    async def ready(self) -> bool:
        """Whether the service is ready: its journal can be written, and it has listed the root. Asks once."""
        return await self._says_yes(routes.ready())

    async def events(self, last_event_id: str | None = None) -> AsyncGenerator[Event, None]:
        """The service's events as they come, without end: those after `last_event_id`, else from now on.

        A broken stream is resumed where it broke off. Close the generator (`contextlib.aclosing`) to hang up.
        """
        reader, redial = EventReader(self.url, last_event_id), Redial(self._retry, time.monotonic())
        while True:
            reader.start()
            request = await asyncio.to_thread(stream_request_of, self._connection, reader.headers, self._timeout)
            outcome: Answer | Lost = Lost(url=request["url"], sent=True, reason="the event stream ended")
            try:
                async with self._http.stream(**request) as response:
                    if is_event_stream(response):
                        redial.opened()
                        async for chunk in response.aiter_bytes():
                            for event in reader.feed(chunk):
                                yield event
                    elif response.status_code == 204:
                        return
                    else:
                        await response.aread()
                        outcome = answer_of(response)
            except httpx.RequestError as error:
                outcome = lost(request["url"], error)
            pause = redial.pause(outcome, time.monotonic(), random.random())  # noqa: S311 - jitter is no secret
            if pause is None:
                raise failure(routes.events(), outcome)
            await asyncio.sleep(max(pause, reader.pause))

    async def _says_yes(self, call: Call[None]) -> bool:
        try:
            await self._send(call, self._retry.within(0))
        except ServiceError:
            return False
        return True

    async def _send(self, call: Call[ResultT], policy: RetryPolicy | None = None) -> ResultT:
        policy = policy or self._retry
        began, tried = time.monotonic(), 0
        while True:
            outcome = await self._try(call)
            tried += 1
            elapsed, chance = time.monotonic() - began, random.random()  # noqa: S311 - jitter is no secret
            pause = policy.pause(call, outcome, tried=tried, elapsed=elapsed, chance=chance)
            if pause is None:
                return read_outcome(call, outcome)
            await asyncio.sleep(pause)

    async def _try(self, call: Call[ResultT]) -> Answer | Lost:
        request = await asyncio.to_thread(request_of, self._connection, call, self._timeout)
        try:
            return answer_of(await self._http.request(**request))
        except httpx.RequestError as error:
            return lost(request["url"], error)
