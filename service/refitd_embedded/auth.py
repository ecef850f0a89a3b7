"""Who may call what, by bearer token, as SGLang decides it.

    no keys            everything is open
    API key            everything but probes wants it
    admin key          routes that change something want it
    both               routes that change something want the admin key alone, the others the API key

Probes (`/health…`, `/ready…`, `/metrics…`) are always open.
"""

import secrets
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN = ("/health", "/ready", "/metrics")
ADMIN = frozenset(
    (
        "/update_weights_from_disk",
        "/update_weight_version",
        "/weights_checker",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/abort_request",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/embedded/interrupt_loads",
    )
)


@dataclass(frozen=True, slots=True)
class Keys:
    """What was given on the command line."""

    api: str | None = None
    admin: str | None = None

    def wanted(self, path: str) -> str | None:
        """The key that `path` asks for, or None."""
        if path.startswith(OPEN):
            return None
        return (self.admin or self.api) if path in ADMIN else self.api


class BearerAuth:
    """ASGI middleware: 401 `{"error": "Unauthorized"}` without the right key. Plain ASGI, so that a disconnect of the
    client stays visible to the routes.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through or refuse."""
        if scope["type"] == "http" and not self._allowed(scope):
            await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        wanted = self._keys.wanted(scope["path"])
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        given = token.encode() if scheme.lower() == "bearer" else b""
        return wanted is None or secrets.compare_digest(given, wanted.encode())
