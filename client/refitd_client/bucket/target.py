"""A publisher's run in an object store.

A version is written and committed into a local folder first, as into any root, and uploaded from there. It counts when
the run's pointer names it (`refitd_client.bucket.pointer`); then its local files are removed. So the local folder needs
room for one version. What a publisher that was killed has left in it is removed by the next one of that run.

Requests are made by an event loop in a thread of the publisher's. The same thread collects, after a publication.
"""

import asyncio
import contextlib
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import wait
from pathlib import Path
from typing import Any, TypeVar

from refitd_client.bucket.collection import collect
from refitd_client.bucket.objects import Bucket
from refitd_client.bucket.pointer import version_prefix
from refitd_client.bucket.run import BucketRun
from refitd_client.contract.naming import INCOMING_PREFIX, Order, parse_version_folder, version_id
from refitd_client.errors import BucketError, RunBusyError, StorageError
from refitd_client.files import durable
from refitd_client.publish.ports import Full
from refitd_client.publish.run_folder import RunFolder

_COLLECT_EVERY = 60.0  # seconds
_log = logging.getLogger("refitd_client")
_T = TypeVar("_T")


class BucketTarget:
    """Uploads the versions of one run. Calls come from one thread at a time."""

    def __init__(self, bucket: Bucket, run: str, *, keep: int) -> None:
        """Start the thread. Call `begin` next, and `close` at the end, whatever happens."""
        self._bucket = bucket
        self._run = BucketRun(bucket, run, keep=keep)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="refitd-bucket", daemon=True)
        self._thread.start()
        self._collection: asyncio.Task[None] | None = None
        self._collected = time.monotonic()

    def begin(self, folder: RunFolder) -> None:
        """Read the run's pointer, and remove what a killed publisher has left in the local folder.

        Raises:
            BucketError: the store cannot be read or written, or does not keep conditions of writes.
        """
        self._do(self._run.begin())
        for path in folder.path.iterdir():
            is_ours = path.name.startswith(INCOMING_PREFIX) or parse_version_folder(path.name) is not None
            if is_ours and path.is_dir() and not path.is_symlink():
                durable.remove_folder(path)
        if (newest := self._run.newest) is not None:
            folder.note_known(newest)

    def url(self, order: Order) -> str:
        return f"{self._bucket.name}/{version_prefix(self._run.run, order)}".rstrip("/")

    def is_used(self, order: Order) -> bool:
        """Whether an upload of this version was ever begun, perhaps by a publisher that is dead. Raises BucketError."""
        return self._do(self._run.is_used(order))

    def base(self) -> str | Full:
        """The version that a delta leads from: the newest that counts, since followers pull what it needs."""
        newest = self._run.newest
        if newest is None:
            return Full(f"run {self._run.run} has no version in {self._bucket.name} yet")
        return version_id(self._run.run, newest)

    def publish(self, run: RunFolder, order: Order, manifest: bytes) -> None:
        """Upload a committed version, make it count, and remove its folder. If that fails it counts nowhere, and its
        step begins a generation.

        Raises:
            BucketError: the store would not.
            RunBusyError: another publisher has the run.
        """
        folder = run.folder_of(order)
        try:
            self._do(self._publish(folder, manifest))
        except BaseException:
            run.withdrawn(order)
            durable.remove_folder(folder)
            raise
        try:
            durable.remove_folder(folder)
        except OSError as error:
            text = "%s was uploaded, and could not be removed (%s): delete it, or the run's next publisher here does"
            _log.warning(text, folder, error)

    def close(self) -> None:
        with contextlib.suppress(BaseException):
            self._do(self._end_collection())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _publish(self, folder: Path, manifest: bytes) -> None:
        await self._end_collection()
        await self._run.publish(folder, manifest)
        if time.monotonic() - self._collected >= _COLLECT_EVERY:
            self._collected = time.monotonic()
            self._collection = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        try:
            done = await collect(self._run)
        except (BucketError, RunBusyError) as error:
            _log.warning("old versions of run %s were not collected: %s", self._run.run, error)
            return
        for version, why in done.kept.items():
            _log.warning("%s stays in %s: %s", version, self._bucket.name, why)

    async def _end_collection(self) -> None:
        """Stop a collection: a publication does not wait for it, and the next one goes on where it was stopped."""
        if self._collection is None:
            return
        self._collection.cancel()
        await asyncio.wait([self._collection])
        self._collection = None

    def _do(self, call: Coroutine[Any, Any, _T]) -> _T:
        """Have the thread do it. An interrupt of this thread ends it too, before it is raised here."""
        task: list[asyncio.Task[_T]] = []

        async def begin() -> _T:
            task.append(asyncio.get_running_loop().create_task(call))
            await asyncio.wait(task)
            return task[0].result()

        async def end() -> None:
            task[0].cancel()

        result = asyncio.run_coroutine_threadsafe(begin(), self._loop)
        try:
            return result.result()
        except BaseException:
            asyncio.run_coroutine_threadsafe(end(), self._loop)  # in turn, so that there is a task
            wait([result])  # its end, and not only its cancellation: the caller removes what it reads
            raise


def spool_folder(name: str) -> Path:
    """The folder that versions for a bucket of this name are written into first: below `REFITD_SPOOL`, or the folder
    for temporary files.

    Raises:
        StorageError: it cannot be made, or is another user's.
    """
    import xxhash

    above = os.environ.get("REFITD_SPOOL")
    spool = Path(above) if above else Path(tempfile.gettempdir()) / f"refitd-spool-{os.getuid()}"
    try:
        spool.mkdir(mode=0o700, parents=bool(above), exist_ok=True)
        status = spool.lstat()
    except OSError as error:
        raise StorageError(f"{spool} cannot be made: {error.strerror}; set REFITD_SPOOL to a local folder") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise StorageError(f"{spool} is not a folder of this user: set REFITD_SPOOL to one")
    return spool / xxhash.xxh3_64(name.encode()).hexdigest()


class BucketStore:
    """A bucket that runs are published into (`ObjectStore`)."""

    def __init__(self, url: str) -> None:
        """Find the bucket of a URL, and make its local folder. Raises BucketError, StorageError, ValueError."""
        self._bucket = Bucket.at(url)
        self.spool = spool_folder(self._bucket.name)

    def begin(self, folder: RunFolder, keep: int) -> BucketTarget:
        """As `ObjectStore.begin`."""
        target = BucketTarget(self._bucket, folder.run, keep=keep)
        try:
            target.begin(folder)
        except BaseException:
            target.close()
            raise
        return target
