"""/docs: a page to read and try the API, Swagger UI, which comes from the service as everything else does.

FastAPI's own page takes Swagger UI from another host: without the internet it stays blank, and with it a foreign script
runs where people type their tokens. The package fastapi-offline carries the same files; its application is not used.
The page and /openapi.json are the same for everyone, and open. What is tried out is asked of the API, with the token
that the page's Authorize takes.
"""

import asyncio
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request, Response

from refitd.api.web_file import WebFile

_OWN = Path(__file__).parent.parent / "swagger"
PLACES: Mapping[str, str] = {
    "/docs": "index.html",
    "/docs/start.js": "start.js",
    "/docs/swagger-ui-bundle.js": "swagger-ui-bundle.js",
    "/docs/swagger-ui.css": "swagger-ui.css",
}

# As the dashboard's, but for the icons that its style sheet has written into it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

router = APIRouter(include_in_schema=False)


@router.get("/docs")
@router.get("/docs/start.js")
@router.get("/docs/swagger-ui-bundle.js")
@router.get("/docs/swagger-ui.css")
async def swagger(request: Request) -> Response:
    """The page and its files."""
    file = await asyncio.to_thread(_read, PLACES[request.url.path])
    return file.answer(request, _POLICY)


@cache  # 1.5 MB that few ever ask for: read when somebody does
def _read(name: str) -> WebFile:
    own = _OWN / name
    return WebFile.read(own if own.exists() else Path(str(files("fastapi_offline") / "static" / name)))
