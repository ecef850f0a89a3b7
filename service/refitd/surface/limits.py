"""Caps on what a request may send. uvicorn has none for bodies: without this a client could fill the memory."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from refitd.problem import Kind, ProblemError
from refitd.surface.errors import answer

MAX_BODY_BYTES = 2**20


class BodyLimit:
    """ASGI middleware that refuses bodies over `MAX_BODY_BYTES`, by their declared length or while they come in."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            _check(_declared(scope))
            await self._app(scope, self._counted(receive), send)
        except _TooLargeError as error:
            await answer(ProblemError(Kind.TOO_LARGE, str(error)), scope["path"])(scope, receive, send)

    def _counted(self, receive: Receive) -> Receive:
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            _check(taken)
            return message

        return counted


class _TooLargeError(Exception):
    pass


def _declared(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


def _check(size: int) -> None:
    if size > MAX_BODY_BYTES:
        raise _TooLargeError(f"a request body has at most {MAX_BODY_BYTES} bytes: notices are small, files go on disk")
