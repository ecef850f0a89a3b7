"""The routes that say what is served, and whether it works.

/model_info and /ping are flag checks: they answer during a load. /server_info asks the scheduler, so it waits for one.
/health generates a token, and waits behind a pause like any other request.
"""

import asyncio
import time
import uuid
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from refitd_embedded.engine import Engine
from refitd_embedded.request import Request
from refitd_embedded.routes_lora import Adapters
from refitd_embedded.sampling_params import SamplingParams

HEALTH_TIMEOUT = 20.0
"""Seconds, as SGLang. (It looks once a second whether a token came out; here one is noticed at once.)"""


def info_routes(engine: Engine, launch: dict[str, Any], adapters: Adapters) -> APIRouter:
    """The routes, bound to one engine. `launch` is what /server_info says of how it was started."""
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
        return {"object": "list", "data": [_model_card(engine), *_adapter_cards(engine, adapters)]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name == engine.labels.model_path:
            return JSONResponse(_model_card(engine))
        return JSONResponse({"error": _no_such_model(name)}, status_code=404)

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


async def _generates(engine: Engine) -> bool:
    """Whether any token comes out within HEALTH_TIMEOUT, of a request of our own or of anyone's."""
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


async def _probe(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=1, temperature=1.0, top_k=1)
    async with engine.admitted([Request(rid=f"HEALTH_CHECK_{uuid.uuid4().hex}", prompt=[0], params=params)]) as probe:
        await probe.done()


def _model_info(engine: Engine) -> dict[str, Any]:
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


def _model_card(engine: Engine) -> dict[str, Any]:
    name = engine.labels.model_path
    card: dict[str, Any] = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "sglang"}
    return {**card, "root": name, "parent": None, "max_model_len": engine.bounds.context_length}


def _adapter_cards(engine: Engine, adapters: Adapters) -> list[dict[str, Any]]:
    card: dict[str, Any] = {"object": "model", "created": int(time.time()), "owned_by": "sglang"}
    more = {"parent": engine.labels.model_path, "max_model_len": None}
    return [{"id": name, **card, "root": folder, **more} for name, folder in adapters.folders.items()]


def _no_such_model(name: str) -> dict[str, Any]:
    message = f"The model '{name}' does not exist"
    return {"message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
