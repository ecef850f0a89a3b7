"""What holds of an object store when publishers, collectors and hosts use it and die: checked at each change."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from refitd_client.bucket.collection import BucketCollection
from refitd_client.bucket.pointer import (
    FOLLOWERS_PREFIX,
    LEASE_SECONDS,
    UPLOAD_NAME,
    UPLOAD_SECONDS,
    BucketVersion,
    Pointer,
    order_of,
    parse_note,
    parse_pointer,
    pointer_key,
    version_prefix,
    versions_prefix,
)
from refitd_client.contract.manifest import parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME, Order, parse_version_folder, version_folder, version_id

from .disk import SimFolder, bytes_of
from .sim_bucket import SimStore, StoredObject

if TYPE_CHECKING:
    from .store_world import StoreWorld

RUN = "run"


class StorePromises:
    """Watches a store. `pointer` is the one that is there now, `counted` every version that one has ever named."""

    def __init__(self, world: "StoreWorld", store: SimStore) -> None:
        self._world = world
        self._store = store
        self.pointer: Pointer | None = None
        self.counted: dict[str, BucketVersion] = {}
        self.lost: set[str] = set()  # writers that another one has taken the pointer from
        self._bases: dict[str, str | None] = {}
        self._leased: dict[tuple[str, str], tuple[float, float]] = {}  # follower and version → since when, until when

    # What the store tells.

    def written(self, key: str, before: StoredObject | None, after: StoredObject) -> None:
        if key == pointer_key(RUN):
            was = None if before is None else self.pointer
            self.pointer = parse_pointer(after.data, RUN)
            self._pointer_moves(was, self.pointer, after.facts.modified)
        elif key.startswith(FOLLOWERS_PREFIX):
            self._is_leased(after)
        elif key.startswith(versions_prefix(RUN)) and before is not None:
            assert before.data == after.data, f"{key} was written twice, with other bytes"

    def deleted(self, key: str, began: float) -> None:
        folder = key.removeprefix(versions_prefix(RUN)).partition("/")[0]
        assert key != pointer_key(RUN), "the pointer was deleted"
        if key.startswith(versions_prefix(RUN)) and (order := parse_version_folder(folder)) is not None:
            self._may_go(key, order, began)

    # What holds when the pointer moves.

    def _pointer_moves(self, before: Pointer | None, after: Pointer, now: float) -> None:
        named = {version.id: version for version in after.versions}
        retired = {version.id: version for version in after.retired}
        assert not named.keys() & retired.keys(), "a version counts and is retired"
        for version in after.versions:
            assert version.base is None or version.base in named, f"{version.id} counts without {version.base}"
        if before is not None:
            self._goes_on(before, after, now)
        for version in after.versions:
            if version.id not in self.counted:
                path, folder = self._is_whole(version)
                self.counted[version.id] = version
                self._bases[version.id] = version.base
                self._world.counts_now(path, version.id, folder)
        self._world.pointer_moved(after)

    def _goes_on(self, before: Pointer, after: Pointer, now: float) -> None:
        assert after.newest >= before.newest, f"the pointer went back from {before.newest} to {after.newest}"
        if after.writer != before.writer:
            self.lost.add(before.writer)
            assert after.writer not in self.lost, f"{after.writer} had lost the pointer, and has moved it"
            is_taken = after.newest > before.newest or self._world.is_of_hub(after.versions[0])
            assert is_taken, f"{after.writer} has taken the pointer without a version from {before.writer}"
        named, retired = ({version.id for version in those} for those in (after.versions, after.retired))
        for gone in {version.id for version in before.versions} - named:
            assert gone in retired, f"{gone} counts no more, and the pointer does not name it as retired"
        for back in {version.id for version in before.retired} & named:
            raise AssertionError(f"{back} was retired, and counts again")
        for gone in {version.id for version in before.retired} - retired:
            left = self._store.below(version_prefix(RUN, order_of(gone)))
            assert not left, f"{gone} is off the list, and {[each.facts.key for each in left]} are there"
        for each in after.retired:
            assert each.at <= now, f"{each.id} was retired at a time that has not come"
        was, now_wanted = before.target, after.target
        barred = {version.id for version in after.versions if version.barred}
        if was is not None and now_wanted is not None and was not in barred:
            assert order_of(now_wanted) >= order_of(was), f"{was} was wanted, and {now_wanted} is, and no rollback was"

    def _is_whole(self, version: BucketVersion) -> tuple[str, SimFolder]:
        """All that the manifest of a version names is there, as its trainer wrote it."""
        path = f"{RUN}/{version_folder(version.order)}"
        known = self._world.known.at(path, version.digest)
        assert known is not None, f"{version.id} counts, and no trainer wrote it"
        folder, manifest = known
        prefix = version_prefix(RUN, version.order)
        there = {each.facts.key.removeprefix(prefix): each.data for each in self._store.below(prefix)}
        assert there.pop(MANIFEST_NAME, None) == manifest, f"{version.id} counts without its manifest"
        assert there.pop(UPLOAD_NAME, None) is not None, f"{version.id} counts without {UPLOAD_NAME}"
        assert set(there) == set(parse_manifest(manifest).files), f"{version.id} counts with {sorted(there)}"
        for name, data in there.items():
            assert data == bytes_of(folder.make, name, folder.content), f"{name} of {version.id} has other bytes"
        return path, folder

    # What holds when something is deleted.

    def _is_leased(self, note: StoredObject) -> None:
        told, now = parse_note(note.data), note.facts.modified
        known = {version for follower, version in self._leased if follower == told.follower}
        named = self._with_bases([*told.pulls, *filter(None, [told.serves])])
        for version in known - named:
            del self._leased[told.follower, version]
        for version in named:
            since, until = self._leased.get((told.follower, version), (now, now))
            self._leased[told.follower, version] = since if until > now else now, now + told.lease_seconds

    def _with_bases(self, versions: Iterable[str]) -> set[str]:
        found, named = set[str](), list(versions)
        while named:
            version = named.pop()
            is_there = version_prefix(RUN, order_of(version)) + MANIFEST_NAME in self._store.objects
            if is_there and version not in found:
                found.add(version)
                named += filter(None, [self._bases.get(version)])
        return found

    def _may_go(self, key: str, order: Order, began: float) -> None:
        version, pointer, now = version_id(RUN, order), self.pointer, self._store.time
        assert pointer is not None, f"{key} was deleted from a run without a pointer"
        assert all(each.id != version for each in pointer.versions), f"{key} was deleted, and {version} counts"
        for (follower, leased), (since, until) in self._leased.items():
            # One whose lease had lapsed, and who comes back while a collection deletes, is late.
            is_held = leased == version and since <= began < until and until > now
            assert not is_held, f"{key} was deleted, and {follower} leases {version}"
        if version in self.counted:
            at = next((each.at for each in pointer.retired if each.id == version), now - LEASE_SECONDS)
            assert now - at >= LEASE_SECONDS, f"{key} was deleted {now - at:.0f} s after {version} was retired"
            return
        assert order < pointer.newest, f"{key} was deleted, and {version} may come to count"
        upload = self._store.objects.get(version_prefix(RUN, order) + UPLOAD_NAME)
        if upload is not None:
            age = now - upload.facts.modified
            assert age >= UPLOAD_SECONDS, f"{key} was deleted {age:.0f} s after its upload began"

    # What holds in the end.

    def hold_now(self) -> None:
        """Several times a second: what was found at a change, in whosever process."""
        if self._store.broken:
            raise self._store.broken[0]

    def nothing_leaks(self, last: BucketCollection) -> None:
        """After time has passed and somebody has collected, what is there counts, or may come to: that the pointer has
        not gone past, as of a trainer that had begun a generation, and was killed in it.
        """
        assert self.pointer is not None, "nothing was ever published"
        left = f"{last}, {self.pointer.retired}"
        assert not last.kept, f"leaked: {left}"
        assert not self.pointer.retired, f"leaked: {left}"
        prefix = versions_prefix(RUN)
        folders = {each.facts.key.removeprefix(prefix).partition("/")[0] for each in self._store.below(prefix)}
        named = {version_folder(version.order) for version in self.pointer.versions}
        orders = {folder: parse_version_folder(folder) for folder in folders}
        later = {folder for folder, order in orders.items() if order is not None and order > self.pointer.newest}
        left = folders - named - later
        assert not left, f"leaked: {sorted(left)}, and {self.pointer.versions[0].id} is the newest"
        assert named <= folders, f"lost: {sorted(named - folders)}"
        for version in self.pointer.versions:
            self._is_whole(version)
