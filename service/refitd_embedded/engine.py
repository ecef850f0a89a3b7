"""The front end: which calls may generate, and which may write weights. SGLang's tokenizer manager in small.

    paused     new requests wait at the gate until /continue_generation
    lock       requests read; an update on an engine that is not paused writes (`scheduler.RwLock`)

Updates while paused take no lock and go at once; the scheduler still takes them one by one, where the real server can
lose track of two at a time. Another difference on purpose: a pause with mode "abort" ends requests at once and waits
for no clock, where the real server looks once a second.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self, TypeVar

from refitd_embedded.model import Adapters, Decoder, read_eos_ids
from refitd_embedded.runner import GenerationRequest, Runner
from refitd_embedded.scheduler import ChangeSignal, RwLock, Scheduler
from refitd_embedded.weights import EngineDiedError, Labels, Reloader, Updated, checksums, load
from refitd_embedded.wire import UpdateFromDiskBody

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class CallProgress:
    """How one call follows its requests: each change is noted, and the call looks when it has time."""

    requests: Sequence[GenerationRequest]
    _changed: list[GenerationRequest] = field(default_factory=list[GenerationRequest])
    _changes: ChangeSignal = field(default_factory=ChangeSignal)

    def note(self, request: GenerationRequest) -> None:
        if request not in self._changed:
            self._changed.append(request)
        self._changes.tell()

    async def done(self) -> None:
        await self._changes.until(lambda: all(request.finish for request in self.requests))

    async def __aiter__(self) -> AsyncIterator[GenerationRequest]:
        """Each change, until all have ended. Changes between two looks come as one."""
        unfinished = len(self.requests)
        while unfinished:
            await self._changes.until(lambda: bool(self._changed))
            request = self._changed.pop(0)
            unfinished -= request.finish is not None
            yield request


class DuplicateRequestError(ValueError):
    """A request id that is in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine is run.

    `most_running` requests are in a batch; `load_delay`, in seconds, is added to each load; `defects` makes it load as
    carelessly as the real server; `enable_lora` lets it load adapters.
    """

    seed: int = 0
    most_running: int = 128
    load_delay: float = 0.0
    defects: bool = False
    enable_lora: bool = False


class EmbeddedEngine:
    """One replica. Use it as an async context manager: the scheduler runs inside.

    `on_death` gets the reason when the scheduler dies; from then on every call raises EngineDiedError.
    """

    def __init__(self, decoder: Decoder, model_path: Path, eos: frozenset[int], options: EngineOptions) -> None:
        self.decoder, self.options = decoder, options
        self._eos = eos
        self.startup_path = str(model_path)
        self.labels = Labels(self.startup_path)
        self.paused = False
        self.dead: str | None = None
        self.on_death: Callable[[str], None] = lambda last_words: logger.error("%s", last_words)
        runner = Runner(decoder, options.seed, enable_lora=options.enable_lora)
        self.adapters = Adapters(decoder, enabled=options.enable_lora)
        self.scheduler = Scheduler(runner, eos, self.labels.weight_version, options.most_running)
        self.reloader = Reloader(
            decoder, self.scheduler, self.labels, careless=options.defects, delay=options.load_delay
        )
        self._requests: dict[str, GenerationRequest] = {}
        self._lock, self._gate, self._pausing = RwLock(), ChangeSignal(), asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def open(cls, directory: Path, options: EngineOptions | None = None) -> Self:
        """An engine on the checkpoint in `directory`. Blocking. Raises OSError, ValueError, CheckpointError."""
        decoder = load(directory).requires_grad_(False)
        return cls(decoder, directory, read_eos_ids(directory), options or EngineOptions())

    def replica(self, number: int, decoder: Decoder) -> "EmbeddedEngine":
        """Another engine like this one as it was started, on weights of its own and with another seed."""
        options = replace(self.options, seed=self.options.seed + number)
        return EmbeddedEngine(decoder, Path(self.startup_path), self._eos, options)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run_scheduler(), name="scheduler")
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @contextlib.asynccontextmanager
    async def admitted(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[CallProgress]:
        """Generate, behind the gate and under the reader lock. Leaving aborts what has not ended.

        Raises DuplicateRequestError, EngineDiedError.
        """
        self._assert_alive()
        self._register(requests)
        try:
            async with self._inside():
                self._assert_alive()
                progress = CallProgress(requests)
                for request in requests:
                    request.changed = progress.note
                    self.scheduler.submit(request)
                yield progress
        finally:
            for request in requests:
                self.scheduler.abort(request)
                del self._requests[request.rid]

    def abort(self, rid: str, *, every: bool = False) -> None:
        """End one request by its id, or all. Unknown ids are ignored, and so are requests at the gate."""
        if every:
            self.scheduler.abort_all()
        elif rid in self._requests:
            self.scheduler.abort(self._requests[rid])

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Close the gate. "abort" ends all requests and waits until they were answered. The other modes stop the
        scheduler; they return before it has stopped, but any later command is obeyed later.
        """
        async with self._pausing:
            self.paused = True
            if mode == "abort":
                self.scheduler.abort_all()
                await self._lock.until_free()
            else:
                self._send(lambda: self.scheduler.pause(retract=mode == "retract"))

    async def resume(self) -> None:
        """Open the gate. During a load, the scheduler goes on after it."""
        async with self._pausing:
            self.paused = False
            self._send(self.scheduler.resume)
            self._gate.tell()

    async def flush(self) -> bool:
        """Whether a cache could be dropped: no request may need it. There is none here."""
        return await self._send(self.scheduler.may_flush)

    async def update(self, order: UpdateFromDiskBody) -> Updated:
        """Load a checkpoint. If the caller is cancelled before the first write, nothing happens; a write that began
        is finished in any case. Raises EngineDiedError.
        """
        if order.abort_all_requests:
            self.scheduler.abort_all()
        async with contextlib.nullcontext() if self.paused else self._lock.writer():
            return await self._call(lambda: self.reloader.load(order))

    async def relabel(self, version: str, *, abort_all: bool) -> None:
        """Set the version label, without touching weights."""
        if abort_all:
            self.scheduler.abort_all()
        await self._send(lambda: self.scheduler.relabel(version))
        self.labels.weight_version = version

    async def checksums(self) -> dict[str, str]:
        """Content hashes of the weights, taken between two steps."""
        return await self._call(lambda: asyncio.to_thread(checksums, self.decoder))

    async def settled(self) -> None:
        """Wait until the scheduler is between two steps. /server_info comes from there, so it waits for a load."""
        await self._send(lambda: None)

    @contextlib.asynccontextmanager
    async def _inside(self) -> AsyncIterator[None]:
        """Past the gate and under the reader lock, both at once: a pause may begin while the lock is waited for."""
        while True:
            await self._gate.until(lambda: not self.paused)
            async with self._lock.reader():
                if not self.paused:
                    yield
                    return

    def _register(self, requests: Sequence[GenerationRequest]) -> None:
        rids = [request.rid for request in requests]
        if len(set(rids)) < len(rids):
            raise DuplicateRequestError(f"Duplicate request IDs detected within the request: {rids}")
        if taken := [rid for rid in rids if rid in self._requests]:
            raise DuplicateRequestError(f"Duplicate request ID detected: {', '.join(taken)}")
        self._requests |= {request.rid: request for request in requests}

    async def _run_scheduler(self) -> None:
        try:
            await self.scheduler.run()
        except Exception as bug:
            logger.exception("the scheduler failed")
            self._die(f"{type(bug).__name__}: {bug}")

    async def _call(self, act: Callable[[], Awaitable[T]]) -> T:
        self._assert_alive()
        try:
            return await self.scheduler.send(act)
        except EngineDiedError as death:
            self._die(str(death))
            raise

    def _send(self, act: Callable[[], T]) -> asyncio.Future[T]:
        """Have `act` done between two steps."""
        self._assert_alive()

        async def command() -> T:
            return act()

        return self.scheduler.send(command)

    def _die(self, last_words: str) -> None:
        self.dead = last_words
        self.on_death(last_words)

    def _assert_alive(self) -> None:
        if self.dead is not None:
            raise EngineDiedError(self.dead)
