"""The port to an upstream: where a follower learns which versions exist, and gets their bytes.

An upstream is another refitd (`hub.py`) or an object store (`bucket.py`). The follower asks it and is never called by
it. Nothing that an upstream delivers is believed: the puller compares all bytes with the manifest's digests, the
manifest with the version's digest, and the catalog validates the version again.

`look` is the truth. `changes` only says "look again", early: it may miss changes, and the follower looks at regular
intervals as well.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from refitd.state.observer import Notifier
from refitd.state.version import VersionRecord
from refitd_client.contract.follow import HostReply, HostReport
from refitd_client.contract.naming import Order, version_folder
from refitd_client.contract.states import Kind, VersionState


class UpstreamError(Exception):
    """An upstream did not give what it was asked for. The message is a sentence that names the upstream."""


class UnreachableError(UpstreamError):
    """It could not be reached, stalled, cut the connection, or cannot answer now. Asking again later may help."""


class GoneError(UpstreamError):
    """It does not have that version, or that file of it, any more. Asking again does not help."""


class WrongError(UpstreamError):
    """It gave bytes with another digest, an answer that does not parse, or refused the token. Asking again does not
    help.
    """


class DamagedError(WrongError):
    """The bytes of a file have another digest than the manifest says, twice."""


class StoreError(UpstreamError):
    """An object store that the upstream had named did not give what it was asked for. What has arrived stays, for the
    pull from the upstream.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamVersion:
    """A sealed version of an upstream.

    `digest` is that of its manifest; a version without one cannot be pulled. `base` is the id of the version that a
    delta leads from. `barred`: it was rolled back from, so that no engine goes there. `allow_missing` are patterns of
    the names of tensors that it may lack of the engines' model's; `allow_extra`: it may have tensors that the model
    lacks.
    """

    id: str
    run: str
    order: Order
    digest: str | None
    kind: Kind = Kind.FULL
    base: str | None = None
    bytes: int | None = None
    pinned: bool = False
    barred: bool = False
    allow_missing: tuple[str, ...] = ()
    allow_extra: bool = False

    def announced(self, now: str) -> VersionRecord:
        """The record of the version when it has been pulled and was not known here. `now` is the time (RFC 3339)."""
        return VersionRecord(
            run=self.run,
            order=self.order,
            path=f"{self.run}/{version_folder(self.order)}",
            state=VersionState.ANNOUNCED,
            created_at=now,
            kind=self.kind if self.kind is not Kind.HANDOVER else Kind.FULL,
            base=self.base,
        ).having(noticed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamRun:
    """A run of an upstream.

    `versions` are those that are sealed, newest first: at least the newest, and the bases that it needs. `desired` is
    the id of the version that followers are to serve which no hub leads: the run's target, or a pointer in an object
    store; None where there is none yet. `barred` are the ids of others that were rolled back from, and whose files the
    upstream has no more. `is_paused`: its updates are paused, so that no host goes to anything newer.
    """

    run: str
    versions: tuple[UpstreamVersion, ...]
    desired: str | None = None
    barred: tuple[str, ...] = ()
    is_closed: bool = False
    is_paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """Bytes of one file of a version: `length` of them from byte `start` on."""

    version: str
    file: str
    start: int
    length: int


class ByteSource(Protocol):
    """Something that has versions' bytes. Sentences call it by its name: its URL, without credentials."""

    @property
    def name(self) -> str: ...

    async def manifest(self, version: str) -> bytes:
        """The bytes of a version's manifest, as its publisher wrote it."""
        ...

    async def fill(self, part: FilePart, buffer: memoryview) -> None:
        """Fill `buffer`, which has `part.length` bytes, with that part of a file, or raise an UpstreamError: the bytes
        that arrived before it are in the buffer, and are not to be used.
        """
        ...

    async def aclose(self) -> None: ...


class Sources(Protocol):
    """Whom to pull from. It may change during a pull, as when an upstream is gone and the next one is used."""

    @property
    def upstream(self) -> ByteSource: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerIdentity:
    """What a follower tells of itself: its name, and `process`, a random name of this process."""

    name: str
    process: str


class Upstream(ByteSource, Protocol):
    """What a follower follows. Calls have deadlines, and raise nothing but `UpstreamError` for what it does.

    `leads`: its replies say what the hosts that follow it serve.
    """

    leads: bool

    async def look(self, run: str | None) -> Sequence[UpstreamRun]:
        """The run of this name, or all runs that have not ended."""
        ...

    def changes(self, name: str) -> AsyncIterator[bool]:
        """Yield when it may be worth while to look again, until the connection ends or breaks (`UnreachableError`).
        True: what has changed is what the host of this name is to serve, and a report is worth while.
        """
        ...

    async def report(self, report: HostReport) -> HostReply:
        """Tell what this host is at, and lease what it pulls."""
        ...


@dataclass(slots=True)
class FollowedSources:
    """The upstreams, in the order in which they are tried. `told` is notified when one is to hear of something."""

    upstreams: Sequence[Upstream]
    told: Notifier = field(default_factory=Notifier)
    _current: int = 0

    @property
    def upstream(self) -> Upstream:
        return self.upstreams[self._current]

    def next(self) -> None:
        self._current = (self._current + 1) % len(self.upstreams)

    async def aclose(self) -> None:
        for upstream in self.upstreams:
            await upstream.aclose()
