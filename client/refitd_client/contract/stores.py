"""How an object store is told from a folder and from another refitd, by its URL."""

import re

STORE_SCHEMES = ("s3", "gs", "az")
_BY_PATH = "A folder of such a name is named by its absolute path"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def is_bucket_url(text: str) -> bool:
    """Whether a text is meant to be an object store's URL."""
    return text.partition("://")[0].lower() in STORE_SCHEMES and "://" in text


def scheme_of(root: str) -> str | None:
    """The scheme of a root that looks like a URL, as `s3:/bucket` does too; None of a folder's path."""
    found = _SCHEME.match(root)
    return None if found is None else found[1]


def require_folder(root: str) -> None:
    """Refuse a root that looks like a URL, since a folder of that name would be made, and one that is empty, as that of
    a variable that is not set. Raises ValueError if it is one of these. The message does not show a URL, since it may
    have a secret.
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
