"""One file of a page: read once, compressed once, and sent again only when it changed."""

import gzip
import mimetypes
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash
from fastapi import Request, Response

_HEADERS = {
    "Cache-Control": "no-cache",  # always asked for again, and sent again only after an upgrade
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WebFile:
    """A file as browsers get it."""

    media_type: str
    plain: bytes
    packed: bytes
    etag: str

    @classmethod
    def read(cls, path: Path) -> Self:
        """The file at `path`. Raises OSError."""
        data = path.read_bytes()
        kind = mimetypes.types_map.get(path.suffix, "text/plain") if path.suffix != ".js" else "text/javascript"
        return cls(
            media_type=f"{kind}; charset=utf-8",
            plain=data,
            packed=gzip.compress(data, 9, mtime=0),
            etag=f'"{xxhash.xxh3_64_hexdigest(data)}"',
        )

    def answer(self, request: Request, policy: str) -> Response:
        """What `request` gets, under the Content-Security-Policy `policy`."""
        headers = _HEADERS | {"Content-Security-Policy": policy, "ETag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(self.plain, media_type=self.media_type, headers=headers)
        return Response(self.packed, media_type=self.media_type, headers=headers | {"Content-Encoding": "gzip"})
