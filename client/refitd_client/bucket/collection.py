"""Deletes what does not count any more from a run in a bucket: retired versions, and uploads that can never count.

A retired version is deleted file by file, as its own manifest names them; then the manifest; then `upload.json`; then
it is taken off the pointer's list. So wherever a collection is stopped, the next one finds the proof of what to go on
with. An object that no manifest and no `upload.json` of that version names stays.

If a listing or a read fails, nothing is deleted: what was not seen may be a lease.

The writer of a run collects, or anybody in its place (`collect_run`): the pointer stays the writer's, who goes on from
where a collection has moved it. A retired version is never anything else again, so two that collect at once delete the
same.
"""

import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from refitd_client.bucket.objects import Bucket
from refitd_client.bucket.pointer import (
    FOLLOWERS_PREFIX,
    MAX_BYTES,
    UPLOAD_NAME,
    BucketLease,
    Pointer,
    PointerRefusedError,
    RetiredVersion,
    clock_key,
    collectable,
    is_dead,
    lease_of,
    order_of,
    parse_upload,
    version_prefix,
    versions_prefix,
    why_waiting,
)
from refitd_client.bucket.pointer import kept as rest_of
from refitd_client.bucket.run import BucketRun
from refitd_client.contract.manifest import MAX_MANIFEST_BYTES, ManifestRefusedError, parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME, Order, parse_version_folder, version_id
from refitd_client.errors import BucketError, RunBusyError

_TAKEOVERS = 3  # of a run by other publishers, during one collection


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCollection:
    """What a collection did, or would do. All by versions' ids.

    Attributes:
        deleted: those whose objects are gone.
        retired: those that count no more, and are deleted later.
        waiting: those that were retired before, and rest or are leased.
        kept: why others could not be deleted.
        why: why each that counts, waits or is kept stays: a sentence.
    """

    deleted: tuple[str, ...] = ()
    retired: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    kept: dict[str, str] = field(default_factory=dict[str, str])
    why: dict[str, str] = field(default_factory=dict[str, str], compare=False)


async def collect_run(bucket: Bucket, name: str, *, keep: int | None = None, dry: bool = False) -> BucketCollection:
    """Collect from a run in place of its publisher, which may be alive or gone. `keep` and `dry` as for `collect`.
    Raises BucketError: the store would not; what was deleted until then was rightly deleted.
    """
    for _ in range(_TAKEOVERS):
        run = await BucketRun.in_place_of_its_writer(bucket, name)
        with suppress(RunBusyError):  # the next publisher of the run has come meanwhile: in that one's place, then
            return await collect(run, keep=keep, dry=dry)
    raise BucketError(f"{bucket.name} has run {name} taken by one publisher after the other", may_heal=True)


async def collect(run: BucketRun, *, keep: int | None = None, dry: bool = False) -> BucketCollection:
    """Delete what may be deleted. The writer of the run calls this, between two publications.

    `keep` retires what is not among so many newest versions, pinned, wanted, or a base of one of these. `dry` deletes
    and retires nothing, and says what would be; the store's time is learned by a write all the same.

    Raises:
        BucketError: the store would not; what was deleted until then was rightly deleted.
        RunBusyError: another writer has the run.
    """
    if (before := run.pointer) is None:
        return BucketCollection()
    bucket = run.bucket
    now = await store_time(bucket, run.run, run.writer)
    leases = await read_leases(bucket)
    cut = partial(_cut, run.writer, keep, now)
    if not dry:
        # Fails if another writer has the run: only its pointer says what is retired.
        await run.move(cut)
    pointer = cut(before) if dry else _require(run.pointer)
    due = {each.id: partial(_delete_retired, bucket, run.run, each) for each in collectable(pointer, leases, now)}
    lost = await _lost_uploads(bucket, pointer, now)
    dead = {version_id(run.run, order): partial(_delete_upload, bucket, run.run, order) for order in lost}
    kept: dict[str, str] = {}
    for version, delete in () if dry else (due | dead).items():
        if (why := await delete()) is not None:
            kept[version] = why
    gone = frozenset(due.keys() - kept.keys())
    if gone and not dry:
        await run.move(partial(_without, gone))
    counting = {version.id: "it counts" for version in pointer.versions}
    retired = tuple(version.id for version in before.versions if version.id not in counting)
    waiting = (each.id for each in pointer.retired if each.id not in due)
    return BucketCollection(
        deleted=tuple(version for version in due | dead if version not in kept),
        retired=retired,
        waiting=tuple(version for version in waiting if version not in retired),
        kept=kept,
        why=counting | why_waiting(pointer, leases, now) | kept,
    )


