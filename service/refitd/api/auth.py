"""Bearer tokens (RFC 6750) at the door: what a request may do is decided by its method, before its body is read.

No route has to ask for a token, so none can forget to: what is not known to be open is closed. Whatever changes
anything needs the write token. What only looks needs a read or a write token where a read token is set.
"""

import asyncio
import base64
from collections.abc import Callable, Collection
from dataclasses import dataclass

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from refitd.api import pages, swagger
from refitd.api.browser import Sender, intrusion, other_name
from refitd.api.errors import answer
from refitd.problem import Kind, ProblemError
from refitd.tokens import Tokens, TokensRefusedError, is_one_of

HEALTH = frozenset({"/healthz", "/readyz"})  # orchestrators ask these, without a token
# And what is the same for everyone: the pages, which ask people for their tokens, and the API's document.
OPEN = HEALTH | pages.FILES.keys() | swagger.PLACES.keys() | {"/openapi.json"}
LOOKS = frozenset({"GET", "HEAD", "OPTIONS"})
log = structlog.get_logger("refitd")

REALM = 'Bearer realm="refitd"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks for, and the `Authorization` headers that it came with."""

    method: str
    credentials: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What a gate lets in: the tokens, the paths that need none, and the names that it goes by where none is needed.

    `tokens` is called for each request, in a thread where `in_files` says that it reads files. With `as_password` a
    token is taken as the password of basic authentication too, for clients that can send credentials in a URL alone.
    """

    tokens: Callable[[], Tokens]
    in_files: bool
    open: Collection[str]
    names: Collection[str] = ()
    as_password: bool = False


def refusal(asked: Asked, tokens: Tokens) -> ProblemError | None:
    """Why a request is not let in, None where it is. Pure."""
    looks = asked.method in LOOKS
    if not is_needed(asked, tokens):
        return None
    what = "this" if looks else "this changes something and"
    given = _token_of(asked.credentials)
    if given is None:
        return _unauthorized(f"{what} needs the bearer token: send 'Authorization: Bearer …'", "")
    may_write, may_read = is_one_of(given, tokens.write), is_one_of(given, tokens.read)
    if may_write or (looks and may_read):
        return None
    if may_read:
        detail = "this changes something, and the token only opens what looks: send the write token"
        return ProblemError(Kind.FORBIDDEN, detail, {"WWW-Authenticate": _challenge("insufficient_scope")})
    return _unauthorized(f"{what} needs the bearer token: the one that was sent is not known here", "invalid_token")


def is_needed(asked: Asked, tokens: Tokens) -> bool:
    """Whether what is asked for needs a token."""
    return bool(tokens.read if asked.method in LOOKS else tokens.write)


def is_known(asked: Asked, tokens: Tokens) -> bool:
    """Whether it came with a token, needed or not."""
    given = _token_of(asked.credentials)
    return given is not None and is_one_of(given, tokens.write + tokens.read)


def _token_to_send(asked: Asked, tokens: Tokens) -> str | None:
    """What to say of tokens to one that came without any that is known; None where there are none."""
    if not tokens.write + tokens.read:
        return None
    return "the token that was sent is not known here: send another" if asked.credentials else "send a token"


def _token_of(credentials: tuple[str, ...]) -> str | None:
    """The token, None where none was sent in a form that is known. Of several none is right: who knows which counts?"""
    if len(credentials) > 1:
        return ""
    scheme, _, token = (credentials[0] if credentials else "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _as_bearer(credential: str) -> str:
    """Basic authentication (RFC 7617) as the bearer token that its password is; anything else as it is."""
    scheme, _, pair = credential.partition(" ")
    if scheme.lower() != "basic":
        return credential
    try:
        password = base64.b64decode(pair.strip(), validate=True).partition(b":")[2]
    except ValueError:
        password = b""
    return f"Bearer {password.decode('latin-1')}"


def _unauthorized(detail: str, error: str) -> ProblemError:
    return ProblemError(Kind.UNAUTHORIZED, detail, {"WWW-Authenticate": _challenge(error)})


def _challenge(error: str) -> str:
    """RFC 6750, section 3: the error is named only to whom who sent a token."""
    return f'{REALM}, error="{error}"' if error else REALM


class Gate:
    """ASGI middleware that lets in who may come in. Tokens are read each time, so that they can be rotated."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door
        self._told: str | None = None

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
            tokens = await self._tokens()
        except OSError as error:
            return self._closed(f"the token file cannot be read: {error.strerror}")
        except TokensRefusedError as error:
            return self._closed(str(error))
        self._told = None
        asked = Asked(method=scope["method"], credentials=self._credentials(scope))
        found = intrusion(Sender(headers=headers), changes=asked.method not in LOOKS) or refusal(asked, tokens)
        if found is not None or is_needed(asked, tokens) or is_known(asked, tokens):
            return found
        return other_name(headers.get("host"), self._door.names, token=_token_to_send(asked, tokens))

    def _credentials(self, scope: Scope) -> tuple[str, ...]:
        sent = tuple(value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization")
        return tuple(map(_as_bearer, sent)) if self._door.as_password else sent

    def _closed(self, reason: str) -> ProblemError:
        """Nobody is let in; the log says so once."""
        if reason != self._told:
            self._told = reason
            log.error("every request is refused", reason=reason)
        return ProblemError(Kind.NOT_READY, reason)

    async def _tokens(self) -> Tokens:
        return await asyncio.to_thread(self._door.tokens) if self._door.in_files else self._door.tokens()
