"""An object store in memory, and the ways of its users to it: their calls take virtual time, and go wrong.

`SimStore` keeps objects as a store does: whole or not there, with a tag and the store's own time. `SimBucket` is one
process's way to it. What a request does is done at one moment between the call and its answer, so that a kill, a fault
or another process's request can fall before it or after it. A request that is under way when its process is killed may
be carried out all the same.
"""

import asyncio
import hashlib
import itertools
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, TypeVar

from refitd_client.bucket.objects import Bucket, ObjectFacts, ObjectTag, ReadObject
from refitd_client.errors import BucketError

from .virtual_time import VirtualLoop

AnswerT = TypeVar("AnswerT")
URL = "s3://bucket/prefix"
HASTE = 40.0  # seconds of the store in one of the simulation: a lease of ten minutes ends in a quarter of one
BEGAN = 1_700_000_000.0  # the store's time when the simulation's is 0
PATIENCE_SECONDS = 6.0  # in which a call is answered, or given up
LATE_SECONDS = 6.0  # in which the store carries out a request whose caller has given up


class StoreFault(StrEnum):
    """What happens to the next call of a kind."""

    FAILS = "it fails, and nothing is done"
    LOST = "it is done, and the answer is lost"
    ASKED_AGAIN = "it is done, the answer is lost, and the library asks once more"
    LATE = "no answer comes, and it is done after its caller has given up"
    CUT = "it breaks off in the middle: of an answer, or of an upload in parts"
    WRONG = "a bit of the answer is another one"
    DELAYED = "it takes seconds, and is done at their end"
    SLOW = "it is done, and the answer takes seconds"


class StoreCall(StrEnum):
    """The kinds of calls."""

    LOOK = "look whether something has changed"
    READ = "read"
    FILL = "read a range"
    WRITE = "write"
    CONDITION = "write on a condition"
    UPLOAD = "upload in parts"
    DELETE = "delete"
    LIST = "list"