def _cut(writer: str, keep: int | None, now: float, seen: Pointer | None) -> Pointer:
    """The pointer without what is not kept, by this writer."""
    pointer = _require(seen)
    return replace(pointer if keep is None else rest_of(pointer, keep=keep, now=now), writer=writer)


async def store_time(bucket: Bucket, run: str, writer: str) -> float:
    """The store's time, in seconds since 1970: that of an object that was just written."""
    key = clock_key(run)
    await bucket.write(key, msgspec.json.encode({"format": 1, "writer": writer, "host_time": time.time()}))
    facts = await bucket.facts(key)
    if facts is None:
        raise BucketError(f"{bucket.name} does not have {key}, which was just written", may_heal=True)
    return facts.modified


async def read_leases(bucket: Bucket) -> list[BucketLease]:
    leases: list[BucketLease] = []
    for facts in await bucket.listed(FOLLOWERS_PREFIX):
        key = FOLLOWERS_PREFIX + facts.key.rpartition("/")[2]
        try:
            note = await bucket.read(key, MAX_BYTES)
        except BucketError as error:
            if error.may_heal:
                raise
            leases.append(lease_of(b"", facts.modified, key))  # too large to be a note
            continue
        if note is not None:
            leases.append(lease_of(note.data, note.facts.modified, key))
    return leases


async def _lost_uploads(bucket: Bucket, pointer: Pointer, now: float) -> list[Order]:
    """The uploads that can never count."""
    found: list[Order] = []
    for name in await bucket.folders(versions_prefix(pointer.run)):
        order = parse_version_folder(name)
        if order is None or not is_dead(order, pointer, float("inf")):
            continue
        facts = await bucket.facts(version_prefix(pointer.run, order) + UPLOAD_NAME)
        if facts is not None and is_dead(order, pointer, now - facts.modified):
            found.append(order)
    return found


async def _delete_retired(bucket: Bucket, run: str, retired: RetiredVersion) -> str | None:
    """Delete a retired version; why not, if it cannot be proved to be that version."""
    order = order_of(retired.id)
    prefix = version_prefix(run, order)
    found = await bucket.read(prefix + MANIFEST_NAME, MAX_MANIFEST_BYTES)
    if found is None:  # an earlier collection was stopped right before the end
        return await _delete_upload(bucket, run, order)
    try:
        manifest = parse_manifest(found.data)
    except ManifestRefusedError as error:
        return f"its manifest cannot be read: {error}"
    if (manifest.run, manifest.order, manifest.digest) != (run, order, retired.digest):
        return "its manifest is not the one that was published"
    await _delete_files(bucket, prefix, manifest.files)
    await bucket.delete(prefix + MANIFEST_NAME)
    await bucket.delete(prefix + UPLOAD_NAME)
    return None


async def _delete_upload(bucket: Bucket, run: str, order: Order) -> str | None:
    """Delete what an upload that never counted, or does not any more, has written by its own account."""
    prefix = version_prefix(run, order)
    found = await bucket.read(prefix + UPLOAD_NAME, MAX_BYTES)
    if found is None:
        return None
    try:
        upload = parse_upload(found.data)
    except PointerRefusedError as error:
        return f"{UPLOAD_NAME} cannot be read: {error}"
    await _delete_files(bucket, prefix, upload.files)
    await bucket.delete(prefix + MANIFEST_NAME)
    await bucket.delete(prefix + UPLOAD_NAME)
    return None


async def _delete_files(bucket: Bucket, prefix: str, names: Iterable[str]) -> None:
    for name in names:
        await bucket.delete(prefix + name)


def _require(pointer: Pointer | None) -> Pointer:
    if pointer is None:
        raise RuntimeError("a run without versions has nothing to collect")
    return pointer


def _without(gone: Collection[str], pointer: Pointer | None) -> Pointer:
    had = _require(pointer)
    return replace(had, retired=tuple(retired for retired in had.retired if retired.id not in gone))
