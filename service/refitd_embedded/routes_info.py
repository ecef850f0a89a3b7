"""The routes that say what is served and whether it works, and those of LoRA adapters.

/model_info and /ping are flag checks: they answer during a load. /server_info asks the scheduler, so it waits for one.
/health generates a token, and waits behind a pause like any other request.

Adapters have SGLang's routes and answers.
"""

import asyncio
import time
import uuid
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from refitd_embedded.engine import EmbeddedEngine
from refitd_embedded.lora import Adapters
from refitd_embedded.request import GenerationRequest
from refitd_embedded.sampling import SamplingParams

HEALTH_TIMEOUT = 20.0
"""Seconds, as SGLang. (It looks once a second whether a token came out; here one is noticed at once.)"""


class LoadLoraBody(BaseModel):
    """POST /load_lora_adapter."""

    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadLoraBody(BaseModel):
    """POST /unload_lora_adapter."""

    lora_name: str


def info_routes(engine: EmbeddedEngine, launch: dict[str, Any]) -> APIRouter:
    """The routes, bound to one engine.

    Args:
        engine: what they report on.
        launch: what /server_info says of how it was started.
    """
    router = APIRouter()
    startup = {"tokenizer_e2e": time.process_time()}  # as SGLang's: no other process takes just as long to start

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        return _model_info(engine)

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        await engine.settled()
        internal = {"weight_version": engine.scheduler.weight_version, "last_gen_throughput": 0.0}
        return {**launch, "startup_time": startup, "internal_states": [{**launch, **internal}], "frontend": "python"}

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = _model_card(engine)
        more = card | {"parent": card["id"], "max_model_len": None}
        own = [more | {"id": name, "root": folder} for name, folder in engine.adapters.folders.items()]
        return {"object": "list", "data": [card, *own]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name == engine.labels.model_path:
            return JSONResponse(_model_card(engine))
        message = f"The model '{name}' does not exist"
        error = {"message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
        return JSONResponse({"error": error}, status_code=404)

    @router.get("/ping")
    async def ping() -> Response:
        return Response()

    @router.get("/ready")
    async def ready() -> Response:
        return Response(status_code=503 if engine.paused else 200)

    @router.get("/health")
    @router.get("/health_generate")
    async def health() -> Response:
        return Response(status_code=200 if await _generates(engine) else 503)

    return router


def lora_routes(adapters: Adapters) -> APIRouter:
    """The routes, bound to one engine's adapters."""
    router = APIRouter()

    @router.post("/load_lora_adapter")
    async def load_lora_adapter(body: LoadLoraBody) -> Response:
        return _said(await adapters.load(body.lora_name, body.lora_path), adapters)

    @router.post("/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadLoraBody) -> Response:
        return _said(await adapters.unload(body.lora_name), adapters)

    return router


def _said(fault: str | None, adapters: Adapters) -> Response:
    content: dict[str, Any] = {"success": fault is None, "error_message": fault, "loaded_adapters": adapters.folders}
    return JSONResponse(content, status_code=200 if fault is None else 400)


async def _generates(engine: EmbeddedEngine) -> bool:
    """Whether any token comes out within HEALTH_TIMEOUT, of the probe or of any other request."""
    scheduler, before = engine.scheduler, engine.scheduler.tokens_out
    probe = asyncio.create_task(_probe(engine))
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT):
            await scheduler.stepped.until(lambda: scheduler.tokens_out > before)
    except TimeoutError:
        return False
    finally:
        probe.cancel()
        await asyncio.wait((probe,))
    return True


async def _probe(engine: EmbeddedEngine) -> None:
    params = SamplingParams(max_new_tokens=1, temperature=0.0)
    async with engine.admitted(
        [GenerationRequest(rid=f"HEALTH_CHECK_{uuid.uuid4().hex}", prompt=[0], params=params)]
    ) as probe:
        await probe.done()


def _model_info(engine: EmbeddedEngine) -> dict[str, Any]:
    config = engine.decoder.config
    family = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[config.family]
    return {
        "model_path": engine.labels.model_path,
        "served_model_name": engine.labels.model_path,
        "tokenizer_path": engine.startup_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": engine.labels.weight_version,
        "load_format": engine.labels.load_format,
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": config.family,
        "architectures": [family],
    }


def _model_card(engine: EmbeddedEngine) -> dict[str, Any]:
    name = engine.labels.model_path
    card: dict[str, Any] = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "sglang"}
    return {**card, "root": name, "parent": None, "max_model_len": engine.bounds.context_length}
