"""Which kind of upstream a URL names, and the object that talks to it."""

from pathlib import Path

from refitd.text import is_web_address
from refitd_client.bucket.objects import Bucket, is_bucket_url
from refitd_client.errors import BucketError
from refitd_client.http.connection import Connection
from refitd_hosts.follow.bucket import BucketUpstream
from refitd_hosts.follow.hub import HubUpstream
from refitd_hosts.follow.upstream import Upstream


def check_upstream(url: str) -> None:
    """Refuse what names no upstream.

    Raises:
        ValueError: with a sentence.
    """
    if is_bucket_url(url):
        try:
            Bucket.at(url)
        except BucketError as error:
            raise ValueError(str(error)) from None
    elif not is_web_address(url) or "@" in url:
        shown = "" if "@" in url else f" {url!r}"
        raise ValueError(
            f"--follow{shown} names no upstream: write the URL of a refitd, such as http://hub:8700, or of an object "
            "store, such as s3://bucket/prefix, without credentials"
        )


def connect_upstream(url: str, *, token_file: Path | None) -> Upstream:
    """The upstream at a URL. Nothing is sent yet.

    Args:
        url: of a refitd, or of an object store.
        token_file: file with the bearer token for it; None where it wants none.
    """
    check_upstream(url)
    if is_bucket_url(url):
        return BucketUpstream(Bucket.at(url))
    return HubUpstream(Connection(url=url.rstrip("/"), token_file=token_file))
