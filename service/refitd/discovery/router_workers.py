"""Keeps the workers of an sglang-router to the engines that requests may go to (`policy/traffic.py`).

The router's own health check asks each worker at the worker's address, and an engine does not know how far behind it
is. So the service takes an engine off the router's list, and puts it back. Requests that run there come to their end.

An engine that is being updated, and serves what is demanded, stays as it is: it holds new requests, and answers them
after the update. So does one that has not answered yet since this service was started. Workers that are no engines of
this service are left alone, and so are those of a pair of prefill and decode, whose registration the service does not
know.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from refitd.discovery.place import RouterToKeep
from refitd.engine.address import AddressRefusedError, check_url
from refitd.engine.http import Key, KeyRefusedError, NoReply, Reply, Transport
from refitd.policy.traffic import Shut
from refitd.rollout.targets import Targets
from refitd.state.records import EngineRecord
from refitd.state.store import Store
from refitd_client.contract.decoding import converted

LOOK_EVERY_SECONDS = 2.0  # a router that was restarted has its first list again
SECONDS = 5.0
_RANK = re.compile(r"@\d+$")  # a router that knows data-parallel ranks lists one engine once for each
_REGULAR = "regular"


class ListedWorker(msgspec.Struct, frozen=True):
    """A worker, as the router lists it."""

    id: str
    url: str
    worker_type: str = _REGULAR


class _Listed(msgspec.Struct):
    workers: list[ListedWorker]


@dataclass(frozen=True, slots=True)
class Changes:
    """What has to happen to the router's list: engines that come onto it, and ids of workers with their engines."""

    add: list[EngineRecord] = field(default_factory=list[EngineRecord])
    remove: list[tuple[str, EngineRecord]] = field(default_factory=list[tuple[str, EngineRecord]])


def changes(
    listed: Sequence[ListedWorker], engines: Iterable[EngineRecord], gates: Mapping[str, Shut | None]
) -> Changes:
    """Decide what has to happen.

    Args:
        listed: the router's workers.
        engines: all engines.
        gates: why no requests may go to an engine, by its id; None where they may.
    """
    found = Changes()
    by_url: dict[str, list[ListedWorker]] = {}
    for worker in listed:
        with suppress(AddressRefusedError):
            by_url.setdefault(check_url(_RANK.sub("", worker.url)), []).append(worker)
    for engine in engines:
        gate, workers = gates[engine.id], by_url.get(engine.url, [])
        if gate is None and not workers:
            found.add.append(engine)
        elif gate is not None and not gate.passing:
            found.remove.extend((worker.id, engine) for worker in workers if worker.worker_type == _REGULAR)
    return found


class RouterKeeper:
    """Keeps one router's workers current until it is cancelled."""

    def __init__(self, kept: RouterToKeep, store: Store, targets: Targets, is_named: Callable[[str], bool]) -> None:
        """Ask nothing yet.

        Args:
            kept: the router, and what its workers have to serve.
            store: has the engines.
            targets: say to which of them requests may go.
            is_named: says of an engine's URL whether the operator named it: only then the router gets its key.
        """
        self._kept = kept
        self._is_named = is_named
        self._store = store
        self._targets = targets
        key = kept.router.key_file
        self._http = Transport(kept.router.url, api_key=key, admin_key=None, server="router")
        self._is_faulty = False
        self._added: set[str] = set()  # engines that the router was asked to list, and does not list yet

    async def run(self) -> None:
        """Look whenever a gate opens or shuts, and every `LOOK_EVERY_SECONDS`."""
        while True:
            listed = await self._listed()
            seen, gates = self._store.changed.count, self._gates()  # now: the router may have taken its time
            fault = listed if isinstance(listed, str) else await self._change(listed, gates)
            self._note(fault)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_SECONDS):
                    while fault is not None or self._gates() == gates:
                        seen = await self._store.changed.wait_after(seen)

    def _note(self, fault: str | None) -> None:
        """Keep what is wrong for status, metrics and doctor. The log says when it begins and when it is over."""
        url = self._kept.router.url
        told = None if fault is None else f"the workers of router {url} are not kept current: {fault}"
        self._store.faults.set_router(url, told)
        if told is not None and not self._is_faulty:
            self._store.say("router", url, told, is_fault=True)
        elif told is None and self._is_faulty:
            self._store.say("router", url, f"the workers of router {url} are kept current again")
        self._is_faulty = told is not None

    def _gates(self) -> dict[str, Shut | None]:
        return {engine.id: self._targets.shut(engine, self._kept.demand) for engine in self._store.engines.values()}

    async def _listed(self) -> list[ListedWorker] | str:
        """The router's workers, or why they cannot be said."""
        reply = await self._http.get("/workers", SECONDS)
        if isinstance(reply, NoReply):
            return reply.reason
        try:
            return converted(reply.data, _Listed).workers
        except msgspec.ValidationError as error:
            return f"/workers was answered {reply.status} in another form: {error}"

    async def _change(self, listed: Sequence[ListedWorker], gates: Mapping[str, Shut | None]) -> str | None:
        """Make the router's list what it has to be; why that did not go well, None where it did."""
        wanted = changes(listed, self._store.engines.values(), gates)
        faults = [await self._add(engine) for engine in wanted.add]
        self._added = {engine.id for engine in wanted.add}
        for worker, engine in wanted.remove:
            gate = gates[engine.id]
            faults.append(await self._remove(worker, engine, "" if gate is None else gate.reason))
        return next((fault for fault in faults if fault is not None), None)

    async def _add(self, engine: EngineRecord) -> str | None:
        try:
            key = await _key(self._kept.worker_key) if self._is_named(engine.url) else {}
        except KeyRefusedError as error:
            return str(error)
        reply = await self._http.post("/workers", {"url": engine.url} | key, SECONDS)
        return self._told(reply, engine, None if engine.id in self._added else "gets requests")

    async def _remove(self, worker: str, engine: EngineRecord, reason: str) -> str | None:
        reply = await self._http.delete(f"/workers/{worker}", SECONDS)
        return self._told(reply, engine, f"gets no more requests: it {reason}")

    def _told(self, reply: Reply | NoReply, engine: EngineRecord, what: str | None) -> str | None:
        """Write down what was done; why it was not, None where it was."""
        if isinstance(reply, NoReply):
            return reply.reason
        if not reply.ok:
            return f"the change of a worker was answered {reply.status}: {reply.short_message}"
        if what is not None:
            self._store.say("engine", engine.id, f"{what} ({self._kept.router.url})")
        return None


async def _key(file: Path | None) -> dict[str, str]:
    """The key that the router sends to an engine, read anew each time."""
    headers = await Key(file).headers()
    return {"api_key": headers["Authorization"].removeprefix("Bearer ")} if headers else {}
