"""Where a run's objects lie in a bucket, its pointer, and what moves, retires and collects versions. Pure.

    <prefix>/<exp~trial>/latest.json                the pointer: which versions there are, newest first
    <prefix>/<exp~trial>/versions/v000123/upload.json     who uploads it, and which files; written first, once
    <prefix>/<exp~trial>/versions/v000123/model-0000i-of-0000N.safetensors, …
    <prefix>/<exp~trial>/versions/v000123/refit.json      the manifest, after all files
    <prefix>/<exp~trial>/collected.json             written before each collection, for the store's time
    <prefix>/runs.json                              the names of all runs
    <prefix>/followers/<name>.json                  what a follower holds and pulls, and for how long that is a lease

A version counts when the pointer names it, and not before. The pointer is moved by conditional writes alone: by one who
has seen what it replaces, so of two publishers one loses. Objects of a version are never written twice: `upload.json`
is written on the condition that it is not there, and its writer alone writes the others.

A version that is not kept is retired: taken out of the pointer's list, so that followers begin no pull of it. It is
collected when it has been retired for a lease's length, and no lease names it or a version that stands on it. Ages are
differences of times that the store itself gave to objects, so that hosts' clocks do not matter.

`why_…` say in sentences why versions stay or go. Times are the store's, in seconds since 1970.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import TypeVar

import msgspec

from refitd_client.contract.decoding import from_json
from refitd_client.contract.manifest import Manifest
from refitd_client.contract.naming import (
    InvalidNameError,
    Order,
    check_run,
    parse_version_id,
    run_slots,
    version_folder,
    version_id,
)
from refitd_client.contract.states import Kind

FORMAT = 1
MAX_BYTES = 4 * 2**20  # of a pointer, or another object that is read whole and is no manifest
LEASE_SECONDS = 600.0  # what a report leases, without another one
MAX_LEASE_SECONDS = 3600.0  # what any report can lease: one that says more is not believed
UPLOAD_SECONDS = 3600.0  # so long after its begin, an upload that can never count is taken for dead
RUNS_KEY = "runs.json"
FOLLOWERS_PREFIX = "followers/"
UPLOAD_NAME = "upload.json"

_T = TypeVar("_T")


class PointerRefusedError(ValueError):
    """An object that is not what its key says: not JSON, of another format, with names that cannot be."""


def run_prefix(run: str) -> str:
    return f"{run_slots(run)}/"


def pointer_key(run: str) -> str:
    return f"{run_prefix(run)}latest.json"


def clock_key(run: str) -> str:
    """The key of the object that is written to learn the store's time."""
    return f"{run_prefix(run)}collected.json"


def versions_prefix(run: str) -> str:
    return f"{run_prefix(run)}versions/"


