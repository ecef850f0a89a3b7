"""From where a version is pulled, and when: as the upstream says that leads.

    store     the upstream names an object store that has the version: its bytes come from there, its manifest and its
              digests from the upstream
    turn      else from the upstream, once it says that none are before this host

The upstream names a bucket and nothing else. Which server is asked, and with which credentials, this host's own
environment says, as for a store that it follows. A host whose environment says nothing of that cloud asks no store.
"""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

from refitd.clock import Clock
from refitd.state.observer import Notifier
from refitd_client.bucket.objects import Bucket, parse_bucket_url
from refitd_client.contract.follow import HostPull
from refitd_client.contract.stores import is_bucket_url
from refitd_client.errors import BucketError
from refitd_hosts.follow.bucket import BucketUpstream
from refitd_hosts.follow.byte_source import SLOWEST, STALL_SECONDS
from refitd_hosts.follow.upstream import (
    ByteSource,
    DamagedError,
    FilePart,
    FollowedSources,
    Sources,
    StoreError,
    UpstreamError,
)

LEFT_SECONDS = 600.0  # for which a store is not asked that did not give what it was asked for
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,62}")  # of a bucket or container: nothing that a URL would read otherwise
_PREFIX = re.compile(r"[A-Za-z0-9._/=+~-]*")
_VARIABLES = {  # that say where a cloud's stores are, or what opens them
    "s3": (
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT",
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_BASE_URL"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
}

PulledT = TypeVar("PulledT")


class PullTurn:
    """Where the pull that is under way stands. `source` is the URL of what it pulls from, "" while it waits; `ahead` is
    how many hosts pull before this one, None unless it waits; `store_fault` is why the store is not asked that the
    upstream has named last, None where it is, or none is named.
    """

    def __init__(self, sources: FollowedSources, clock: Clock) -> None:
        self._sources, self._clock = sources, clock
        self._heard = Notifier()
        self._version = ""
        self._said: tuple[str, HostPull | None] | None = None  # by the upstream of this name
        self._left: dict[str, tuple[str, float]] = {}
        self._stores: dict[str, Bucket] = {}
        self.source = ""
        self.ahead: int | None = None
        self.store_fault: str | None = None

    def begin(self, version: str) -> None:
        """A pull is about to begin: it waits, where the upstream gives turns."""
        self._version, self._said, self.source = version, None, ""
        self.ahead = 0 if self._sources.upstream.leads else None

    def end(self) -> None:
        self.source, self.ahead = "", None

    def heard(self, upstream: str, pull: HostPull | None) -> None:
        """The upstream of this name has replied to a report, or has refused it."""
        if pull is not None and pull.version != self._version:
            return  # it replies to what was pulled before
        self._said = upstream, pull
        if pull is not None:
            self.store_fault = self._why_not(pull.store) if pull.store else None
            self.ahead = None if self.ahead is None else pull.ahead
        self._heard.notify()

    async def pulled(self, pull: Callable[[Sources | None], Awaitable[PulledT]], say: Callable[[str], None]) -> PulledT:
        """Pull from the store that the upstream names, and where that does not give it from the upstream in turn.

        `pull` gets the sources, None for the upstreams, and `say` why a store is left, a sentence without its subject.
        """
        while True:
            sources = await self.taken()
            try:
                return await pull(sources)
            except (StoreError, DamagedError) as error:
                if not isinstance(sources, StoreSources):
                    raise
                say(f"is pulled from {self._sources.upstream.name}, and not from the store that it names: {error}")
                self.leave(sources.name, error)

    async def taken(self) -> Sources | None:
        """Wait for what to pull the version from: a store, or None for the upstream that is followed."""
        while True:
            seen, upstream = self._heard.count, self._sources.upstream
            if not upstream.leads:
                return self._pulls_from(upstream.name)
            name, pull = self._said or ("", None)
            if name == upstream.name:
                if pull is not None and pull.store and self.store_fault is None:
                    self._pulls_from(pull.store)
                    return StoreSources(self._sources, pull.store, BucketUpstream(self._stores[pull.store]))
                if pull is None or not pull.ahead:
                    return self._pulls_from(upstream.name)
            await self._heard.wait_after(seen, within=1.0)  # another upstream may be followed by then

    def _pulls_from(self, name: str) -> None:
        self.source, self.ahead = name, None
        self._sources.told.notify()

    def leave(self, store: str, error: UpstreamError) -> None:
        """A store did not give what it was asked for: it is not asked for a while."""
        self._left[store] = str(error), self._clock.monotonic() + LEFT_SECONDS
        self.begin(self._version)
        self._sources.told.notify()

    def _why_not(self, store: str) -> str | None:
        """Why a store is not asked that the upstream names, in a sentence."""
        reason, until = self._left.get(store, ("", 0.0))
        if until > self._clock.monotonic():
            return reason
        if store in self._stores:
            return None
        if (reason := named_wrong(store)) is not None:
            return reason
        try:
            self._stores = {store: Bucket.at(store)}
        except BucketError as error:
            return str(error)
        return None


def named_wrong(store: str) -> str | None:
    """Why a store is not asked, by its name and this process's environment, in a sentence; None where it is."""
    try:
        address = parse_bucket_url(store) if is_bucket_url(store) else None
    except ValueError:
        address = None
    if address is None or not _BUCKET.fullmatch(address.bucket) or not _PREFIX.fullmatch(address.prefix):
        return "the upstream names an object store by what is no bucket's URL"
    if not any(os.environ.get(name) for name in _VARIABLES[address.scheme]):
        first = _VARIABLES[address.scheme][0]
        return (
            f"{address.name} is not asked, since this service's environment does not say where such stores are or what "
            f"opens them ({first}, …)"
        )
    return None


class StoreSources:
    """A version whose bytes come from an object store of this name (its URL), and its manifest from the upstream."""

    def __init__(self, sources: Sources, name: str, store: ByteSource) -> None:
        self._sources, self._store, self.name = sources, store, name

    @property
    def upstream(self) -> ByteSource:
        return self

    async def manifest(self, version: str) -> bytes:
        return await self._sources.upstream.manifest(version)

    async def fill(self, part: FilePart, buffer: memoryview) -> None:
        try:
            async with asyncio.timeout(STALL_SECONDS + part.length / SLOWEST):
                await self._store.fill(part, buffer)
        except TimeoutError:
            raise StoreError(f"{self.name} stalled") from None
        except UpstreamError as error:
            raise StoreError(str(error)) from error

    async def aclose(self) -> None:
        """Nothing: the library keeps its own connections."""
