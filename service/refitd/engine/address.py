"""An engine's URL and its adapters' names: what is accepted, and the id that follows from the URL."""

import re
from urllib.parse import urlsplit

from refitd_client.contract.naming import NameRefusedError

# Names and addresses as they are called, and nothing that one library takes for another host than the next does:
# no '%', no Unicode, no spaces, no zones.
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?\.?|[0-9A-Fa-f:.]{2,45}")
_ID = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9._:\[\]-]{0,254}")  # `host:port`, `[::1]:30000`, or a plain name
_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class AddressRefusedError(ValueError):
    """An engine URL that is not one; the message says what one looks like."""


def check_url(url: str) -> str:
    """Return `url` without a trailing slash.

    Raises:
        AddressRefusedError: it is not `http(s)://host[:port]`, or carries credentials, a query or a path.
    """
    advice = f"engine URL {url!r}: write it as http://host:port"
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise AddressRefusedError(f"{advice} ({error})") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise AddressRefusedError(advice)
    if parts.username is not None or parts.password is not None:
        raise AddressRefusedError(f"{advice}, without credentials: keys come from files")
    if parts.path.rstrip("/") or parts.query or parts.fragment:
        raise AddressRefusedError(f"{advice}, without a path")
    if not _HOST.fullmatch(parts.hostname):
        raise AddressRefusedError(f"{advice}, with a plain host name or address")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + ("" if port is None else f":{port}")


def check_engine_id(name: str) -> str:
    """Return `name` if it can be an engine's id: it stands in addresses, in logs and in the metrics.

    Raises:
        NameRefusedError: it is empty, too long, or has other characters.
    """
    if not _ID.fullmatch(name):
        raise NameRefusedError(f"engine id {name[:200]!a} is none: use letters, digits, '.', '_', ':' and '-'")
    return name


def engine_id(url: str) -> str:
    """The id of an engine that was given none: `host:port`."""
    return check_url(url).partition("://")[2]


def check_adapter_name(name: str) -> str:
    """Return `name` if adapters can be called `name-v<step>`: it stands in requests, as the model's name.

    Raises:
        ValueError: it has other characters than letters, digits, '.', '_' and '-', or is too long.
    """
    if not _ADAPTER.fullmatch(name):
        raise ValueError(f"{name!r} is no name for adapters: use letters, digits, '.', '_' and '-'")
    return name
