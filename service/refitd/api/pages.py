"""The dashboard's files, as the wheel has them.

They hold no secret and are open to everyone: whoever opens the dashboard of a service that wants a token has to be
asked for it by something. What they show they fetch from the API, which does ask.
"""

from collections.abc import Mapping
from pathlib import Path

from fastapi import APIRouter, Request, Response

from refitd.api.web_file import WebFile
from refitd.problem import Kind, ProblemError

FOLDER = Path(__file__).parent.parent / "dashboard"
ASSETS = "/assets/"
_KINDS = frozenset({".html", ".css", ".js", ".svg"})

# No script, style or address but the service's own; and none that is written into the page.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types lit-html"
)

router = APIRouter(include_in_schema=False)


def _read_all() -> Mapping[str, WebFile]:
    found = (path for path in sorted(FOLDER.rglob("*")) if path.suffix in _KINDS)
    files = {f"{ASSETS}{path.relative_to(FOLDER).as_posix()}": WebFile.read(path) for path in found}
    return files | {"/": files.pop(f"{ASSETS}index.html")}


FILES = _read_all()


@router.get("/")
@router.get(ASSETS + "{path:path}")
async def page(request: Request) -> Response:
    """The dashboard."""
    file = FILES.get(request.url.path)
    if file is None:
        raise ProblemError(Kind.NOT_FOUND, "the dashboard has no such file")
    return file.answer(request, _POLICY)
