"""Decides at the door which requests are let in: by tokens (RFC 6750), by the page that sent them, by the name called.

What a request may do is decided by its method, before its body is read. No route has to ask for a token, so none can
forget to: every path that is not listed as open is closed. Changes need the write token. Looking needs a read or a
write token where a read token is set. A token to follow opens a few routes (`FOLLOWERS`).

Browsers send requests wherever a page that they show asks for it. Without a token, a service on loopback would do what
any page says that its user looks at. So a request from a page changes nothing unless the page is the dashboard itself
(`Sec-Fetch-Site`, else `Origin`). And a name that its owner points at 127.0.0.1 (DNS rebinding) makes a foreign page
look like the dashboard, and its requests like those of any other client. So a request that needs no token has to call
the service by an address or by a name that it goes by.
"""

import asyncio
import base64
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from ipaddress import ip_address
from urllib.parse import urlsplit

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from refitd.api.errors import answer
from refitd.api.web_pages import API_PAGES, DASHBOARD
from refitd.problem import ProblemError, Slug
from refitd.tokens import Tokens, TokensRefusedError, digest_of, is_one_of, names_of, without_names


class TokenRole(StrEnum):
    """What a token is for: `write` opens everything, `read` what only looks, `follow` what hosts send and pull."""

    WRITE = "write"
    READ = "read"
    FOLLOW = "follow"


LOOKS = frozenset({"GET", "HEAD", "OPTIONS"})
FOLLOWERS: frozenset[tuple[str, str]] = frozenset(
    {
        ("GET", "/v1/overview"),
        ("GET", "/v1/versions"),
        ("GET", "/v1/versions/{version_id}"),
        ("GET", "/v1/versions/{version_id}/manifest"),
        ("GET", "/v1/versions/{version_id}/files/{name}"),
        ("PUT", "/v1/hosts/{name}"),
        ("GET", "/v1/events"),
    }
)
"""What a token to follow opens: a route that is not among these opens to `write`, and to `read` where it only looks."""
# A name in a path has no slash, as in the routes that these are.
_FOLLOWED = [(method, re.compile(re.sub(r"\{\w+\}", "[^/]+", path))) for method, path in FOLLOWERS]


def may(roles: frozenset[TokenRole], method: str, path: str) -> bool:
    """Return whether a token of these roles opens a request."""
    if TokenRole.WRITE in roles or (TokenRole.READ in roles and method in LOOKS):
        return True
    asked = "GET" if method in LOOKS else method
    return TokenRole.FOLLOW in roles and any(asked == each and route.fullmatch(path) for each, route in _FOLLOWED)


@dataclass(frozen=True, slots=True)
class FollowClaim:
    """A token that came with a report: its digest, and the names that its line has; None where that has none."""

    digest: bytes
    names: str | None


_OWN_SITE = frozenset({"same-origin", "none"})  # "none": typed into the address bar


def intrusion(headers: Mapping[str, str], *, changes: bool) -> ProblemError | None:
    """Return why a request that another site's page sends is refused, None where it is let in.

    Only browsers send the headers that tell. They are by lower-case name.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        is_foreign = site not in _OWN_SITE
    else:
        is_foreign = origin is not None and _authority(origin) != headers.get("host")
    if changes and is_foreign:
        return ProblemError(Slug.FOREIGN_PAGE, "a page of another site asks for this: only the dashboard's own may")
    return None


def other_name(host: str | None, names: Collection[str], *, token: str | None = None) -> ProblemError | None:
    """Return why a request that needs no token is refused for the name it calls, None where it is let in.

    Args:
        host: its `Host` header, None where it has none, as no browser's.
        names: names and patterns such as `*.example` that the service goes by.
        token: what to say of tokens, None where the service has none.
    """
    if host is None or _is_local(name := _name_in(host)) or any(fnmatchcase(name, each.lower()) for each in names):
        return None
    without = "" if token is None else "without a token that it knows "
    remedy = f"start the service with --allowed-host {name}"
    detail = (
        f"{without}the service is called by its address or a name that it goes by, and not as {host!r}: "
        f"{remedy if token is None else f'{token}, or {remedy}'}"
    )
    return ProblemError(Slug.FOREIGN_HOST, detail)


def _is_local(name: str) -> bool:
    """Return whether it is an address, which no name server can point elsewhere, or this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _authority(origin: str) -> str | None:
    """Return host and port of an `Origin` header; None where it is no URL, such as `http://[`."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _name_in(host: str) -> str:
    """Return the name in a `Host` header, without the port; empty where there is none, as in `[`."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


HEALTH = frozenset({"/healthz", "/readyz"})  # orchestrators ask these, without a token
# And what is the same for everyone: the pages, which ask people for their tokens, and the API's document.
OPEN = HEALTH | DASHBOARD.keys() | API_PAGES.keys() | {"/openapi.json"}
log = structlog.get_logger("refitd")

