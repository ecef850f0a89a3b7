"""The objects of a bucket: reads, conditional writes, uploads in parts, deletions. Every error becomes a `BucketError`.

An error's text names the store, the object and what went wrong by its kind. The text of the store or its library is
never in it, nor chained to it: it can hold a signed URL or a credential.

A URL names the store:

    s3://bucket/prefix      S3, or any server with its API: `AWS_ENDPOINT_URL` names it
    gs://bucket/prefix      Google Cloud Storage
    az://container/prefix   Azure Blob Storage, in the account that `AZURE_STORAGE_ACCOUNT_NAME` names

Credentials come from where each cloud's own tools look for them (variables, a pod's or machine's identity), and are in
no URL: a URL with a user, a password, a query or a fragment is refused without being shown.
"""

import asyncio
import atexit
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Literal, cast
from urllib.parse import urlsplit

from refitd_client.contract.stores import STORE_SCHEMES
from refitd_client.errors import BucketError

if TYPE_CHECKING:
    from obstore import ListResult, ObjectMeta, UpdateVersion
    from obstore.store import AzureConfig, AzureStore, GCSStore, MemoryStore, S3Store

    ObjectStore = AzureStore | GCSStore | MemoryStore | S3Store
    _List = Callable[[ObjectStore, str], Awaitable[ListResult[list[ObjectMeta]]]]  # its other overload wants pyarrow

