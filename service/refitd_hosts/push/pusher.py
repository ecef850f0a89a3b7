"""Pushes good versions into an object store: files, manifest, then the run's pointer (`refitd_client.bucket`).

The pointer wants what this service wants of its own engines: a rollback here takes the store's followers back as well,
and a pause or a canary's check here holds them.
If another publisher has moved a run's pointer, that run is not pushed any more, and the fault says so. A store that
does not answer holds up nothing else; it is tried again.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import structlog

from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.targets import Targets
from refitd_client.bucket.collection import collect
from refitd_client.bucket.objects import Bucket
from refitd_client.bucket.pointer import BucketVersion, Pointer
from refitd_client.bucket.run import BucketRun
from refitd_client.contract.manifest import MAX_MANIFEST_BYTES, ManifestRefusedError, parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME, parse_version_id
from refitd_client.errors import PublishError, RunBusyError
from refitd_client.files.plain_file import read_plain
from refitd_hosts.push.plan import for_followers, left_behind, missing_there, to_push, wanted_there, without_files

PUSH_LOOK_SECONDS = 2.0  # between two looks at what is to be pushed, if nothing changes
PUSH_RETRY_SECONDS = 2.0  # after an error, doubled with each
LONGEST_PUSH_RETRY_SECONDS = 60.0
COLLECT_SECONDS = 60.0

log = structlog.get_logger("refitd")


class Pusher:
    """Pushes every run of the root. `uploading` are the ids of versions whose files it reads: they must stay. Of each
    run the newest `keep` versions stay in the bucket, besides their bases.
    """

    def __init__(self, store: Store, targets: Targets, root: Path, bucket: Bucket, *, keep: int) -> None:
        self._store, self._targets, self._root, self._bucket, self._keep = store, targets, root, bucket, keep
        self._runs: dict[str, BucketRun] = {}
        self._faults: dict[str, str] = {}
        self._lost: set[str] = set()
        self._without_files: set[str] = set()
        self.uploading: frozenset[str] = frozenset()

    def store_with(self, version: str, digest: str) -> str:
        """The store's URL where it has the version with this digest, else "". Another publisher may have the run."""
        parsed = parse_version_id(version)
        run = None if parsed is None or parsed[0] in self._lost else self._runs.get(parsed[0])
        there = () if run is None or run.pointer is None else run.pointer.versions
        return self._bucket.name if any(each.id == version and each.digest == digest for each in there) else ""

    async def run(self) -> None:
        failures = 0
        collect_at = self._store.clock.monotonic() + COLLECT_SECONDS
        while True:
            seen = self._store.changed.count
            if collects := self._store.clock.monotonic() >= collect_at:
                collect_at = self._store.clock.monotonic() + COLLECT_SECONDS
            failures = failures + 1 if await self._look(collects=collects) else 0
            if failures:
                await asyncio.sleep(min(LONGEST_PUSH_RETRY_SECONDS, PUSH_RETRY_SECONDS * 2.0 ** (failures - 1)))
            else:
                await self._store.changed.wait_after(seen, within=PUSH_LOOK_SECONDS)

    async def _look(self, *, collects: bool) -> bool:
        """Push what is new of each run; whether that failed."""
        runs = {version.run for version in self._store.versions.values()} - self._lost
        failed = [await self._push_run(run, collects=collects) for run in sorted(runs)]
        self._store.faults.set(push="; ".join(self._faults.values()) or None)
        return any(failed)

    async def _push_run(self, name: str, *, collects: bool) -> bool:
        self._say_without_files(name)
        try:
            run = await self._begun(name)
            if run is None:
                return False
            await self._push_new(run)
            self._require_own(run)
            missing = await self._mirror(run)
            if collects:
                await self._collect(run)
        except RunBusyError as error:
            self._lost.add(name)
            again = "When that one has ended, restart this service: it takes the run again"
            self._fault(name, f"run {name} is not pushed any more: {error}. {again}")
            return False
        except PublishError as error:
            self._fault(name, f"run {name} cannot be pushed: {error}")
            return True
        if missing is None:
            self._faults.pop(name, None)
        else:
            self._fault(name, f"run {name}: {missing}")
        return False

    def _say_without_files(self, name: str) -> None:
        """Say of a run once that some of its versions are not pushed, since their trainer wants no files of them."""
        version = without_files(self._store.versions_of(name))
        if version is not None and name not in self._without_files:
            self._without_files.add(name)
            text = f"{version.files_to_come}, and only versions with files are pushed to {self._bucket.name}"
            self._store.say("version", version.id, text, of_run=name, is_fault=True)

    async def _begun(self, name: str) -> BucketRun | None:
        """The run in the store; None if there is nothing to push of it yet."""
        if name not in self._runs:
            if not to_push(self._store.versions_of(name), None, ()):
                return None
            run = BucketRun(self._bucket, name, keep=self._keep, steers=True)
            await run.begin()
            self._runs[name] = run
        return self._runs[name]

    async def _push_new(self, run: BucketRun) -> None:
        while waiting := to_push(self._store.versions_of(run.run), run.newest, _counting(run)):
            version = waiting[0]
            self.uploading = frozenset(each.id for each in waiting)
            try:
                began = self._store.clock.monotonic()
                await self._upload(run, version)
            finally:
                self.uploading = frozenset()
            seconds = self._store.clock.monotonic() - began
            text = f"pushed {version.files.bytes or 0} bytes to {self._bucket.name} in {seconds:.2f} s"
            self._store.say("version", version.id, text, of_run=run.run)

    async def _upload(self, run: BucketRun, version: VersionRecord) -> None:
        folder = self._root / version.path
        try:
            data = await asyncio.to_thread(read_plain, folder / MANIFEST_NAME, MAX_MANIFEST_BYTES)
            digest = parse_manifest(data).digest
        except (OSError, ManifestRefusedError) as error:
            raise PublishError(f"the manifest of {version.id} cannot be read: {error}") from error
        if digest != version.digest:
            raise PublishError(f"the manifest of {version.id} is not the one that was checked")
        await run.publish(folder, data)

    def _require_own(self, run: BucketRun) -> None:
        """See that the run is this service's: this process has moved its pointer, or its newest version is from here.

        Else another publisher has it, and nothing newer is here to take it with: as after a restart of a hub whose run
        somebody else has taken over.
        """
        if run.pointer is None or run.pointer.writer == run.writer:
            return
        newest = run.pointer.versions[0]
        here = self._store.versions.get(newest.id)
        if newest.id not in self._store.gone and (here is None or here.digest != newest.digest):
            del self._runs[run.run]  # it is begun anew: what is there then is read
            raise PublishError(
                f"{self._bucket.name} has {newest.id}, which is not from here and is newer than what is good here: "
                f"another publisher has the run ({run.pointer.writer})"
            )

    async def _mirror(self, run: BucketRun) -> str | None:
        """Have the pointer say what is pinned, barred and wanted here, if it does not; why it cannot, if it cannot."""
        if run.pointer is None:
            return None
        name, store = run.run, self._store
        known, update = self._targets.with_lost(name), store.updates.get(name)
        wanted = for_followers(run.pointer, self._targets.of_run(name).wanted, known)
        there = wanted_there(run.pointer, wanted, update, self._targets.strategy, store.engines_of(name))
        waiting = {each.id for each in to_push(store.versions_of(name), run.newest, _counting(run))}
        missing = missing_there(run.pointer, wanted, waiting)
        left = left_behind(run.pointer, wanted, store.gone, known)
        change = _as_here(store.versions, there, left, is_closed=name in store.runs.closed)
        if change(run.pointer) != run.pointer:
            await run.move(change)
        return missing

    async def _collect(self, run: BucketRun) -> None:
        done = await collect(run)
        for version in done.deleted:
            self._store.say("version", version, f"was deleted from {self._bucket.name}", of_run=run.run)
        for version, why in done.kept.items():
            log.warning("a version stays in the store", version=version, store=self._bucket.name, reason=why)

    def _fault(self, run: str, text: str) -> None:
        if self._faults.get(run) != text:
            self._faults[run] = text
            self._store.say("root", "push", text, is_fault=True)


