"""The HTTP API, put together: routes, middleware, and the document at /openapi.json."""

from dataclasses import replace
from functools import cache
from pkgutil import resolve_name
from typing import Any

from fastapi import APIRouter, FastAPI
from pydantic import TypeAdapter

from refitd.api import (
    engines,
    errors,
    health,
    log,
    operations,
    overview,
    versions,
    web_pages,
)
from refitd.api.auth import LOOKS, OPEN, Door, Gate
from refitd.api.context import Service
from refitd.api.health import LeaderCollector, StoreCollector
from refitd.api.limits import RequestLimit, WaitingRequests
from refitd.api.log import Feed
from refitd.api.options import AccessSettings
from refitd.api.overview import Fragments
from refitd.observe.telemetry import Telemetry
from refitd.parts import parts as rings
from refitd_client.contract.wire import Problem

_BEARER = {"type": "http", "scheme": "bearer", "description": "A write token, or a read token for what only looks."}
_FASTAPIS_OWN = ("HTTPValidationError", "ValidationError")
_REFUSED_ANSWERS = {"401": "A token is needed, or another one", "403": "The token does not open this"}


def routes() -> FastAPI:
    """The routes and their document, with no service behind them."""
    app = FastAPI(
        separate_input_output_schemas=False,
        title="refitd",
        version="1",
        summary="Keeps inference engines on the trainer's latest weights.",
        redirect_slashes=False,  # a redirect would go wherever the request's Host header says
        docs_url=None,  # its pages take scripts from other hosts: `web_pages.py` has the service's own
        redoc_url=None,
    )
    app.router.routes.extend(_parts().routes)
    web_pages.install(app)
    app.openapi = lambda: _documented(app)
    return app


@cache
def _parts() -> APIRouter:
    """The routes of all parts, made once in a process: FastAPI takes a sixth of a second for what it checks them by."""
    parts = APIRouter(redirect_slashes=False)
    for router in (
        overview.router,
        versions.router,
        operations.rollback_routes,
        engines.gate_route,
        engines.router,
        engines.receivers_route,
        operations.run_routes,
        operations.reclaim_routes,
        log.router,
        log.history_routes,
        health.router,
        *(resolve_name(name) for ring in rings() for name in ring.routes),
    ):
        parts.include_router(router)
    return parts


def build_api(service: Service) -> FastAPI:
    app = routes()
    app.state.service = service
    app.state.waiting = WaitingRequests()
    app.state.feed = Feed(service.store)
    app.state.history = log.PastUpdates()
    leader = service.leader
    app.state.fragments = Fragments()
    app.state.overview = overview.Cached(
        keeps=service.values.keeping,
        wants_token=service.values.access.wants_token,
        leader=leader,
        fragments=app.state.fragments,
    )
    app.state.telemetry = service.telemetry or Telemetry(service.store)
    app.state.telemetry.registry.register(StoreCollector(service, app.state.telemetry.unserved))
    if leader is not None:
        app.state.telemetry.registry.register(LeaderCollector(lambda: leader.epoch))
    errors.install(app)
    # The last that is added is asked first: who may come in is settled before anything of a request is taken in.
    app.add_middleware(RequestLimit)
    door = replace(door_of(service.values.access), refused=service.hosts.note_refused)
    app.add_middleware(Gate, door=door)
    return app


def door_of(access: AccessSettings) -> Door:
    names = (access.host, *access.allowed_hosts)
    return Door(tokens=access.tokens, in_files=access.has_token_files, open=OPEN, names=names)


def _documented(app: FastAPI) -> dict[str, Any]:
    """Return the document of the API, which is made once.

    FastAPI knows the routes. That some want a token, and that every error is a problem document, is the middleware's
    doing (`auth.py`, `errors.py`), and is added here.
    """
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = FastAPI.openapi(app)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in _FASTAPIS_OWN:
        schemas.pop(name, None)
    schemas["Problem"] = TypeAdapter(Problem).json_schema()
    components["securitySchemes"] = {"bearer": _BEARER}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            problems = {"default": "What else can go wrong", "422": "The request does not have the right form"}
            if path not in OPEN:
                # Looking needs a token only where the operator has set one for it.
                operation["security"] = [{"bearer": []}] if method.upper() not in LOOKS else [{}, {"bearer": []}]
                problems |= _REFUSED_ANSWERS
            operation["responses"] |= {status: _problem(text) for status, text in sorted(problems.items())}
    app.openapi_schema = document
    return document


def _problem(description: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": description, "content": {"application/problem+json": {"schema": schema}}}
