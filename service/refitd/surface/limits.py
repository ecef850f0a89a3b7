"""Caps on what a request may send, before anything of it is parsed. uvicorn has none of its own.

A body is taken in whole before the service hears of it: one that is too large or no JSON, or whose client went
away in the middle, never reaches a route. The time that a client may take over all this is limited in `connection.py`.
"""

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from refitd.problem import Kind, ProblemError
from refitd.surface.errors import answer

MAX_BODY_BYTES = 2**20
MAX_HEAD_BYTES = 16 * 2**10
MAX_HEADERS = 100


class RequestLimit:
    """ASGI middleware that refuses heads and bodies beyond the limits, by what they declare or while they come in."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its whole body, or answer 413 or 431."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            _check_head(scope)
            body = await _body(scope, receive)
            _check_json(body or b"")
        except ProblemError as problem:
            await answer(problem, scope)(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), send)


def _check_head(scope: Scope) -> None:
    headers = scope["headers"]
    size = len(scope.get("raw_path", b"")) + len(scope["query_string"])
    size += sum(len(name) + len(value) + 4 for name, value in headers)
    if size > MAX_HEAD_BYTES or len(headers) > MAX_HEADERS:
        raise ProblemError(
            Kind.HEAD_TOO_LARGE, f"address and headers have at most {MAX_HEAD_BYTES} bytes, in {MAX_HEADERS} headers"
        )


async def _body(scope: Scope, receive: Receive) -> bytes | None:
    """The whole body; None where the client went away before its end."""
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
    if not chunked and not any(value.strip(b"0") for value in lengths):
        return b""
    _check_body(max((int(value) for value in lengths if value.isdigit()), default=0))
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        _check_body(len(body))
        more = message.get("more_body", False)
    return bytes(body)


def _check_body(size: int) -> None:
    if size > MAX_BODY_BYTES:
        detail = f"a request body has at most {MAX_BODY_BYTES} bytes: notices are small, files go on disk"
        raise ProblemError(Kind.TOO_LARGE, detail)


def _check_json(body: bytes) -> None:
    """Refuse what is no JSON by the letter (RFC 8259).

    Python's own parser lets through NaN, UTF-16 and halves of surrogate pairs, which no answer and no journal can hold.
    """
    try:
        if body:
            msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProblemError(Kind.BAD_REQUEST, f"the body is no JSON: {error}") from error


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Give the body once, and then whatever comes: the end of the connection."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
