"""Only paths that can be read in one way are let in.

A facade decides by the path of a request. Where an HTTP library or the engine reads the same path differently (`/./x`,
`/a/../x`, `//x`, `/%78`, `/a\\x`, `http://host/x`), the decision is about another route than the one that is called.
"""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from refitd.api.errors import answer
from refitd.problem import Kind, ProblemError

_SEGMENT = rb"(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+"
_PLAIN = re.compile(rb"/(?:%b(?:/%b)*)?" % (_SEGMENT, _SEGMENT))


def is_plain(path: bytes) -> bool:
    """Whether a path, as it was sent, is its own normal form: without escapes, dot segments or empty segments."""
    return _PLAIN.fullmatch(path) is not None


class PlainPath:
    """ASGI middleware that answers 400 where the path is not plain."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and not is_plain(scope["raw_path"]):
            detail = "write the path plainly: no '.' or '..', no '//', no '%' or '\\' in it, and no host before it"
            problem = ProblemError(Kind.BAD_PATH, detail)
            await answer(problem, scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
