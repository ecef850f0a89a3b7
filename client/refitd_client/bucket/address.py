"""Which object store a URL names, and how it is opened.

    s3://bucket/prefix      S3, or any server with its API: `AWS_ENDPOINT_URL` names it
    gs://bucket/prefix      Google Cloud Storage
    az://container/prefix   Azure Blob Storage, in the account that `AZURE_STORAGE_ACCOUNT_NAME` names

Credentials come from where each cloud's own tools look for them (variables, a pod's or machine's identity), and are in
no URL: a URL with a user, a password, a query or a fragment is refused without being shown.
"""

import atexit
import os
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from refitd_client.errors import BucketError

if TYPE_CHECKING:
    from obstore.store import AzureConfig, AzureStore, GCSStore, MemoryStore, S3Store

    ObjectStore = AzureStore | GCSStore | MemoryStore | S3Store

SCHEMES = ("s3", "gs", "az")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_BY_PATH = "A folder of such a name is named by its absolute path"
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


def is_bucket_url(text: str) -> bool:
    """Whether a text is meant to be an object store's URL."""
    return text.partition("://")[0].lower() in SCHEMES and "://" in text


def scheme_of(root: str) -> str | None:
    """The scheme of a root that looks like a URL, as `s3:/bucket` does too; None of a folder's path."""
    found = _SCHEME.match(root)
    return None if found is None else found[1]


def require_folder(root: str) -> None:
    """Refuse a root that looks like a URL, since a folder of that name would be made, and one that is empty, as that of
    a variable that is not set.

    Raises:
        ValueError: it is one of these. The message does not show a URL, since it may have a secret.
    """
    if not root.strip():
        raise ValueError("root is empty: name the folder that the service watches, or '.' for the current one")
    scheme = scheme_of(root)
    if scheme is None:
        return
    match scheme.lower():
        case "s3" | "gs" | "az" as store:
            meant = f"an object store is named as a text with two slashes, {store}://…"
        case "file":
            raise ValueError("root begins with file:/: name the folder by its path. No folder is an object store")
        case "http" | "https":
            meant = "the service's URL is service_url, and root the folder that it watches"
        case _:
            meant = "object stores are named s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
    raise ValueError(f"root begins as a URL does, with {scheme}:/, and is none that is known: {meant}. {_BY_PATH}")


def parse_bucket_url(url: str) -> BucketAddress:
    """Take a URL apart.

    Raises:
        ValueError: it names no bucket, or has what may be a secret. The message does not show the URL then.
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
    if parts.scheme not in SCHEMES or not parts.netloc:
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
    """Open a store. Nothing is asked of it yet.

    Raises:
        BucketError: `obstore` is not installed, or its variables are not as they must be.
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