class TagKind(StrEnum):
    """What a store's tags are made of."""

    CONTENT = "the bytes alone, so that equal bytes have equal tags"
    UNIQUE = "a number for each write"
    VERSIONED = "the bytes, and a version for each write"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object."""

    data: bytes
    facts: ObjectFacts


class StoreWatcher(Protocol):
    """Hears of each change, right after it. What it raises is kept in `SimStore.broken`."""

    def written(self, key: str, before: StoredObject | None, after: StoredObject) -> None: ...

    def deleted(self, key: str, began: float) -> None:
        """An object that was there was deleted, by a collection that began at that time of the store."""
        ...


class SimStore:
    """The objects. `parts` are those of uploads that were not completed, `broken` is what a watcher found."""

    def __init__(self, loop: VirtualLoop, tags: TagKind) -> None:
        self.loop = loop
        self.tags = tags
        self.objects: dict[str, StoredObject] = {}
        self.parts: dict[int, tuple[str, list[bytes]]] = {}
        self.counts: Counter[str] = Counter()
        self.watcher: StoreWatcher | None = None
        self.broken: list[BaseException] = []
        self.is_down = False
        self._numbers = itertools.count(1)

    @property
    def time(self) -> float:
        return BEGAN + self.loop.time() * HASTE

    def put(self, key: str, data: bytes) -> ObjectTag:
        before, number = self.objects.get(key), next(self._numbers)
        digest = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        tag = ObjectTag(
            f'"{number}"' if self.tags is TagKind.UNIQUE else digest,
            str(number) if self.tags is TagKind.VERSIONED else None,
        )
        facts = ObjectFacts(key=key, size=len(data), modified=self.time, tag=tag)
        self.objects[key] = after = StoredObject(data, facts)
        self._tell(lambda watcher: watcher.written(key, before, after))
        return tag

    def put_if(self, key: str, data: bytes, seen: ObjectTag | None) -> ObjectTag | None:
        """Write an object if it is what was seen, or is not there where that is None; else return None."""
        here = self.objects.get(key)
        if (None if here is None else here.facts.tag.e_tag) != (None if seen is None else seen.e_tag):
            self.counts["conditions refused"] += 1
            return None
        return self.put(key, data)

    def remove(self, key: str, began: float) -> None:
        if self.objects.pop(key, None) is not None:
            self._tell(lambda watcher: watcher.deleted(key, began))

    def begin_upload(self, key: str) -> int:
        number = next(self._numbers)
        self.parts[number] = (key, [])
        return number

    def add_part(self, number: int, data: bytes) -> None:
        if number in self.parts:
            self.parts[number][1].append(data)

    def complete_upload(self, number: int) -> None:
        if number in self.parts:
            key, parts = self.parts.pop(number)
            self.put(key, b"".join(parts))

    def below(self, prefix: str) -> list[StoredObject]:
        return [self.objects[key] for key in sorted(self.objects) if key.startswith(prefix)]

    def _tell(self, event: Callable[[StoreWatcher], None]) -> None:
        try:
            if self.watcher is not None:
                event(self.watcher)
        except Exception as error:  # in the middle of a process that would take it for its own
            self.broken.append(error)


class SimBucket(Bucket):
    """A process's way to the store, in place of obstore's. `slow` are seconds that each range takes longer.

    Deadlines and the library's own tries are here `PATIENCE_SECONDS`.
    """

    def __init__(self, store: SimStore, chance: random.Random) -> None:
        self._objects = store
        self._chance = chance
        self.name = URL
        self.alive = True
        self.cut = False
        self.slow = 0.0
        self.faults: dict[StoreCall, deque[StoreFault]] = {call: deque() for call in StoreCall}
        self._began = 0.0  # of the last collection, by the store's time

    def mend(self) -> None:
        self.cut, self.slow = False, 0.0
        for faults in self.faults.values():
            faults.clear()

    async def read(self, key: str, most: int) -> ReadObject | None:
        return await self._found(StoreCall.READ, key, most)

    async def read_changed(self, key: str, most: int, seen: ObjectTag | None) -> ReadObject | Literal["same"] | None:
        found = await self._found(StoreCall.LOOK, key, most)
        return "same" if found is not None and seen is not None and found.facts.tag.e_tag == seen.e_tag else found

    async def _found(self, call: StoreCall, key: str, most: int) -> ReadObject | None:
        fault = self._next(call)
        found = await self._ask(call, key, fault, lambda: self._objects.objects.get(key))
        if found is None:
            return None
        if found.facts.size > most:
            raise BucketError(f"{self.name} has {key} with {found.facts.size} bytes, more than {most}")
        data = found.data
        if fault is StoreFault.WRONG and "/versions/" in key:
            data = self._flipped(data)
        elif fault is StoreFault.WRONG and call is StoreCall.LOOK:
            data = data[: len(data) // 2]  # something on the way has put in what does not parse
        return ReadObject(data=data, facts=found.facts)

    async def fill(self, key: str, start: int, buffer: memoryview) -> bool:
        if not buffer:
            return True
        fault = self._next(StoreCall.FILL)
        found = await self._ask(StoreCall.FILL, key, fault, lambda: self._objects.objects.get(key), self.slow)
        if found is None:
            return False
        data = found.data[start : start + len(buffer)]
        if len(data) != len(buffer):
            raise BucketError(f"{self.name} gave {len(data)} bytes of {key} from {start} on, not {len(buffer)}")
        buffer[:] = self._flipped(data) if fault is StoreFault.WRONG else data
        self._objects.counts["ranges"] += 1
        return True

    async def facts(self, key: str) -> ObjectFacts | None:
        fault = self._next(StoreCall.READ)
        found = await self._ask(StoreCall.READ, key, fault, lambda: self._objects.objects.get(key))
        return None if found is None else found.facts

    async def write_new(self, key: str, data: bytes) -> ObjectTag | None:
        return await self._change(StoreCall.CONDITION, key, lambda: self._objects.put_if(key, data, None))

    async def write_over(self, key: str, data: bytes, seen: ObjectTag) -> ObjectTag | None:
        return await self._change(StoreCall.CONDITION, key, lambda: self._objects.put_if(key, data, seen))

    async def write(self, key: str, data: bytes) -> ObjectTag:
        tag = await self._change(StoreCall.WRITE, key, lambda: self._objects.put(key, data))
        if key.endswith("/collected.json"):
            self._began = self._objects.objects[key].facts.modified
        return tag

    async def upload(self, key: str, pieces: AsyncIterator[bytes]) -> None:
        """See `Bucket`: parts one after the other. It is aborted when it fails, and not when its process is killed."""
        fault = self._next(StoreCall.UPLOAD)
        store, sent = self._objects, 0
        number = await self._ask(StoreCall.UPLOAD, key, None, lambda: store.begin_upload(key))
        try:
            async for piece in pieces:
                if fault in {StoreFault.FAILS, StoreFault.CUT} and sent:
                    raise BucketError(f"{self.name} could not be reached, or failed, to write {key}", may_heal=True)
                await self._ask(StoreCall.UPLOAD, key, None, lambda piece=piece: store.add_part(number, piece))
                sent += 1
            late = fault if fault in {StoreFault.LOST, StoreFault.LATE, StoreFault.SLOW} else None
            await self._ask(StoreCall.UPLOAD, key, late, lambda: store.complete_upload(number))
        finally:
            if number in store.parts and self.alive and fault is not StoreFault.LATE:
                del store.parts[number]
                store.counts["uploads aborted"] += 1

    async def delete(self, key: str) -> None:
        began = self._began
        await self._change(StoreCall.DELETE, key, lambda: self._objects.remove(key, began))

    async def listed(self, prefix: str) -> list[ObjectFacts]:
        found = await self._ask(StoreCall.LIST, prefix, self._next(StoreCall.LIST), lambda: self._objects.below(prefix))
        return [each.facts for each in found if "/" not in each.facts.key.removeprefix(prefix)]

    async def folders(self, prefix: str) -> list[str]:
        found = await self._ask(StoreCall.LIST, prefix, self._next(StoreCall.LIST), lambda: self._objects.below(prefix))
        rests = [each.facts.key.removeprefix(prefix) for each in found]
        return sorted({rest.partition("/")[0] for rest in rests if "/" in rest})

    async def _change(self, call: StoreCall, key: str, act: Callable[[], AnswerT]) -> AnswerT:
        fault = self._next(call)
        if fault is StoreFault.ASKED_AGAIN:
            await self._ask(call, key, None, act)
            fault = None
        return await self._ask(call, key, fault, act)

    async def _ask(
        self, call: StoreCall, key: str, fault: StoreFault | None, act: Callable[[], AnswerT], slow: float = 0.0
    ) -> AnswerT:
        """Have something done at one moment between the call and its answer."""
        is_change = call in {StoreCall.WRITE, StoreCall.CONDITION, StoreCall.UPLOAD, StoreCall.DELETE}
        loop, doing = self._objects.loop, f"{call} {key}"
        try:
            await self._take_time(slow / 2 + (self._patience() if fault is StoreFault.DELAYED else 0.0))
        except asyncio.CancelledError:
            if is_change and self._chance.random() < 0.5:  # it is under way, and cannot be taken back
                loop.call_later(self._chance.random() * LATE_SECONDS, self._unheard, act)
            raise
        if self.cut or self._objects.is_down or fault is StoreFault.FAILS:
            await self._take_time(self._chance.choice([0.0, PATIENCE_SECONDS]))
            raise BucketError(f"{self.name} could not be reached, or failed, to {doing}", may_heal=True)
        if fault is StoreFault.LATE and is_change:
            loop.call_later(PATIENCE_SECONDS + self._chance.random() * LATE_SECONDS, self._unheard, act)
            await self._take_time(PATIENCE_SECONDS)
            raise BucketError(f"{self.name} did not answer in time to {doing}", may_heal=True)
        answer = act()
        await self._take_time(slow / 2 + (self._patience() if fault is StoreFault.SLOW else 0.0))
        if fault in {StoreFault.LOST, StoreFault.CUT, StoreFault.LATE} or self.cut or self._objects.is_down:
            raise BucketError(f"{self.name} could not be reached, or failed, to {doing}", may_heal=True)
        return answer

    def _unheard(self, act: Callable[[], object]) -> None:
        self._objects.counts["done unheard"] += 1
        act()

    def _patience(self) -> float:
        return self._chance.random() * PATIENCE_SECONDS

    async def _take_time(self, seconds: float) -> None:
        """The time of half a request. A dead process asks and hears nothing."""
        await asyncio.sleep(self._chance.random() * 0.004 + seconds)
        if not self.alive:
            raise asyncio.CancelledError

    def _next(self, call: StoreCall) -> StoreFault | None:
        if not self.faults[call]:
            return None
        fault = self.faults[call].popleft()
        self._objects.counts[f"{call.name.lower()} {fault.name.lower()}"] += 1
        return fault

    def _flipped(self, data: bytes) -> bytes:
        at = self._chance.randrange(max(1, len(data)))
        return bytes([*data[:at], data[at] ^ 1, *data[at + 1 :]])
