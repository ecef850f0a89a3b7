"""The routes that hold generation, let it go on, or end it."""

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response

from refitd_embedded.engine import Engine
from refitd_embedded.wire import AbortBody, ContinueBody, PauseBody

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


def control_routes(engine: Engine) -> APIRouter:
    """The routes, bound to one engine."""
    router = APIRouter()

    @router.post("/pause_generation")
    async def pause_generation(body: PauseBody) -> Response:
        await engine.pause(body.mode)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    @router.post("/continue_generation")
    async def continue_generation(_body: ContinueBody) -> Response:
        await engine.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    @router.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache(timeout: Annotated[float, Query(ge=0)] = 0) -> Response:  # noqa: ASYNC109 - SGLang's name
        hindrance = await engine.flush(timeout)
        return Response(FLUSHED if hindrance is None else hindrance, 200 if hindrance is None else 400)

    @router.post("/abort_request")
    async def abort_request(body: AbortBody) -> Response:
        engine.abort(body.rid or "", every=body.abort_all)
        return Response()

    return router
