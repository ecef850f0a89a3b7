"""A run in a bucket, held by one writer: uploads of versions, and the pointer that makes them count.

    upload.json       on the condition that it is not there: this version is ours, or of those with the same manifest
    files             in parallel; each is digested as it is read and has to be what the manifest says
    refit.json        the manifest
    latest.json       on the condition that it is as we saw it last

A writer that is killed at any of these leaves a pointer that names whole versions only. What it uploaded can never
count once the pointer has gone past it, and is collected then (`collection.py`).

A conditional write whose answer was lost may have been carried out. So after a refusal and after an error the object is
read: if it is what we wrote, it was ours.
"""

import asyncio
import hashlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from refitd_client.bucket.objects import PART, Bucket, ObjectTag
from refitd_client.bucket.pointer import (
    MAX_BYTES,
    RUNS_KEY,
    UPLOAD_NAME,
    BucketVersion,
    Pointer,
    PointerRefusedError,
    RunsList,
    VersionUpload,
    advanced,
    parse_pointer,
    parse_runs,
    parse_upload,
    pointer_key,
    version_prefix,
)
from refitd_client.contract.manifest import FileDigest, Manifest, ManifestFile, parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME, Order, version_id
from refitd_client.errors import BucketError, RunBusyError, StepConflictError
from refitd_client.files.plain_file import plain_file, read_at

_FILES_AT_ONCE = 4
_TRIES = 5  # to add a run's name to the list, which others write as well


