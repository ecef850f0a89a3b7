"""The HTTP API, put together."""

from fastapi import FastAPI

from refitd.surface import engines, errors, health, log, reclaim, versions
from refitd.surface.context import Service
from refitd.surface.limits import BodyLimit


def build_api(service: Service) -> FastAPI:
    """The ASGI application for a running service."""
    app = FastAPI(title="refitd", version="1", summary="Keeps inference engines on the trainer's latest weights.")
    app.state.service = service
    for part in (versions, engines, reclaim, log, health):
        app.include_router(part.router)
    errors.install(app)
    app.add_middleware(BodyLimit)
    return app
