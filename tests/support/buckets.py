"""Buckets in memory, whose every request a test can fail, stop or change."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from obstore.store import MemoryStore

from refitd_client.bucket.collection import BucketCollection, collect
from refitd_client.bucket.objects import Bucket, ObjectFacts, ObjectTag, ReadObject
from refitd_client.bucket.pointer import MAX_BYTES, parse_pointer, pointer_key
from refitd_client.bucket.run import BucketRun
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.errors import BucketError

RUN = "exp/trial"
NAME = "s3://bucket/prefix"


class KilledError(BaseException):
    """The process is killed here."""


class ScriptedBucket(Bucket):
    """A bucket in memory. `before` and `after` are called with each request's method and key, and may raise.

    `later` are seconds by which the store's clock is ahead of this host's, for what is written from now on. `damage`
    changes bytes of ranges.
    """

    def __init__(self, store: MemoryStore | None = None) -> None:
        super().__init__(store or MemoryStore(), NAME)
        self.before: Callable[[str, str], None] = lambda method, key: None
        self.after: Callable[[str, str], None] = lambda method, key: None
        self.damage: Callable[[str, int, memoryview], None] = lambda key, start, buffer: None
        self.later = 0.0
        self.asked: list[tuple[str, str]] = []
        self._ahead: dict[str, float] = {}  # by key, `later` when it was written

    def sibling(self) -> "ScriptedBucket":
        """The same objects, as another process has them."""
        assert isinstance(self._store, MemoryStore)
        other = ScriptedBucket(self._store)
        other.later, other._ahead = self.later, self._ahead
        return other

    def _begin(self, method: str, key: str) -> None:
        self.asked.append((method, key))
        self.before(method, key)
        if method in {"write_new", "write_over", "write", "upload"}:
            self._ahead[key] = self.later

    def _shifted(self, facts: ObjectFacts) -> ObjectFacts:
        return replace(facts, modified=facts.modified + self._ahead.get(facts.key, 0.0))

    async def read_changed(self, key: str, most: int, seen: ObjectTag | None) -> ReadObject | Literal["same"] | None:
        self._begin("read", key)
        return await super().read_changed(key, most, seen)

    async def read(self, key: str, most: int) -> ReadObject | None:
        self._begin("read", key)
        found = await super().read(key, most)
        return None if found is None else replace(found, facts=self._shifted(found.facts))

    async def fill(self, key: str, start: int, buffer: memoryview) -> bool:
        self._begin("fill", key)
        is_there = await super().fill(key, start, buffer)
        self.damage(key, start, buffer)
        return is_there

    async def facts(self, key: str) -> ObjectFacts | None:
        self._begin("facts", key)
        found = await super().facts(key)
        return None if found is None else self._shifted(found)

    async def write_new(self, key: str, data: bytes) -> ObjectTag | None:
        self._begin("write_new", key)
        tag = await super().write_new(key, data)
        self.after("write_new", key)
        return tag

    async def write_over(self, key: str, data: bytes, seen: ObjectTag) -> ObjectTag | None:
        self._begin("write_over", key)
        tag = await super().write_over(key, data, seen)
        self.after("write_over", key)
        return tag

    async def write(self, key: str, data: bytes) -> ObjectTag:
        self._begin("write", key)
        tag = await super().write(key, data)
        self.after("write", key)
        return tag

    async def upload(self, key: str, pieces: AsyncIterator[bytes]) -> None:
        self._begin("upload", key)
        await super().upload(key, pieces)
        self.after("upload", key)

    async def delete(self, key: str) -> None:
        self._begin("delete", key)
        await super().delete(key)
        self.after("delete", key)

    async def listed(self, prefix: str) -> list[ObjectFacts]:
        self._begin("list", prefix)
        return [self._shifted(found) for found in await super().listed(prefix)]

    async def folders(self, prefix: str) -> list[str]:
        self._begin("list", prefix)
        return await super().folders(prefix)


def nth(count: int, error: BaseException, methods: Sequence[str]) -> Callable[[str, str], None]:
    """A hook that raises at the request of that number, counted from 0, among these methods."""
    left = [count]

    def hook(method: str, key: str) -> None:
        if method in methods:
            left[0] -= 1
            if left[0] == -1:
                raise error

    return hook


def unreachable() -> BucketError:
    """The store is not there."""
    return BucketError("s3://bucket/prefix could not be reached", may_heal=True)


def publish_folder(bucket: Bucket, folder: Path, *, keep: int = 2, run: BucketRun | None = None) -> BucketRun:
    """Upload the version in a folder, as one publisher does."""

    async def all_of_it() -> BucketRun:
        mine = run or BucketRun(bucket, RUN, keep=keep)
        if run is None:
            await mine.begin()
        await mine.publish(folder, (folder / MANIFEST_NAME).read_bytes())
        return mine

    return asyncio.run(all_of_it())


def counted(bucket: Bucket, run: str = RUN) -> list[str]:
    """The ids of the versions that count."""
    found = asyncio.run(Bucket.read(bucket, pointer_key(run), MAX_BYTES))
    return [] if found is None else [version.id for version in parse_pointer(found.data, run).versions]


def collected(run: BucketRun) -> BucketCollection:
    """Collect, as the run's writer."""
    return asyncio.run(collect(run))


def keys(bucket: Bucket) -> set[str]:
    """The keys of all objects."""
    import obstore

    return {str(meta["path"]) for page in obstore.list(bucket._store) for meta in page}
