"""The HTTP API, put together."""

from fastapi import FastAPI

from refitd.api import (
    engines,
    errors,
    health,
    log,
    overview,
    pages,
    reclaim,
    rollback,
    rollouts,
    runs,
    swagger,
    versions,
    webhooks,
)
from refitd.api.auth import OPEN, Door, Gate
from refitd.api.context import Service
from refitd.api.document import documented
from refitd.api.feed import Feed
from refitd.api.limits import RequestLimit
from refitd.api.metrics import StoreCollector
from refitd.api.streams import Streams
from refitd.observe.telemetry import Telemetry


def routes() -> FastAPI:
    """The routes and their document, with no service behind them."""
    app = FastAPI(
        title="refitd",
        version="1",
        summary="Keeps inference engines on the trainer's latest weights.",
        redirect_slashes=False,  # a redirect would go wherever the request's Host header says
        docs_url=None,  # its pages take scripts from other hosts: `swagger.py` has the service's own
        redoc_url=None,
    )
    for part in (overview, versions, rollback, engines, runs, rollouts, reclaim, log, webhooks, health, pages, swagger):
        app.include_router(part.router)
    app.openapi = lambda: documented(app)
    return app


def build_api(service: Service) -> FastAPI:
    """The ASGI application for a running service."""
    app = routes()
    app.state.service = service
    app.state.streams = Streams()
    app.state.feed = Feed(service.store)
    app.state.overview = overview.Cached(wants_token=service.settings.wants_token)
    app.state.telemetry = service.telemetry or Telemetry(service.store)
    app.state.telemetry.registry.register(StoreCollector(service, app.state.telemetry.unserved))
    errors.install(app)
    # The last that is added is asked first: who may come in is settled before anything of a request is taken in.
    app.add_middleware(RequestLimit)
    settings = service.settings
    in_files = settings.token_file is not None or settings.read_token_file is not None
    app.add_middleware(
        Gate,
        door=Door(tokens=settings.tokens, in_files=in_files, open=OPEN, names=(settings.host, *settings.allowed_hosts)),
    )
    return app