def version_prefix(run: str, order: Order) -> str:
    return f"{versions_prefix(run)}{version_folder(order)}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketVersion:
    """A version that counts. `digest` is the manifest's, `bytes` those of its files.

    `pinned` and `barred` are a hub's: an operator keeps it; it was rolled back from, and no engine goes there. So are
    `may_lack`, patterns of the names of tensors that it may lack of those of the engines' model, and `allow_extra`: it
    may have more. (Earlier releases wrote `allow_missing`, which had no bounds.)
    """

    id: str
    digest: str
    kind: Kind = Kind.FULL
    base: str | None = None
    bytes: int = 0
    pinned: bool = False
    barred: bool = False
    may_lack: tuple[str, ...] = ()
    allow_extra: bool = False

    @classmethod
    def of(cls, manifest: Manifest) -> "BucketVersion":
        return cls(
            id=version_id(manifest.run, manifest.order),
            digest=manifest.digest,
            kind=manifest.kind,
            base=manifest.base,
            bytes=sum(file.size for file in manifest.files.values()),
        )

    @property
    def order(self) -> Order:
        return order_of(self.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredVersion:
    """A version that does not count any more. `at` is the store's time of that, in seconds since 1970.

    `base` is the id of the version that a delta leads from.
    """

    id: str
    digest: str
    at: float
    base: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """The content of `latest.json`.

    Attributes:
        run: the run.
        writer: who wrote it, unique for each publisher that was opened.
        versions: those that count, newest first: those that are kept, and the bases that they need.
        retired: those that are to be collected.
        desired: the version that followers are to serve, None for the newest that is not barred. While it is barred, or
            not there any more, they stay where they are.
        is_closed: whether the run has ended.
    """

    run: str
    writer: str
    versions: tuple[BucketVersion, ...]
    retired: tuple[RetiredVersion, ...] = ()
    desired: str | None = None
    is_closed: bool = False
    format: int = FORMAT

    @property
    def newest(self) -> Order:
        return self.versions[0].order

    @property
    def target(self) -> str | None:
        """The id of the version that followers are to serve; None where they are to stay where they are."""
        good = [version.id for version in self.versions if not version.barred and self.desired in {None, version.id}]
        return good[0] if good else None

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionUpload:
    """The content of `upload.json`: who uploads a version, the names of its files, and the SHA-256 of its manifest."""

    writer: str
    files: tuple[str, ...]
    manifest: str | None = None
    format: int = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsList:
    runs: tuple[str, ...]
    format: int = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerNote:
    """The content of `followers/<name>.json`: what a follower holds, pulls and serves, by versions' ids.

    What it pulls or serves is leased for `lease_seconds` from when the store took the note.
    """

    follower: str
    holds: tuple[str, ...] = ()
    pulls: tuple[str, ...] = ()
    serves: str | None = None
    lease_seconds: float = LEASE_SECONDS
    run: str | None = None
    format: int = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLease:
    """What a follower's note leases: these versions until `ends`, by the store's time. None is every version.

    `by` is the follower's name, or the note's key where it cannot be read.
    """

    versions: frozenset[str] | None
    ends: float
    by: str = ""


def order_of(version: str) -> Order:
    """The place of a version with this id, which was checked."""
    parsed = parse_version_id(version)
    if parsed is None:
        raise PointerRefusedError(f"{version[:200]!r} is no version's id")
    return parsed[1]


def parse_pointer(data: bytes, run: str) -> Pointer:
    """Parse a run's pointer. Raises PointerRefusedError if it is not one; the sentence says why."""
    pointer = _decoded(data, Pointer)
    ids = [version.id for version in pointer.versions]
    if pointer.run != run:
        raise PointerRefusedError(f"it is of run {pointer.run[:200]!r}")
    for version in [*ids, *(retired.id for retired in pointer.retired), *filter(None, [pointer.desired])]:
        parsed = parse_version_id(version)
        if parsed is None or parsed[0] != run:
            raise PointerRefusedError(f"it names {version[:200]!r}, which is no version of run {run}")
    orders = [order_of(version) for version in ids]
    if not orders or any(first <= second for first, second in pairwise(orders)):
        raise PointerRefusedError("its versions are not in order, newest first")
    return pointer


def parse_upload(data: bytes) -> VersionUpload:
    """Parse `upload.json`. Raises PointerRefusedError."""
    upload = _decoded(data, VersionUpload)
    for name in upload.files:
        if "/" in name or name.startswith(".") or not name:
            raise PointerRefusedError(f"it names a file {name[:200]!r}")
    return upload


def parse_runs(data: bytes) -> RunsList:
    """Parse `runs.json`. Raises PointerRefusedError."""
    runs = _decoded(data, RunsList)
    try:
        for run in runs.runs:
            check_run(run)
    except InvalidNameError as error:
        raise PointerRefusedError(str(error)) from None
    return runs


def parse_note(data: bytes) -> FollowerNote:
    """Parse a follower's note. Raises PointerRefusedError."""
    return _decoded(data, FollowerNote)


def lease_of(data: bytes, written: float, key: str = "") -> BucketLease:
    """What a follower's note with this key leases, which the store took at `written`.

    A note that cannot be read leases every version for as long as any note could.
    """
    try:
        note = parse_note(data)
    except PointerRefusedError:
        return BucketLease(versions=None, ends=written + MAX_LEASE_SECONDS, by=key)
    named = frozenset([*note.pulls, *filter(None, [note.serves])])
    ends = written + min(note.lease_seconds, MAX_LEASE_SECONDS)
    return BucketLease(versions=named, ends=ends, by=note.follower)


def advanced(pointer: Pointer | None, version: BucketVersion, *, writer: str, keep: int, now: float) -> Pointer:
    """The pointer when `version`, which is newer than all that count, counts as well.

    Of the newest versions that are not barred `keep` stay, besides those that are pinned or desired and all their
    bases; the others are retired. `pointer` is None before the first version of the run, `writer` is who moves it,
    `now` the store's time. Raises PointerRefusedError: the version is not newer, or its base does not count.
    """
    parsed = parse_version_id(version.id)
    if parsed is None:
        raise PointerRefusedError(f"{version.id[:200]!r} is no version's id")
    if pointer is None:
        pointer = Pointer(run=parsed[0], writer=writer, versions=())
    elif parsed[1] <= pointer.newest:
        raise PointerRefusedError(f"{version.id} is not newer than {pointer.versions[0].id}, which counts already")
    if version.base is not None and all(other.id != version.base for other in pointer.versions):
        raise PointerRefusedError(f"{version.id} is a delta to {version.base}, which does not count any more")
    opened = replace(pointer, writer=writer, versions=(version, *pointer.versions), is_closed=False)
    return kept(opened, keep=keep, now=now)


def kept(pointer: Pointer, *, keep: int, now: float) -> Pointer:
    """The pointer without versions that are not kept: they are retired.

    What is barred is kept for nothing, and takes no other version's place: after several rollbacks there is still one
    to go back to. The newest stays in any case, since nothing may come to count that is older.
    """
    by_id = {version.id: version for version in pointer.versions}
    wanted = [version.id for version in pointer.versions if not version.barred][: max(1, keep)]
    wanted += [version.id for version in pointer.versions[:1]]
    wanted += [version.id for version in pointer.versions if version.pinned]
    wanted += [pointer.target] if pointer.target is not None else []
    stay: set[str] = set()
    while wanted:
        version = by_id.get(wanted.pop())
        if version is not None and version.id not in stay:
            stay.add(version.id)
            wanted += [] if version.base is None else [version.base]
    gone = [version for version in pointer.versions if version.id not in stay]
    return replace(
        pointer,
        versions=tuple(version for version in pointer.versions if version.id in stay),
        retired=(*pointer.retired, *(_retired(each, now) for each in gone)),
    )


def _retired(version: BucketVersion, at: float) -> RetiredVersion:
    return RetiredVersion(id=version.id, digest=version.digest, at=at, base=version.base)


def collectable(
    pointer: Pointer, leases: Iterable[BucketLease], now: float, *, rest: float = LEASE_SECONDS
) -> tuple[RetiredVersion, ...]:
    """The retired versions that may be deleted: for `rest` seconds followers were told of them no more, and no lease
    names them or what stands on them.
    """
    held = leased(pointer, leases, now)
    return tuple(each for each in pointer.retired if now - each.at >= rest and each.id not in held)


def leased(pointer: Pointer, leases: Iterable[BucketLease], now: float) -> dict[str, BucketLease]:
    """The lease that holds a version for the longest time, by the version's id: it names it, or what stands on it."""
    bases = {version.id: version.base for version in (*pointer.versions, *pointer.retired)}
    held: dict[str, BucketLease] = {}
    for lease in sorted((each for each in leases if each.ends > now), key=lambda each: each.ends):
        named = set(bases) if lease.versions is None else set(lease.versions)
        while named:
            held[version := named.pop()] = lease
            named |= {base for base in [bases.get(version)] if base is not None and held.get(base) is not lease}
    return held


def is_dead(order: Order, pointer: Pointer, age: float) -> bool:
    """Whether an upload can never count any more: the pointer does not name its version and has gone past it.

    `age` are seconds since its begin. The pointer only goes to newer versions, so that is for ever.
    """
    named = {order_of(version.id) for version in (*pointer.versions, *pointer.retired)}
    return order not in named and order < pointer.newest and age >= UPLOAD_SECONDS


def _decoded(data: bytes, kind: type[_T]) -> _T:
    try:
        parsed = from_json(data, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PointerRefusedError(f"it does not parse: {ascii(str(error)[:200])[1:-1]}") from None
    if (found := getattr(parsed, "format", None)) != FORMAT:
        raise PointerRefusedError(f"it has format {found}; this refitd reads format {FORMAT}")
    return parsed


_LATEST = 1e11  # seconds, about the year 5138


def why_waiting(pointer: Pointer, leases: Iterable[BucketLease], now: float) -> dict[str, str]:
    """Why retired versions are not deleted yet, by their ids; without those that may be deleted."""
    held = leased(pointer, leases, now)
    found: dict[str, str] = {}
    for retired in pointer.retired:
        lease, rests_until = held.get(retired.id), retired.at + LEASE_SECONDS
        if lease is not None and lease.ends >= rests_until:
            found[retired.id] = _held(retired, lease)
        elif now < rests_until:
            found[retired.id] = (
                f"it was retired less than ten minutes ago, and a follower may be about to pull it: "
                f"it is kept until {_time(rests_until)}"
            )
    return found


def _held(retired: RetiredVersion, lease: BucketLease) -> str:
    until = f"until {_time(lease.ends)}"
    if lease.versions is None:
        return f"the note {lease.by} cannot be read, and counts as a lease of every version {until}"
    whose = f"a lease of follower {lease.by} {until}: the follower pulls or serves"
    return f"{whose} it" if retired.id in lease.versions else f"{whose} a delta that needs it"


def _time(seconds: float) -> str:
    if not 0.0 <= seconds < _LATEST:  # a pointer may hold any number
        return "an unknown time"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