REALM = 'Bearer realm="refitd"'
FOLLOWS_BY = "refitd.follows_by"  # in a request's scope: the claim of a token that only follows
KNOWN_BY = "refitd.known_by"  # in a request's scope: the digest of the token that it came with, where that is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """A request's method and path, and the `Authorization` headers that it came with."""

    method: str
    path: str = ""
    credentials: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What a gate lets in.

    Attributes:
        tokens: returns the tokens; is called for each request.
        in_files: whether `tokens` reads files, and so is called in a thread.
        open: the paths that need no token.
        names: the names that the service goes by where no token is needed.
        as_password: whether a token is also taken as the password of basic authentication, for clients that can send
            credentials in a URL alone.
        refused: hears of each request that is refused for its token.
    """

    tokens: Callable[[], Tokens]
    in_files: bool
    open: Collection[str]
    names: Collection[str] = ()
    as_password: bool = False
    refused: "Callable[[Credentials, ProblemError], None]" = lambda _claim, _problem: None


def refusal(claim: Credentials, tokens: Tokens) -> ProblemError | None:
    """Return why a request is refused for its token, None where it is let in. Pure."""
    looks = claim.method in LOOKS
    if not is_needed(claim, tokens):
        return None
    what = "this" if looks else "this changes something and"
    given = _token_of(claim.credentials)
    if given is None:
        return _unauthorized(f"{what} needs the bearer token: send 'Authorization: Bearer …'", "")
    roles = roles_of(given, tokens)
    if may(roles, claim.method, claim.path):
        return None
    if roles:
        detail = (
            "this changes something, and the token only opens what looks: send the write token"
            if TokenRole.READ in roles
            else f"the token is one to {' and '.join(sorted(roles))}, which does not open this: send "
            f"{'a read token' if looks else 'the write token'}"
        )
        return ProblemError(Slug.FORBIDDEN, detail, {"WWW-Authenticate": _challenge("insufficient_scope")})
    return _unauthorized(f"{what} needs the bearer token: the one that was sent is not known here", "invalid_token")


def roles_of(given: str, tokens: Tokens) -> frozenset[TokenRole]:
    """Return the roles that a token has here; none where it is not known. Compares it with all of them."""
    held = {
        TokenRole.WRITE: tokens.write,
        TokenRole.READ: tokens.read,
        TokenRole.FOLLOW: without_names(tokens.follow),
    }
    return frozenset([role for role, known in held.items() if is_one_of(given, known)])


def follow_claim(claim: Credentials, tokens: Tokens) -> FollowClaim | None:
    """Return for whom a token that only follows speaks; None of any other token."""
    given = _token_of(claim.credentials)
    if given is None or roles_of(given, tokens) != frozenset({TokenRole.FOLLOW}):
        return None
    return FollowClaim(digest_of(given), names_of(given, tokens.follow))


def is_needed(claim: Credentials, tokens: Tokens) -> bool:
    return bool(tokens.read if claim.method in LOOKS else tokens.write)


def known_by(claim: Credentials, tokens: Tokens) -> bytes | None:
    """Return the digest of the token that the request came with, needed or not; None where it is not known here."""
    given = _token_of(claim.credentials)
    return digest_of(given) if given is not None and roles_of(given, tokens) else None


def _token_of(credentials: tuple[str, ...]) -> str | None:
    """Return the bearer token, None where there is none; "" of several headers, of which none is right."""
    if len(credentials) > 1:
        return ""
    scheme, _, token = (credentials[0] if credentials else "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _as_bearer(credential: str) -> str:
    """Return basic authentication (RFC 7617) as the bearer token that its password is; anything else unchanged."""
    scheme, _, pair = credential.partition(" ")
    if scheme.lower() != "basic":
        return credential
    try:
        password = base64.b64decode(pair.strip(), validate=True).partition(b":")[2]
    except ValueError:
        password = b""
    return f"Bearer {password.decode('latin-1')}"


def _unauthorized(detail: str, error: str) -> ProblemError:
    return ProblemError(Slug.UNAUTHORIZED, detail, {"WWW-Authenticate": _challenge(error)})


def _challenge(error: str) -> str:
    """RFC 6750, section 3: only a client that sent a token hears the error."""
    return f'{REALM}, error="{error}"' if error else REALM


class Gate:
    """ASGI middleware that lets in who may come in. Tokens are read each time, so that they can be rotated."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door
        self._logged: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401, 403 or 503."""
        problem = await self._problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await answer(problem, scope)(scope, receive, send)

    async def _problem(self, scope: Scope) -> ProblemError | None:
        if scope["path"] in self._door.open:
            return None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            tokens = await asyncio.to_thread(self._door.tokens) if self._door.in_files else self._door.tokens()
        except OSError as error:
            return self._closed(f"the token file cannot be read: {error.strerror}")
        except TokensRefusedError as error:
            return self._closed(str(error))
        self._logged = None
        sent = tuple(value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization")
        claim = Credentials(
            method=scope["method"],
            path=scope["path"],
            credentials=tuple(map(_as_bearer, sent)) if self._door.as_password else sent,
        )
        if (follows := follow_claim(claim, tokens)) is not None:
            scope[FOLLOWS_BY] = follows
        if (known := known_by(claim, tokens)) is not None:
            scope[KNOWN_BY] = known
        found = intrusion(headers, changes=claim.method not in LOOKS)
        if found is None and (found := refusal(claim, tokens)) is not None:
            self._door.refused(claim, found)
        if found is not None or is_needed(claim, tokens) or known is not None:
            return found
        advice = "the token that was sent is not known here: send another" if claim.credentials else "send a token"
        has_tokens = bool(tokens.write + tokens.read)
        return other_name(headers.get("host"), self._door.names, token=advice if has_tokens else None)

    def _closed(self, reason: str) -> ProblemError:
        """Refuse every request; log it once."""
        if reason != self._logged:
            self._logged = reason
            log.error("every request is refused", reason=reason)
        return ProblemError(Slug.NOT_READY, reason)