def _counting(run: BucketRun) -> frozenset[str]:
    return frozenset() if run.pointer is None else frozenset(version.id for version in run.pointer.versions)


def _as_here(
    known: Mapping[str, VersionRecord],
    wanted: str | None,
    left: Collection[str] = (),
    *,
    is_closed: bool = False,
) -> Callable[[Pointer | None], Pointer]:
    """What makes a pointer that says what is pinned, barred and wanted here, and whether the run has ended.

    A version of another publisher may have the id of one that is here, and nothing is said of that. `known` are the
    versions that are here, `wanted` the id of the one that followers are to serve (None leaves that as it is), and
    `left` the ids of others that are barred.
    """

    def change(pointer: Pointer | None) -> Pointer:
        if pointer is None:
            raise RuntimeError("a run without versions wants nothing")
        ours = {
            version.id: here
            for version in pointer.versions
            if (here := known.get(version.id)) is not None and here.digest == version.digest
        }
        versions = tuple(
            _said_of(version, here)
            if (here := ours.get(version.id))
            else replace(version, barred=version.barred or version.id in left)
            for version in pointer.versions
        )
        good = {version.id for version in versions if not version.barred}
        desired = wanted if wanted in ours else pointer.desired
        if not good:
            # Followers stay, also when the next version comes: it waits for what it waits for here.
            desired = desired or versions[0].id
        elif desired not in good and desired != wanted:
            desired = None
        return replace(pointer, versions=versions, desired=desired, is_closed=is_closed)

    return change


def _said_of(version: BucketVersion, here: VersionRecord) -> BucketVersion:
    return replace(
        version,
        pinned=here.pinned,
        barred=here.barred,
        may_lack=here.announced.may_lack,
        allow_extra=here.announced.allow_extra,
    )
