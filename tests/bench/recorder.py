"""The embedded engine with a clock at its door: when each call arrived, on the machine's monotonic clock.

GET /_calls     [[seconds, path], …] since the last time
"""

import gc
import sys
import time
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

import refitd_embedded.server as server
from refitd_embedded.__main__ import main


class Recorder:
    """Notes when a request arrives, then passes it on."""

    def __init__(self, app: ASGIApp, calls: list[tuple[float, str]]) -> None:
        self._app = app
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Note and pass on."""
        if scope["type"] == "http" and scope["method"] == "POST":
            self._calls.append((time.monotonic(), scope["path"]))
        await self._app(scope, receive, send)


_plain_app = server.create_app


gc.freeze()  # torch's objects: to look through them takes 100 ms, in which no call would arrive


def _recorded_app(*arguments: Any, **options: Any) -> FastAPI:
    app = _plain_app(*arguments, **options)
    calls: list[tuple[float, str]] = []

    def taken() -> list[tuple[float, str]]:
        found = calls.copy()
        calls.clear()
        return found

    app.add_api_route("/_calls", taken)
    app.add_middleware(Recorder, calls=calls)
    return app


if __name__ == "__main__":
    server.create_app = _recorded_app
    sys.exit(main())