class BucketRun:
    """One run of a bucket, and its pointer as this writer saw it last. One call at a time.

    A second writer takes the run with its first version; then every call of the first one raises RunBusyError.
    """

    def __init__(self, bucket: Bucket, run: str, *, keep: int, steers: bool = False) -> None:
        """Take a run, of which `keep` newest versions stay besides the bases that they need. Call `begin` before
        anything else.

        With `steers` this writer says itself which version followers are to serve. Else they serve what it publishes,
        whatever a writer before it wanted.
        """
        self.bucket = bucket
        self.run = run
        self.writer = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self.pointer: Pointer | None = None
        self._keep = keep
        self._steers = steers
        self._tag: ObjectTag | None = None
        self._lost: str | None = None
        self._is_certain = True  # that the pointer is as we saw it, if no other writer moved it

    @classmethod
    async def in_place_of_its_writer(cls, bucket: Bucket, run: str) -> "BucketRun":
        """A run to collect from, whose publisher may be alive or gone: what is moved stays that one's.

        Nothing may be published by it. Raises BucketError: the store would not.
        """
        mine = cls(bucket, run, keep=1)
        mine.pointer, mine._tag = await read_pointer(bucket, run)
        if mine.pointer is not None:
            mine.writer = mine.pointer.writer
        return mine

    @property
    def newest(self) -> Order | None:
        """The newest version that counts, None in a run without any."""
        return None if self.pointer is None else self.pointer.newest

    async def begin(self) -> None:
        """Read the pointer, and add the run's name to the list of runs. Raises BucketError if the store would not; or
        it does not keep conditions, and two writers could both win.
        """
        await require_conditions(self.bucket)
        self.pointer, self._tag = await read_pointer(self.bucket, self.run)
        await self._register()

    async def is_used(self, order: Order) -> bool:
        """Whether an upload of this version was ever begun."""
        return await self.bucket.facts(version_prefix(self.run, order) + UPLOAD_NAME) is not None

    async def publish(self, folder: Path, data: bytes) -> None:
        """Upload a version from its folder, and make it count. `data` are the manifest's bytes.

        Raises:
            RunBusyError: another writer has the run, or this version of it. Nothing of ours counts.
            StepConflictError: the version is not newer than those that count.
            BucketError: the store would not; or a file is not what the manifest says.
        """
        manifest = parse_manifest(data)
        version = BucketVersion.of(manifest)
        self._require_held()
        if not self._is_certain:
            await self._see_own()
        try:
            advanced(self.pointer, version, writer=self.writer, keep=self._keep, now=0.0)  # before any byte travels
        except PointerRefusedError as error:
            raise StepConflictError(f"{self.bucket.name}: {error}") from None
        content, files = hashlib.sha256(data).hexdigest(), tuple(sorted(manifest.files))
        upload = VersionUpload(writer=self.writer, files=files, manifest=content)
        await self._claim(manifest, upload)
        await self._upload(folder, manifest)
        now = await self._write_manifest(manifest, data)

        def change(pointer: Pointer | None) -> Pointer:
            if pointer is not None and version in pointer.versions:
                return pointer  # our write was carried out, and a collection has moved the pointer after it
            if pointer is not None:  # who steers says later that this one is wanted, and until then what was is
                pointer = replace(pointer, desired=(pointer.desired or pointer.target) if self._steers else None)
            return advanced(pointer, version, writer=self.writer, keep=self._keep, now=now)

        try:
            await self.move(change)
        except RunBusyError:
            # A collection that took the upload for dead, while this process was stopped, has taken `upload.json` too.
            # Without it what was written since would stay for ever.
            with suppress(BucketError):
                await self.bucket.write_new(
                    version_prefix(self.run, manifest.order) + UPLOAD_NAME, msgspec.json.encode(upload)
                )
            raise

    async def move(self, change: Callable[[Pointer | None], Pointer]) -> None:
        """Write the pointer that `change` makes of the one that this writer saw last.

        A collection in this writer's place may have moved it since: then of that one. Raises RunBusyError: another
        writer has moved it since.
        """
        for _ in range(_TRIES):
            self._require_held()
            if await self._moved(change(self.pointer)):
                return
        raise BucketError(f"{self.bucket.name} has {pointer_key(self.run)} changed all the time", may_heal=True)

    async def _moved(self, wanted: Pointer) -> bool:
        """Write a pointer; False where `self.pointer` was not the one that is there, and is it now."""
        data, key = wanted.to_json(), pointer_key(self.run)
        failed: BucketError | None = None
        tag: ObjectTag | None = None
        self._is_certain = False
        try:
            if self._tag is None:
                tag = await self.bucket.write_new(key, data)
            else:
                tag = await self.bucket.write_over(key, data, self._tag)
        except BucketError as error:
            failed = error
        if tag is None:
            tag = await self._after_refusal(data, failed)
        if tag is not None:
            self.pointer, self._tag = wanted, tag
        self._is_certain = True
        return tag is not None

    async def _see_own(self) -> None:
        """Look whether a write of the pointer that was broken off has been carried out."""
        pointer, tag = await read_pointer(self.bucket, self.run)
        if pointer is not None and pointer.writer == self.writer:
            self.pointer, self._tag = pointer, tag
        self._is_certain = True

    async def _after_refusal(self, data: bytes, failed: BucketError | None) -> ObjectTag | None:
        """The pointer's tag if it is what we wrote all the same; None if it is this writer's, moved by a collection."""
        found = await self.bucket.read(pointer_key(self.run), MAX_BYTES)
        if found is not None and found.data == data:
            return found.facts.tag
        if failed is not None and (None if found is None else found.facts.tag) == self._tag:
            raise failed  # nothing has moved: the same call may succeed later
        if found is None:
            self._lost = (
                f"the pointer of run {self.run} in {self.bucket.name} was deleted: nothing of the run counts there. "
                f"Restore {pointer_key(self.run)}, or open a new publisher, which begins the run anew"
            )
            raise RunBusyError(self._lost)
        try:
            pointer = parse_pointer(found.data, self.run)
            if pointer.writer == self.writer:
                self.pointer, self._tag = pointer, found.facts.tag
                return None
            other = f"moved it to {pointer.versions[0].id} ({pointer.writer})"
        except PointerRefusedError as error:
            other = f"wrote what is no pointer ({error})"
        self._lost = (
            f"run {self.run} in {self.bucket.name} is held by another publisher, which has {other}: one publisher a "
            "run. Stop one of them, or use another run name"
        )
        raise RunBusyError(self._lost)

    def _require_held(self) -> None:
        if self._lost is not None:
            raise RunBusyError(self._lost)

    async def _claim(self, manifest: Manifest, upload: VersionUpload) -> None:
        """Have the version's prefix, alone or with those who write the same bytes, such as this hub restarted."""
        key = version_prefix(self.run, manifest.order) + UPLOAD_NAME
        data = msgspec.json.encode(upload)
        try:
            if await self.bucket.write_new(key, data) is not None:
                return
        except BucketError as error:
            if not error.may_heal:
                raise
        found = await self.bucket.read(key, MAX_BYTES)
        if found is None:
            raise BucketError(f"{self.bucket.name} did not take {key}: is it writable?", may_heal=True)
        if found.data != data:
            try:
                theirs = parse_upload(found.data)
                if theirs.manifest == upload.manifest:
                    return
                writer = theirs.writer
            except PointerRefusedError as error:
                writer = f"unknown: {error}"
            raise RunBusyError(
                f"{version_id(self.run, manifest.order)} in {self.bucket.name} was begun by another publisher "
                f"({writer}): stop that one if it runs, and open a new one, which begins a generation. Remove nothing"
            )

    async def _upload(self, folder: Path, manifest: Manifest) -> None:
        room = asyncio.Semaphore(_FILES_AT_ONCE)
        prefix = version_prefix(self.run, manifest.order)

        async def one(name: str, file: ManifestFile) -> None:
            async with room:
                await upload_file(self.bucket, prefix + name, folder / name, file)

        try:
            async with asyncio.TaskGroup() as group:
                for name, file in manifest.files.items():
                    group.create_task(one(name, file))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _write_manifest(self, manifest: Manifest, data: bytes) -> float:
        """Write the manifest; return the store's time."""
        key = version_prefix(self.run, manifest.order) + MANIFEST_NAME
        await self.bucket.write(key, data)  # ours alone: `upload.json` says so
        facts = await self.bucket.facts(key)
        if facts is None or facts.size != len(data):
            raise BucketError(f"{self.bucket.name} does not have {key} as it was written", may_heal=True)
        return facts.modified

    async def _register(self) -> None:
        """Add the run's name to the list of runs, on the condition that nobody else writes it meanwhile."""
        for _ in range(_TRIES):
            found = await self.bucket.read(RUNS_KEY, MAX_BYTES)
            known = RunsList(runs=()) if found is None else _runs_of(self.bucket, found.data)
            if self.run in known.runs:
                return
            data = msgspec.json.encode(RunsList(runs=tuple(sorted({*known.runs, self.run}))))
            if found is None:
                tag = await self.bucket.write_new(RUNS_KEY, data)
            else:
                tag = await self.bucket.write_over(RUNS_KEY, data, found.facts.tag)
            if tag is not None:
                return
        raise BucketError(f"{self.bucket.name} has {RUNS_KEY} changed by others all the time", may_heal=True)


