"""The routes that change what is served, and the proof of it."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from refitd_embedded.checksum import report
from refitd_embedded.defects import CarelessLoader, Interruption
from refitd_embedded.disconnect import ClientLeftError, while_connected
from refitd_embedded.engine import Engine
from refitd_embedded.reload import UpdateOrder
from refitd_embedded.wire import CheckerBody, InterruptBody, UpdateFromDiskBody, VersionBody


def weights_routes(engine: Engine) -> APIRouter:
    """The routes, bound to one engine."""
    router = APIRouter()

    @router.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: UpdateFromDiskBody, http: Request) -> Response:
        order = UpdateOrder(**body.model_dump(exclude={"torch_empty_cache", "recapture_cuda_graph"}))
        work = engine.update(order)
        try:
            # A real server goes on loading for a client that left.
            updated = await (work if engine.options.defects else while_connected(http, work))
        except ClientLeftError:
            return Response(status_code=499)
        content = {"success": updated.success, "message": updated.message, "num_paused_requests": 0}
        return _said(content, ok=updated.success)

    @router.post("/update_weight_version")
    async def update_weight_version(body: VersionBody) -> Response:
        await engine.relabel(body.new_version, abort_all=body.abort_all_requests)
        message = f"Weight version updated to {body.new_version}"
        return _said({"success": True, "message": message, "new_version": body.new_version})

    @router.api_route("/weights_checker", methods=["GET", "POST"])
    async def weights_checker(body: CheckerBody | None = None) -> Response:
        wanted = body or CheckerBody()
        if wanted.action != "checksum":
            return _said({"success": False, "message": f"Unsupported action='{wanted.action}'"}, ok=False)
        if wanted.selector == "draft":
            return _said({"success": True, "message": "Success."})
        found = await engine.checksums()
        skipped = wanted.skip_tensor_list or ()
        return _said(report({name: sum_ for name, sum_ in found.items() if not any(part in name for part in skipped)}))

    if isinstance(engine.reloader.loader, CarelessLoader):
        _interruptions(router, engine.reloader.loader)
    return router


def _interruptions(router: APIRouter, loader: CarelessLoader) -> None:
    @router.post("/embedded/interrupt_loads")
    async def interrupt_loads(body: InterruptBody) -> Response:
        """Not SGLang's: see `defects.Interruption`. There with `--defects` only."""
        loader.interruption = Interruption(after=body.after, times=body.times)
        return Response()


def _said(content: dict[str, Any], *, ok: bool = True) -> Response:
    return JSONResponse(content, status_code=200 if ok else 400)
