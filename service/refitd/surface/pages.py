"""The dashboard's files, as the wheel has them: read once, compressed once, each asked for again only when it changed.

They hold no secret and are open to everyone: whoever opens the dashboard of a service that wants a token has to be
asked for it by something. What they show they fetch from the API, which does ask.
"""

import gzip
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import xxhash
from fastapi import APIRouter, Header, Request, Response

from refitd.problem import Kind, ProblemError

FOLDER = Path(__file__).parent.parent / "dashboard"
ASSETS = "/assets/"
_KINDS = frozenset({".html", ".css", ".js", ".svg"})

# No script, style or address but the service's own; and none that is written into the page.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types lit-html"
)
_HEADERS = {
    "Cache-Control": "no-cache",  # always asked for again, and sent again only after an upgrade
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file of the dashboard."""

    media_type: str
    plain: bytes
    packed: bytes
    etag: str


def _read(path: Path) -> File:
    data = path.read_bytes()
    kind = mimetypes.types_map.get(path.suffix, "text/plain") if path.suffix != ".js" else "text/javascript"
    return File(
        media_type=f"{kind}; charset=utf-8",
        plain=data,
        packed=gzip.compress(data, 9, mtime=0),
        etag=f'"{xxhash.xxh3_64_hexdigest(data)}"',
    )


def _read_all() -> Mapping[str, File]:
    found = (path for path in sorted(FOLDER.rglob("*")) if path.suffix in _KINDS)
    files = {f"{ASSETS}{path.relative_to(FOLDER).as_posix()}": _read(path) for path in found}
    return files | {"/": files.pop(f"{ASSETS}index.html")}


FILES = _read_all()


@router.get("/")
@router.get(ASSETS + "{path:path}")
async def page(
    request: Request, if_none_match: Annotated[str, Header()] = "", accept_encoding: Annotated[str, Header()] = ""
) -> Response:
    """The dashboard."""
    file = FILES.get(request.url.path)
    if file is None:
        raise ProblemError(Kind.NOT_FOUND, "the dashboard has no such file")
    headers = _HEADERS | {"ETag": file.etag}
    if file.etag in if_none_match:
        return Response(status_code=304, headers=headers)
    if "gzip" not in accept_encoding:
        return Response(file.plain, media_type=file.media_type, headers=headers)
    return Response(file.packed, media_type=file.media_type, headers=headers | {"Content-Encoding": "gzip"})
