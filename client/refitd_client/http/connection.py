"""Where the service is, and the token for it: from arguments, else from the environment.

    REFITD_URL         the service's URL, http://127.0.0.1:8700 by default; of a group all URLs, separated by commas
    REFITD_TOKEN       the bearer token
    REFITD_TOKEN_FILE  a file with the bearer token, read again for each request so that it can be rotated
    REFITD_READ_TOKEN_FILE
                       the same for a token that allows reading alone; it is sent where there is no other

    REFITD_CA_FILE, REFITD_CLIENT_CERT, REFITD_CLIENT_KEY
                       files for TLS (`refitd_client.http.tls`)

Arguments win over the environment, a token over a token file. Of a file with several tokens, one a line, the first is
sent: the service accepts each token of its own file, so both can work from the same file.
"""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from refitd_client.http.tls import in_use

DEFAULT_URL = "http://127.0.0.1:8700"


@dataclass(slots=True)
class ServiceReach:
    """What a publisher's calls to its service learn from each other. `is_down`: the last one had no answer, so that the
    next waits for one only briefly. `told` is what was logged last of why versions go by files.
    """

    is_down: bool = False
    told: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A checked URL without a slash at its end, and at most one of `token` and `token_file`.

    `others` are the URLs of the other services of a group, in the order in which they are tried.
    """

    url: str
    others: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    reach: ServiceReach = field(default_factory=ServiceReach, repr=False, compare=False)

    @property
    def service_url(self) -> str:
        """What `connect_to` takes for the same services."""
        return ",".join((self.url, *self.others))

    def moved_on(self) -> "Connection":
        """The same with the next service of the group as the one that is asked."""
        return replace(self, url=self.others[0], others=(*self.others[1:], self.url)) if self.others else self

    def headers(self) -> dict[str, str]:
        """The `Authorization` header, or none. Reads the token file.

        Raises:
            OSError: the token file cannot be read.
            ValueError: what it holds cannot be a token.
        """
        token = self.token
        if self.token_file is not None:
            lines = self.token_file.read_text().strip().splitlines()
            token = _check_token(lines[0] if lines else "", f"the token file {self.token_file}")
        return {} if token is None else {"Authorization": f"Bearer {token}"}


def connect_to(
    service_url: str | None = None, *, token: str | None = None, token_file: str | os.PathLike[str] | None = None
) -> Connection:
    """Decide where the service is and with which token it is asked.

    Args:
        service_url: the service's URL; of a group the URLs of its services, separated by commas.
        token: the bearer token.
        token_file: a file that holds the token.

    Raises:
        ValueError: the URL is not one of an HTTP service, the token cannot be a token, or the files for TLS cannot be
            used.
    """
    named = service_url or os.environ.get("REFITD_URL") or DEFAULT_URL
    url, *others = dict.fromkeys(_check_url(each.strip()) for each in named.split(",") if each.strip() or named == each)
    if any(each.startswith("https://") for each in (url, *others)):
        in_use().context()
    if token is None and token_file is None:
        token = os.environ.get("REFITD_TOKEN") or None
        token_file = os.environ.get("REFITD_TOKEN_FILE") or os.environ.get("REFITD_READ_TOKEN_FILE") or None
    if token is not None:
        return Connection(url=url, others=tuple(others), token=_check_token(token, "the token (REFITD_TOKEN)"))
    return Connection(url=url, others=tuple(others), token_file=None if token_file is None else Path(token_file))


def _check_url(text: str) -> str:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ValueError(
            f"service URL {text!r} is no URL ({error}): write http://host:port, or set REFITD_URL"
        ) from error
    if url.userinfo:
        raise ValueError("the service URL holds a user name or password: pass a token, or a token file, instead")
    if url.scheme not in {"http", "https"} or not url.host or url.query or url.fragment:
        raise ValueError(f"service URL {text!r} names no HTTP service: write http://host:port, or set REFITD_URL")
    return str(url).rstrip("/")


def _check_token(text: str, name: str) -> str:
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{name} is empty or holds characters that a bearer token cannot have")
    return token
