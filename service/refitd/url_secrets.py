"""URLs, and what servers say about them, without what can be a secret. Pure."""

import base64
from urllib.parse import unquote, urlsplit

_SHORT = 4  # characters: a shorter part of a URL is no secret, and is in many words by chance


def without_secrets(url: str) -> str:
    """Return a URL without its user, password, query and fragment: these can be secrets."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "") + parts.path


def without_secrets_of(url: str, text: str) -> str:
    """Return a text with "***" for each part of a URL that can be a secret: a server's error may repeat the request."""
    for secret in sorted(_secrets_in(url), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _secrets_in(url: str) -> set[str]:
    """User, password and values of the query, as written and decoded, and the two as basic authentication has them."""
    parts = urlsplit(url)
    user, password = parts.username or "", parts.password or ""
    written = [user, password, *(pair.partition("=")[2] or pair for pair in parts.query.split("&"))]
    basic = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return {each for each in [*written, *map(unquote, written), basic] if len(each) >= _SHORT}
