"""The service's pages: the dashboard at /, and Swagger UI at /docs, to read and try the API.

They hold no secret and are open to everyone: something has to ask people for a token. What they show they fetch from
the API, which wants the token. Files come with the wheel; no page takes a script, style or address from elsewhere.

FastAPI's own /docs takes Swagger UI from another host: without the internet it stays blank, and with it a foreign
script runs where people type their tokens. The package fastapi-offline brings the same files; its application is not
used.
"""

from collections.abc import Mapping
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parent.parent / "dashboard"
_SWAGGER = Path(__file__).parent.parent / "swagger"
_PAGE_KINDS = frozenset({".html", ".css", ".js", ".svg"})


def _dashboard() -> dict[str, str]:
    names = (path.relative_to(FOLDER).as_posix() for path in sorted(FOLDER.rglob("*")) if path.suffix in _PAGE_KINDS)
    files = {f"/assets/{name}": name for name in names}
    return files | {"/": files.pop("/assets/index.html")}


# Paths of requests, and the files that answer them. Nothing else is looked for.
DASHBOARD: Mapping[str, str] = _dashboard()
API_PAGES: Mapping[str, str] = {
    "/docs": "index.html",
    "/docs/start.js": "start.js",
    "/docs/swagger-ui-bundle.js": "swagger-ui-bundle.js",
    "/docs/swagger-ui.css": "swagger-ui.css",
}

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'{images}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'{more}"
)
_DASHBOARD_POLICY = _POLICY.format(images="", more="; require-trusted-types-for 'script'; trusted-types lit-html")
_API_POLICY = _POLICY.format(images=" data:", more="")  # Swagger UI's style sheet has icons written into it
_PAGE_HEADERS = {
    "Cache-Control": "no-cache",  # browsers ask each time, and get a file again only after an upgrade
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _Pages(StaticFiles):
    """Static files under the request paths of a table, with the headers that keep other sites' pages out."""

    def __init__(
        self, files: Mapping[str, str], policy: str, folder: Path, packages: list[str | tuple[str, str]]
    ) -> None:
        super().__init__(directory=folder, packages=packages)
        self._files = files
        self._headers = _PAGE_HEADERS | {"Content-Security-Policy": policy}

    def get_path(self, scope: Scope) -> str:
        return self._files[scope["path"]]

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(self._headers)
        if path.endswith(".js"):  # the system's table of types may have another, which `nosniff` turns away
            response.headers["Content-Type"] = "text/javascript; charset=utf-8"
        return response


def install(app: FastAPI) -> None:
    """Give `app` the routes of the pages, which are no part of its document."""
    dashboard = _Pages(DASHBOARD, _DASHBOARD_POLICY, FOLDER, [])
    api_pages = _Pages(API_PAGES, _API_POLICY, _SWAGGER, [("fastapi_offline", "static")])
    for files, pages in ((DASHBOARD, dashboard), (API_PAGES, api_pages)):
        packed = GZipMiddleware(pages)
        app.router.routes.extend(Route(path, packed, include_in_schema=False) for path in files)
