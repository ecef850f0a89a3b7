"""The loop that owns weights and batch. Between two steps it obeys commands, and only there.

    obey what was commanded → admit waiting requests → one forward in a thread → hand out tokens → again

A load of weights is a command. So no token can be computed while weights are partly copied, and that takes no lock: the
order of the loop is enough. Waiting prompts go before running answers, as in SGLang.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from refitd_embedded.runner import ForwardResult, GenerationRequest, Runner, aborted, finished

# Many readers or one writer, writers first: SGLang's `model_update_lock`.
#
# Requests read for as long as they generate; an update of weights on an engine that is not paused writes. So an update
# waits for every request in flight, and while it waits no new one gets in.


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
    """A task that is cancelled while it waits leaves the lock as it was."""

    def __init__(self) -> None:
        self._changes = ChangeSignal()
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0

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
        """Hold the lock alone."""
        self._writers_waiting += 1
        try:
            await self._changes.until(self._free)
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
        """Wait until no task holds the lock."""
        await self._changes.until(self._free)

    def _free(self) -> bool:
        return not (self._readers or self._writing)


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`running` requests at most in one batch; at most `prefill` padded tokens in one prefill."""

    running: int = 128
    prefill: int = 16384


@dataclass(frozen=True, slots=True)
class _Command:
    act: Callable[[], Awaitable[Any]]
    answer: asyncio.Future[Any]


class Scheduler:
    """`weight_version` labels the weights that are in the model; the front end has its own label (see `reload`).

    `stepped` tells when `tokens_out`, all tokens computed so far, has grown.
    """

    def __init__(self, runner: Runner, eos: frozenset[int], weight_version: str, limits: Limits) -> None:
        self._runner, self._eos, self._limits = runner, eos, limits
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
                command = self._commands.popleft()
                if not command.answer.cancelled():
                    await _carry_out(command)
            if self.paused or not (self.waiting or self.running):
                await self._wake.wait()
                continue
            self._take(await self._step())

    async def call(self, act: Callable[[], Awaitable[T]]) -> T:
        """Have `act` done between two steps, and wait for it. A caller that is cancelled cancels it."""
        return await self.send(act)

    def send(self, act: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        """Have `act` done between two steps, after what was sent before."""
        command = _Command(act, asyncio.get_running_loop().create_future())
        self._commands.append(command)
        self._wake.set()
        return command.answer

    def submit(self, request: GenerationRequest) -> None:
        self.waiting.append(request)
        self._wake.set()

    def abort(self, request: GenerationRequest) -> None:
        """End a request that waits or runs. A step in flight may still compute a token for it: that one is lost."""
        request.ended_waiting = request in self.waiting
        if request.ended_waiting or request in self.running:
            self._end(request, aborted(ran=not request.ended_waiting))

    def abort_all(self) -> None:
        """End every request."""
        for request in (*self.waiting, *self.running):
            self.abort(request)

    def pause(self, *, retract: bool) -> None:
        """Stop computing. A command. `retract` sends running requests back to the queue: their tokens stay, their
        keys and values will be computed again; otherwise they keep both.
        """
        self.paused = True
        if retract:
            for request in self.running:
                request.retractions += 1
            self.waiting.extendleft(reversed(self.running))
            self.running = []

    def resume(self) -> None:
        """Go on computing. A command."""
        self.paused = False

    def flush(self) -> bool:
        """Drop the cache, unless requests need it: running ones, and waiting ones while not paused. A command."""
        if self.running or (self.waiting and not self.paused):
            return False
        self._runner.forget()
        return True

    def relabel(self, version: str | None) -> None:
        """Note that the weights are other ones now. A command."""
        if version is None or version == self.weight_version:
            return
        for request in (*self.waiting, *self.running):
            request.relabel(self.weight_version)
        self.weight_version = version

    async def _step(self) -> ForwardResult:
        running = list(self.running)
        if new := self._admit():
            self.running = running + new
            return await asyncio.to_thread(self._runner.prefill, running, new)
        return await asyncio.to_thread(self._runner.decode, running)

    def _admit(self) -> list[GenerationRequest]:
        """Take from the queue, in order, what fits; a single prompt always fits."""
        new: list[GenerationRequest] = []
        longest = 0
        while self.waiting and len(self.running) + len(new) < self._limits.running:
            longest = max(longest, self.waiting[0].length)
            if new and longest * (len(new) + 1) > self._limits.prefill:
                break
            new.append(self.waiting.popleft())
        return new

    def _take(self, step: ForwardResult) -> None:
        """Hand out what a step gave. A request that was aborted in the meantime gets nothing."""
        self.tokens_out += len(step.tokens)
        self.stepped.tell()
        for request, token, logprob in zip(step.requests, step.tokens, step.logprobs, strict=True):
            if request.finish is None:
                self._give(request, token, logprob)

    def _give(self, request: GenerationRequest, token: int, logprob: float) -> None:
        if request.params.max_new_tokens != 0:
            request.output.append(token)
            request.output_logprobs.append(logprob)
        if reason := finished(request, self._eos):
            self._end(request, reason)
        elif request.stream:
            request.changed(request)

    def _end(self, request: GenerationRequest, reason: dict[str, Any]) -> None:
        request.end(reason, self.weight_version)
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.running = [one for one in self.running if one is not request]


async def _carry_out(command: _Command) -> None:
    """Run a command to its end. Its own errors go to its caller, not to the loop."""
    task = asyncio.ensure_future(command.act())
    command.answer.add_done_callback(lambda answer: task.cancel() if answer.cancelled() else None)
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        task.cancel()
        raise
    problem = None if task.cancelled() else task.exception()
    if command.answer.done() or task.cancelled():
        command.answer.cancel()
    elif problem is not None:
        command.answer.set_exception(problem)
    else:
        command.answer.set_result(task.result())
