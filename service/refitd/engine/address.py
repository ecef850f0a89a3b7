"""An engine's URL: what is accepted, and the id that follows from it."""

from urllib.parse import urlsplit


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
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + ("" if port is None else f":{port}")


def engine_id(url: str) -> str:
    """The id of an engine that was given none: `host:port`."""
    return check_url(url).partition("://")[2]