RETRIES = 5  # of a request that failed
_REQUEST_SECONDS = 60  # for one request, a part of 16 MiB at most: 280 KB/s
_END_SECONDS = 0.1
_STORE_RETRY_SECONDS = 30  # in which a request that failed is tried again
_ENDPOINTS = {  # the variables in which obstore finds each store's server, if it is another than the cloud's own
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_AZURE_ACCOUNTS = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")  # obstore reads the first, az the second
_AZURE_KEYS = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY", "AZURE_STORAGE_KEY")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketAddress:
    """A bucket's name and a prefix in it, without a slash at its end."""

    scheme: str
    bucket: str
    prefix: str

    @property
    def name(self) -> str:
        """What sentences call it."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def parse_bucket_url(url: str) -> BucketAddress:
    """Take a URL apart. Raises ValueError if it names no bucket, or has what may be a secret. The message does not show
    the URL then.
    """
    try:
        parts = urlsplit(url)
        has_more = bool(parts.username or parts.password or parts.query or parts.fragment or "@" in parts.netloc)
    except ValueError:
        raise ValueError("the URL of the object store cannot be read: write it as s3://bucket/prefix") from None
    if has_more:
        raise ValueError(
            "the URL of the object store has a user, a query or a fragment: write s3://bucket/prefix alone, and give "
            "credentials by the environment, as for the cloud's own tools"
        )
    if parts.scheme not in STORE_SCHEMES or not parts.netloc:
        raise ValueError("an object store is named as s3://bucket/prefix, gs://bucket/prefix or az://container/prefix")
    segments = [segment for segment in parts.path.split("/") if segment]
    if any(segment in {".", ".."} for segment in segments):
        raise ValueError("the prefix of the object store has a part that is '.' or '..'")
    return BucketAddress(scheme=parts.scheme, bucket=parts.netloc, prefix="/".join(segments))


@cache
def _let_threads_end() -> None:
    """Have the end of this process wait a moment, which counts once however many stores are opened.

    obstore's threads give Python objects back after an answer has come. CPython ends a thread that wants its lock while
    the interpreter ends, and a thread of Rust's aborts the process then: some commands ended with 134.
    """
    atexit.register(time.sleep, _END_SECONDS)


def open_store(address: BucketAddress) -> "ObjectStore":
    """Open a store. Nothing is asked of it yet. Raises BucketError if `obstore` is not installed, or its variables are
    not as they must be.
    """
    try:
        from obstore import store
    except ImportError:
        raise BucketError(
            f"{address.name} needs the package obstore: install refitd with its extra, refitd[stores]"
        ) from None
    _let_threads_end()
    prefix = address.prefix or None
    client: store.ClientConfig = {"timeout": f"{_REQUEST_SECONDS}s", "connect_timeout": "5s"}
    retry: store.RetryConfig = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=_STORE_RETRY_SECONDS)}
    if _given(_ENDPOINTS[address.scheme]).startswith("http://"):  # the operator's own word: no TLS there
        client["allow_http"] = True
    try:
        match address.scheme:
            case "gs":
                return store.GCSStore(address.bucket, prefix=prefix, client_options=client, retry_config=retry)
            case "az":
                return store.AzureStore(
                    address.bucket, prefix=prefix, config=_azure(), client_options=client, retry_config=retry
                )
            case _:
                return store.S3Store(address.bucket, prefix=prefix, client_options=client, retry_config=retry)
    except Exception as error:  # its text can hold what the variables hold
        why = "a variable of the environment for this store is not valid"
        if "Account must be specified" in str(error):
            why = "AZURE_STORAGE_ACCOUNT_NAME has to name its storage account"
        raise BucketError(f"{address.name} cannot be opened: {why}") from None


def _given(names: tuple[str, ...]) -> str:
    """The value of the first of these variables that has one; empty if none has."""
    return next((value for name in names if (value := os.environ.get(name))), "")


def _azure() -> "AzureConfig":
    """What obstore does not find by itself: the account and the key in the variables of Azure's command line."""
    config: AzureConfig = {}
    if account := _given(_AZURE_ACCOUNTS):
        config["account_name"] = account
    if key := _given(_AZURE_KEYS):
        config["account_key"] = key
    return config


PART = 16 * 2**20  # bytes of an object that one request uploads
_PARTS_AT_ONCE = 4  # of one object
_DEADLINE = 120.0  # seconds for a call of a few requests, with the library's own tries
_PEEK_SECONDS = 8.0  # for a look whether something small has changed, so that a store that stalls is soon known to
_TOKEN = re.compile(r"token request|://169\.254\.169\.254/")  # asked for before the store is: a host's identity
_NO_BUCKET = re.compile(r"<Code>(NoSuchBucket|ContainerNotFound)</Code>")
_STATUS = re.compile(r"status(?: code)?:? (\d{3})|\(code: (\d{3})\)|<Code>([A-Za-z]{1,64})</Code>")


@dataclass(frozen=True, slots=True)
class ObjectTag:
    """Which content of an object was seen: its entity tag, and on some stores a version."""

    e_tag: str | None
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFacts:
    """An object without its bytes. `modified` is the store's time, in seconds since 1970."""

    key: str
    size: int
    modified: float
    tag: ObjectTag


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadObject:
    data: bytes
    facts: ObjectFacts


class Bucket:
    """A bucket and a prefix in it. Keys are below the prefix. May be used from several event loops."""

    def __init__(self, store: "ObjectStore", name: str) -> None:
        self._store = store
        self.name = name
        self._wants_bare_tags = False

    @classmethod
    def at(cls, url: str) -> "Bucket":
        """The bucket that a URL names. Nothing is asked of it yet. Raises ValueError: the URL names none; BucketError:
        the package `obstore` is missing, or a variable for it is wrong.
        """
        address = parse_bucket_url(url)
        return cls(open_store(address), address.name)

    async def read(self, key: str, most: int) -> ReadObject | None:
        """An object of at most `most` bytes; None if it is not there."""
        return await self._read(key, most, None)

    async def read_changed(self, key: str, most: int, seen: ObjectTag | None) -> ReadObject | Literal["same"] | None:
        """As `read`; "same" if the content is still what was `seen`."""
        import obstore.exceptions

        try:
            return await self._read(key, most, None if seen is None else seen.e_tag, within=_PEEK_SECONDS)
        except obstore.exceptions.NotModifiedError:
            return "same"

    async def _read(self, key: str, most: int, seen: str | None, *, within: float = _DEADLINE) -> ReadObject | None:
        import obstore

        with self._errors(f"read {key}", passed=("NotModifiedError",)):
            try:
                async with asyncio.timeout(within):
                    found = await obstore.get_async(
                        self._store, key, options={} if seen is None else {"if_none_match": seen}
                    )
                    facts = _facts(found.meta)
                    if facts.size > most:
                        raise BucketError(f"{self.name} has {key} with {facts.size} bytes, more than {most}")
                    return ReadObject(data=bytes(await found.bytes_async()), facts=facts)
            except FileNotFoundError as error:
                if _NO_BUCKET.search(str(error)):  # else it would look like one that is empty
                    raise BucketError(f"{self.name} cannot be read: there is no such bucket", may_heal=True) from None
                return None

    async def fill(self, key: str, start: int, buffer: memoryview) -> bool:
        """Fill `buffer` with the object's bytes from `start` on; False if the object is not there. Raises BucketError
        also if the object ends before, or the answer goes on.
        """
        import obstore

        if not buffer:
            return True
        got = 0
        with self._errors(f"read {key}"):
            try:
                async with asyncio.timeout(_DEADLINE):
                    found = await obstore.get_async(self._store, key, options={"range": (start, start + len(buffer))})
                    async for piece in found.stream():  # a store may send more than it was asked for
                        data = memoryview(piece)[: len(buffer) - got + 1]
                        got += len(data)
                        if got > len(buffer):
                            break
                        buffer[got - len(data) : got] = data
            except FileNotFoundError:
                return False
        if got != len(buffer):
            raise BucketError(f"{self.name} gave {got} bytes of {key} from {start} on, not {len(buffer)}")
        return True

    async def facts(self, key: str) -> ObjectFacts | None:
        """What the store says about an object; None if it is not there."""
        import obstore

        with self._errors(f"look at {key}"):
            try:
                async with asyncio.timeout(_DEADLINE):
                    return _facts(await obstore.head_async(self._store, key))
            except FileNotFoundError:
                return None

    async def write_new(self, key: str, data: bytes) -> ObjectTag | None:
        """Write an object on the condition that it is not there; None if it is."""
        return await self._conditional(key, data, "create")

    async def write_over(self, key: str, data: bytes, seen: ObjectTag) -> ObjectTag | None:
        """Write an object on the condition that its content is what was seen; None if it is not, or is gone."""
        bare = None if seen.e_tag is None else seen.e_tag.strip('"')
        if not self._wants_bare_tags:
            tag = await self._conditional(key, data, _condition(seen.e_tag, seen.version))
            if tag is not None or bare == seen.e_tag or await self._tag_of(key) != seen:
                return tag
        # Its content is what was seen, and the condition was refused: Ceph before release 18 compares the tag without
        # its quotes. This write has the same condition.
        tag = await self._conditional(key, data, _condition(bare, seen.version))
        self._wants_bare_tags = self._wants_bare_tags or tag is not None
        return tag

    async def _tag_of(self, key: str) -> ObjectTag | None:
        found = await self.facts(key)
        return None if found is None else found.tag

    async def _conditional(self, key: str, data: bytes, mode: "Literal['create'] | UpdateVersion") -> ObjectTag | None:
        import obstore
        import obstore.exceptions as refusals

        with self._errors(f"write {key}"):
            try:
                async with asyncio.timeout(_DEADLINE):
                    put = await obstore.put_async(self._store, key, data, mode=mode, use_multipart=False)
            except (refusals.AlreadyExistsError, refusals.PreconditionError):
                return None
            except FileNotFoundError:
                if mode == "create":
                    raise BucketError(f"{self.name} cannot be written: there is no such bucket") from None
                return None
        return ObjectTag(put["e_tag"], put["version"])

    async def write(self, key: str, data: bytes) -> ObjectTag:
        """Write an object, in place of one that may be there."""
        import obstore

        with self._errors(f"write {key}"):
            async with asyncio.timeout(_DEADLINE):
                put = await obstore.put_async(self._store, key, data, use_multipart=False)
        return ObjectTag(put["e_tag"], put["version"])

    async def upload(self, key: str, pieces: AsyncIterator[bytes]) -> None:
        """Write a large object from its pieces, in parts side by side. Each request has its own deadline."""
        import obstore

        with self._errors(f"write {key}"):
            await obstore.put_async(
                self._store, key, pieces, use_multipart=True, chunk_size=PART, max_concurrency=_PARTS_AT_ONCE
            )

    async def delete(self, key: str) -> None:
        """Delete an object. One that is not there is no error."""
        import obstore

        with self._errors(f"delete {key}"):
            try:
                async with asyncio.timeout(_DEADLINE):
                    await obstore.delete_async(self._store, key)
            except FileNotFoundError:
                pass

    async def listed(self, prefix: str) -> list[ObjectFacts]:
        """All objects directly below a prefix that ends in a slash. One page that fails, fails all."""
        return (await self._list(prefix))[0]

    async def folders(self, prefix: str) -> list[str]:
        """The names directly below a prefix that have objects below them."""
        return (await self._list(prefix))[1]

    async def _list(self, prefix: str) -> tuple[list[ObjectFacts], list[str]]:
        import obstore

        with self._errors(f"list {prefix}"):
            async with asyncio.timeout(_DEADLINE):
                call = cast("_List", obstore.list_with_delimiter_async)  # pyright: ignore[reportUnknownMemberType]
                found = await call(self._store, prefix.rstrip("/"))
        names = [str(name).rstrip("/").rpartition("/")[2] for name in found["common_prefixes"]]
        return [_facts(meta) for meta in found["objects"]], names

    @contextmanager
    def _errors(self, doing: str, passed: tuple[str, ...] = ()) -> Generator[None, None, None]:
        """Turn the library's errors into sentences without its text."""
        import obstore.exceptions as refusals

        failed: BucketError
        try:
            yield
        except BucketError:
            raise
        except TimeoutError:
            failed = BucketError(f"{self.name} did not answer in time to {doing}", may_heal=True)
        except (refusals.PermissionDeniedError, refusals.UnauthenticatedError):
            failed = self._refused(doing)
        except (refusals.BaseError, OSError, ValueError) as error:
            if type(error).__name__ in passed:
                raise
            found = _STATUS.search(text := str(error))
            status = next(filter(None, found.groups())) if found else ""
            what = f" ({status})" if status else ""
            if _TOKEN.search(text):
                failed = BucketError(
                    f"{self.name} cannot be asked to {doing}: no credentials for it could be had{what}; give this "
                    "process some by the environment or the host's identity",
                    may_heal=True,
                )
            elif status in {"401", "403"}:  # of a listing, or of a deletion in a batch
                failed = self._refused(doing)
            else:
                failed = BucketError(f"{self.name} could not be reached, or failed, to {doing}{what}", may_heal=True)
        else:
            return
        raise failed from None

    def _refused(self, doing: str) -> BucketError:
        return BucketError(
            f"{self.name} refuses to {doing}: give this process credentials that may, by the environment or the "
            "host's identity"
        )


def _condition(e_tag: str | None, version: str | None) -> "UpdateVersion":
    tag = {name: text for name, text in (("e_tag", e_tag), ("version", version)) if text is not None}
    return cast("UpdateVersion", tag)


def _facts(meta: "ObjectMeta") -> ObjectFacts:
    return ObjectFacts(
        key=meta["path"],
        size=meta["size"],
        modified=meta["last_modified"].timestamp(),
        tag=ObjectTag(meta["e_tag"], meta["version"]),
    )
