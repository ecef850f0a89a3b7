"""How an object store is told from a folder and from another refitd, by its URL."""

import re

STORE_SCHEMES = ("s3", "gs", "az")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def is_bucket_url(text: str) -> bool:
    """Whether a text is meant to be an object store's URL."""
    return text.partition("://")[0].lower() in STORE_SCHEMES and "://" in text


def scheme_of(root: str) -> str | None:
    """The scheme of a root that looks like a URL, as `s3:/bucket` does too; None of a folder's path."""
    found = _SCHEME.match(root)
    return None if found is None else found[1]
