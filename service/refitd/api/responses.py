"""A problem as an HTTP response."""

from dataclasses import replace

import msgspec
from starlette.responses import Response

from refitd.problem import ProblemError


def response(error: ProblemError, path: str) -> Response:
    """The problem document for the request path `path`. Names of files need not be UTF-8, and a document does."""
    document = error.document(path)
    document = replace(document, detail=document.detail.encode(errors="backslashreplace").decode())
    return Response(
        msgspec.json.encode(document),
        status_code=error.kind.status,
        media_type="application/problem+json",
        headers=error.headers,
    )