async def read_pointer(bucket: Bucket, run: str) -> tuple[Pointer | None, ObjectTag | None]:
    """A run's pointer and what was seen of it; None for a run without versions. Raises BucketError if it cannot be
    read, or is none.
    """
    found = await bucket.read(pointer_key(run), MAX_BYTES)
    if found is None:
        return None, None
    try:
        return parse_pointer(found.data, run), found.facts.tag
    except PointerRefusedError as error:
        raise BucketError(
            f"{pointer_key(run)} in {bucket.name} is not the pointer of run {run}: {error}. Restore it, or use "
            "another prefix"
        ) from None


def _runs_of(bucket: Bucket, data: bytes) -> RunsList:
    try:
        return parse_runs(data)
    except PointerRefusedError as error:
        raise BucketError(f"{RUNS_KEY} in {bucket.name} is not the list of its runs: {error}") from None


async def list_runs(bucket: Bucket) -> tuple[str, ...]:
    """The names of all runs, by the one object that has them."""
    found = await bucket.read(RUNS_KEY, MAX_BYTES)
    return () if found is None else _runs_of(bucket, found.data).runs


async def require_conditions(bucket: Bucket) -> None:
    """Try whether the store refuses a conditional write whose condition does not hold. Leaves one object of 2 bytes.
    Raises BucketError if it does not refuse, so that two publishers could both move a pointer; or it would not answer.
    """
    key = f"probes/{secrets.token_hex(16)}"  # an object of our own: others try at the same time
    try:
        await _try_conditions(bucket, key)
    except BaseException:
        with suppress(BucketError):  # what went wrong before says more
            await bucket.delete(key)
        raise
    await bucket.delete(key)


async def _try_conditions(bucket: Bucket, key: str) -> None:
    first = await bucket.write_new(key, b"1\n")
    again = await bucket.write_new(key, b"2\n")
    if again is not None:
        raise _no_conditions(bucket, "If-None-Match")
    second = None if first is None else await bucket.write_over(key, b"3\n", first)
    if first is None or second is None:  # an answer was lost on the way, and the library asked again
        raise BucketError(f"{bucket.name} did not carry out a write whose condition held", may_heal=True)
    if await bucket.write_over(key, b"4\n", first) is not None:
        raise _no_conditions(bucket, "If-Match")


def _no_conditions(bucket: Bucket, header: str) -> BucketError:
    return BucketError(
        f"{bucket.name} does not keep conditions of writes ({header}), so two publishers could both win: use a store "
        "that does, as S3, Google Cloud Storage, Azure and Ceph do"
    )


async def upload_file(bucket: Bucket, key: str, path: Path, file: ManifestFile) -> None:
    """Upload a file, and compare its bytes with the manifest on the way. Raises BucketError if the file is not what the
    manifest says, or cannot be read; or the store would not.
    """
    digest, sent = FileDigest(), 0
    unread: OSError | None = None  # the library does not pass on what a generator raised

    def piece(start: int) -> bytes:
        with plain_file(path) as fd:  # anew for each piece: a cancelled upload leaves no open file
            most = min(os.fstat(fd).st_size, file.size + 1)  # a byte too many shows that the file is too long
            data = read_at(fd, min(PART, max(0, most - start)), start)
        digest.update(data)
        return data

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent, unread
        try:
            while data := await asyncio.to_thread(piece, sent):
                sent += len(data)
                yield data
        except OSError as error:
            unread = error
            raise

    try:
        if file.size <= PART:
            data = b"".join([piece async for piece in pieces()])
            await bucket.write(key, data)
        else:
            await bucket.upload(key, pieces())
    except (OSError, BucketError):
        if unread is None:
            raise
        raise BucketError(f"{path} could not be read: {unread.strerror or unread}", may_heal=True) from None
    if sent != file.size or digest.text != file.digest:
        raise BucketError(f"{path} is not what its manifest says: {sent} bytes were read, {file.size} were digested")
