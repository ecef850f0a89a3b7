"""The loop that owns weights and batch. Between two steps it obeys commands, and only there.

    obey all commands → admit waiting requests → one forward in a thread → hand out tokens → again

A load of weights is a command. So no token can be computed while weights are partly copied, and that takes no lock: the
order of the loop is enough.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from refitd_embedded.runner import GenerationRequest, Runner, aborted, finished

T = TypeVar("T")
_Command = tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]


class ChangeSignal:
    """Has all tasks that wait for a condition test it again. `tell` never waits, so it is safe in `finally`."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def tell(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._next.wait()


class RwLock:
    """Many readers or one writer, writers first: SGLang's `model_update_lock`.

    Requests read for as long as they generate; an update of weights on an engine that is not paused writes. So an
    update waits for every request in flight, and while it waits no new one gets in. A task that is cancelled while it
    waits leaves the lock as it was.
    """

    def __init__(self) -> None:
        self._changes = ChangeSignal()
        self._readers = self._writers_waiting = 0
        self._writing = False

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[None]:
        """Hold the lock together with other readers."""
        await self._changes.until(lambda: not (self._writing or self._writers_waiting))
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            self._changes.tell()

    @asynccontextmanager
    async def writer(self) -> AsyncIterator[None]:
        self._writers_waiting += 1
        try:
            await self.until_free()
            self._writing = True
        finally:
            # Also when cancelled: readers queue behind a writer that waits, and must not queue behind one that left.
            self._writers_waiting -= 1
            self._changes.tell()
        try:
            yield
        finally:
            self._writing = False
            self._changes.tell()

    async def until_free(self) -> None:
        await self._changes.until(lambda: not (self._readers or self._writing))


class Scheduler:
    """`weight_version` labels the weights that are in the model; the front end has its own label (`weights.Labels`).

    `most_running` requests are in a batch. `stepped` tells when `tokens_out`, all tokens computed so far, has grown.
    """

    def __init__(self, runner: Runner, eos: frozenset[int], weight_version: str, most_running: int) -> None:
        self._runner, self._eos, self._most_running = runner, eos, most_running
        self.weight_version = weight_version
        self.paused = False
        self.waiting: deque[GenerationRequest] = deque()
        self.running: list[GenerationRequest] = []
        self.tokens_out = 0
        self.stepped = ChangeSignal()
        self._commands: deque[_Command] = deque()
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            self._wake.clear()
            while self._commands:
                act, answer = self._commands.popleft()
                if not answer.cancelled():
                    await _carry_out(act, answer)
            while self.waiting and not self.paused and len(self.running) < self._most_running:
                self.running.append(self.waiting.popleft())
            if self.paused or not self.running:
                await self._wake.wait()
                continue
            requests = list(self.running)
            self._hand_out(requests, await asyncio.to_thread(self._runner.step, requests))

    def send(self, act: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        """Have `act` done between two steps, after earlier commands. Cancelling the answer cancels it."""
        answer = asyncio.get_running_loop().create_future()
        self._commands.append((act, answer))
        self._wake.set()
        return answer

    def submit(self, request: GenerationRequest) -> None:
        self.waiting.append(request)
        self._wake.set()

    def abort(self, request: GenerationRequest) -> None:
        """End a request that waits or runs. A step in flight may still compute a token for it: that one is lost."""
        request.ended_waiting = request in self.waiting
        if request.ended_waiting or request in self.running:
            self._end(request, aborted(ran=not request.ended_waiting))

    def abort_all(self) -> None:
        for request in (*self.waiting, *self.running):
            self.abort(request)

    def pause(self, *, retract: bool) -> None:
        """Stop computing. A command. `retract` sends running requests back to the queue; their tokens stay."""
        self.paused = True
        if retract:
            for request in self.running:
                request.retractions += 1
            self.waiting.extendleft(reversed(self.running))
            self.running = []

    def resume(self) -> None:
        """Go on computing. A command."""
        self.paused = False

    def may_flush(self) -> bool:
        """Whether SGLang would drop its cache now: no request may need it, running, or waiting while not paused."""
        return not self.running and (self.paused or not self.waiting)

    def relabel(self, version: str | None) -> None:
        """Note that the weights are other ones now. A command."""
        if version is None or version == self.weight_version:
            return
        for request in (*self.waiting, *self.running):
            request.relabel(self.weight_version)
        self.weight_version = version

    def _hand_out(self, requests: Sequence[GenerationRequest], tokens: Sequence[tuple[int, float]]) -> None:
        """Hand out what a step gave. A request that was aborted in the meantime gets nothing."""
        self.tokens_out += len(tokens)
        self.stepped.tell()
        for request, (token, logprob) in zip(requests, tokens, strict=True):
            if request.finish is not None:
                continue
            if request.params.max_new_tokens != 0:
                request.output.append(token)
                request.output_logprobs.append(logprob)
            if reason := finished(request, self._eos):
                self._end(request, reason)
            elif request.stream:
                request.changed(request)

    def _end(self, request: GenerationRequest, reason: dict[str, Any]) -> None:
        request.end(reason, self.weight_version)
        (self.waiting if request in self.waiting else self.running).remove(request)


async def _carry_out(act: Callable[[], Awaitable[Any]], answer: asyncio.Future[Any]) -> None:
    """Run a command to its end. Its own errors go to its caller, not to the loop."""
    task = asyncio.ensure_future(act())
    answer.add_done_callback(lambda answer: task.cancel() if answer.cancelled() else None)
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        task.cancel()
        raise
    if answer.done() or task.cancelled():
        answer.cancel()
    elif (problem := task.exception()) is not None:
        answer.set_exception(problem)
    else:
        answer.set_result(task.result())
