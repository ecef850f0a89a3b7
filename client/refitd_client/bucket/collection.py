"""Deletes what does not count any more from a run in a bucket: retired versions, and uploads that can never count.

A retired version is deleted file by file, as its own manifest names them; then the manifest; then `upload.json`; then
it is taken off the pointer's list. So wherever a collection is stopped, the next one finds the proof of what to go on
with. An object that no manifest and no `upload.json` of that version names stays.

If a listing or a read fails, nothing is deleted: what was not seen may be a lease.
"""

import time
from collections.abc import Collection, Iterable
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
)
from refitd_client.bucket.run import BucketRun
from refitd_client.contract.manifest import MAX_MANIFEST_BYTES, ManifestRefusedError, parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME, Order, parse_version_folder, version_id
from refitd_client.errors import BucketError


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCollection:
    """What a collection did. `deleted` are versions' ids; `kept` says of others why they could not be deleted."""

    deleted: tuple[str, ...] = ()
    kept: dict[str, str] = field(default_factory=dict[str, str])


async def collect(run: BucketRun) -> BucketCollection:
    """Delete what may be deleted. The writer of the run calls this, between two publications.

    Raises:
        BucketError: the store would not; what was deleted until then was rightly deleted.
        RunBusyError: another writer has the run.
    """
    if run.pointer is None:
        return BucketCollection()
    bucket = run.bucket
    now = await store_time(bucket, run.run, run.writer)
    leases = await read_leases(bucket)
    await run.move(
        partial(_again, run.writer)
    )  # fails if another writer has the run: only its pointer says what is retired
    pointer = _require(run.pointer)
    deleted: list[str] = []
    kept: dict[str, str] = {}
    for retired in collectable(pointer, leases, now):
        why = await _delete_retired(bucket, run.run, retired)
        if why is None:
            deleted.append(retired.id)
        else:
            kept[retired.id] = why
    if deleted:
        await run.move(partial(_without, frozenset(deleted)))
    for order in await _dead_uploads(bucket, pointer, now):
        why = await _delete_upload(bucket, run.run, order)
        if why is None:
            deleted.append(version_id(run.run, order))
        else:
            kept[version_id(run.run, order)] = why
    return BucketCollection(deleted=tuple(deleted), kept=kept)


async def store_time(bucket: Bucket, run: str, writer: str) -> float:
    """The store's time, in seconds since 1970: that of an object that was just written."""
    key = clock_key(run)
    await bucket.write(key, msgspec.json.encode({"format": 1, "writer": writer, "host_time": time.time()}))
    facts = await bucket.facts(key)
    if facts is None:
        raise BucketError(f"{bucket.name} does not have {key}, which was just written", may_heal=True)
    return facts.modified


async def read_leases(bucket: Bucket) -> list[BucketLease]:
    """What followers' notes lease."""
    leases: list[BucketLease] = []
    for facts in await bucket.listed(FOLLOWERS_PREFIX):
        key = FOLLOWERS_PREFIX + facts.key.rpartition("/")[2]
        try:
            note = await bucket.read(key, MAX_BYTES)
        except BucketError as error:
            if error.may_heal:
                raise
            leases.append(lease_of(b"", facts.modified))  # too large to be a note
            continue
        if note is not None:
            leases.append(lease_of(note.data, note.facts.modified))
    return leases


async def _dead_uploads(bucket: Bucket, pointer: Pointer, now: float) -> list[Order]:
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


def _again(writer: str, pointer: Pointer | None) -> Pointer:
    """The same pointer, by this writer: writing it shows that no other one has the run."""
    return replace(_require(pointer), writer=writer)


def _without(gone: Collection[str], pointer: Pointer | None) -> Pointer:
    """The pointer without these retired versions."""
    had = _require(pointer)
    return replace(had, retired=tuple(retired for retired in had.retired if retired.id not in gone))
