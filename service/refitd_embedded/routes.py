"""The routes that generate, that pause or end it, that change what is served, and that say it; SGLang 0.5.23's answers.

/model_info and /ping are flag checks: they answer during a load. /server_info asks the scheduler, so it waits for one.
/health generates a token, and waits behind a pause like any other request.
"""

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from refitd_embedded.engine import EmbeddedEngine
from refitd_embedded.model import Adapters
from refitd_embedded.runner import GenerationRequest, SamplingParams
from refitd_embedded.weights import CarelessLoader, Interruption, report
from refitd_embedded.wire import (
    AbortBody,
    CheckerBody,
    ContinueBody,
    GenerateBody,
    InterruptBody,
    LoadLoraBody,
    PauseBody,
    UnloadLoraBody,
    UpdateFromDiskBody,
    VersionBody,
    is_batch,
    requests_of,
)

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
HEALTH_TIMEOUT = 20.0
"""Seconds, as SGLang. (It looks once a second whether a token came out; here one is noticed at once.)"""
T = TypeVar("T")
Answer = dict[str, Any]
TokenLogprob = list[float | int | None]
"""[log-probability or null, token id, null]: the third is the token's text, which needs a tokenizer."""


def generate_routes(engine: EmbeddedEngine) -> APIRouter:
    """POST /generate of one engine: whole answers, or one event for each token."""
    router = APIRouter()

    @router.api_route("/generate", methods=["POST", "PUT"])
    async def generate(body: GenerateBody, http: HttpRequest) -> Response:
        try:
            requests = requests_of(body, engine.decoder.config, engine.adapters.named(body.lora_path))
            batch = is_batch(body)
            if body.stream:
                return StreamingResponse(_events(engine, requests, batch=batch), media_type="text/event-stream")
            answers = await while_connected(http, _answers(engine, requests))
        except ValueError as problem:
            if body.stream:  # a stream reports its errors inside the stream, with 200
                events = _event(_stream_error(str(problem))) + b"data: [DONE]\n\n"
                return Response(events, media_type="text/event-stream")
            return JSONResponse({"error": {"message": str(problem)}}, status_code=400)
        except ClientLeftError:
            return Response(status_code=499)
        return JSONResponse(answers if batch else answers[0])

    return router


async def _answers(engine: EmbeddedEngine, requests: list[GenerationRequest]) -> list[Answer]:
    async with engine.admitted(requests) as progress:
        await progress.done()
    return [answer(request, engine.labels.weight_version) for request in requests]


async def _events(engine: EmbeddedEngine, requests: list[GenerationRequest], *, batch: bool) -> AsyncIterator[bytes]:
    """Each event repeats the answer so far. When the client leaves, this is cancelled and its requests are aborted."""
    places = {request.rid: place for place, request in enumerate(requests)}
    try:
        async with engine.admitted(requests) as progress:
            async for request in progress:
                index = {"index": places[request.rid]} if batch else {}
                yield _event(answer(request, engine.labels.weight_version) | index)
    except ValueError as problem:
        yield _event(_stream_error(str(problem)))
    yield b"data: [DONE]\n\n"


def _stream_error(message: str) -> Answer:
    return {"error": {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}}


def _event(content: Answer) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def answer(request: GenerationRequest, label: str) -> Answer:
    """The answer so far, field by field as SGLang has it; `text` is empty. `label` is the front end's weight version,
    which counts until the request has ended.
    """
    meta: dict[str, Any] = {"id": request.rid, "finish_reason": request.finish}
    if not request.ended_waiting:
        meta |= {"prompt_tokens": len(request.prompt), "num_retractions": request.retractions}
    meta["weight_version"] = request.spans[-1].version if request.spans else label
    if request.return_logprob:
        outputs = output_token_logprobs(request)
        meta |= {"input_token_logprobs": [], "output_token_logprobs": outputs}
        meta["output_token_logprobs_length"] = len(outputs)
    if not request.ended_waiting:
        meta |= {"reasoning_tokens": 0, "cached_tokens": 0, "cached_tokens_details": None, "dp_rank": None}
    meta["completion_tokens"] = len(request.output)
    if request.finish is not None:
        spans = [{"version": span.version, "start": span.start, "end": span.end} for span in request.spans]
        meta |= {"weight_versions": spans, "e2e_latency": request.lived}
    return {"text": "", "output_ids": list(request.output), "meta_info": meta}


def output_token_logprobs(request: GenerationRequest) -> list[TokenLogprob]:
    """One for each output token; null where a broken model gave NaN."""
    pairs = zip(request.output_logprobs, request.output, strict=True)
    return [[None if math.isnan(logprob) else logprob, token, None] for logprob, token in pairs]


class ClientLeftError(Exception):
    """The client has closed its connection."""


async def while_connected(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises ClientLeftError, after `work` has ended, if the client left first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    if task.cancelled():
        raise ClientLeftError
    return task.result()


async def _gone(http: HttpRequest) -> None:
    """Return when the client has left. The body has been read by now, so what comes next can only be that."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def control_routes(engine: EmbeddedEngine) -> APIRouter:
    """The routes that pause generation, let it go on, or end it."""
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
    async def flush_cache() -> Response:
        return Response(FLUSHED) if await engine.flush() else Response("Flush cache failed.\n", 400)

    @router.post("/abort_request")
    async def abort_request(body: AbortBody) -> Response:
        engine.abort(body.rid or "", every=body.abort_all)
        return Response()

    return router


def weights_routes(engine: EmbeddedEngine) -> APIRouter:
    """The routes that change what is served, and that prove it."""
    router = APIRouter()

    @router.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: UpdateFromDiskBody, http: HttpRequest) -> Response:
        work = engine.update(body)
        try:
            # A real server goes on loading for a client that left.
            updated = await (work if engine.options.defects else while_connected(http, work))
        except ClientLeftError:
            return Response(status_code=499)
        content = {"success": updated.success, "message": updated.message, "num_paused_requests": 0}
        return JSONResponse(content, 200 if updated.success else 400)

    @router.post("/update_weight_version")
    async def update_weight_version(body: VersionBody) -> Response:
        await engine.relabel(body.new_version, abort_all=body.abort_all_requests)
        message = f"Weight version updated to {body.new_version}"
        return JSONResponse({"success": True, "message": message, "new_version": body.new_version})

    @router.api_route("/weights_checker", methods=["GET", "POST"])
    async def weights_checker(body: CheckerBody | None = None) -> Response:
        action = "checksum" if body is None else body.action
        if action != "checksum":
            return JSONResponse({"success": False, "message": f"Unsupported action='{action}'"}, 400)
        return JSONResponse(report(await engine.checksums()))

    if isinstance(loader := engine.reloader.loader, CarelessLoader):

        @router.post("/embedded/interrupt_loads")
        async def interrupt_loads(body: InterruptBody) -> Response:
            """Not SGLang's: see `weights.Interruption`. There with `--defects` only."""
            loader.interruption = Interruption(after=body.after, times=body.times)
            return Response()

    return router


def info_routes(engine: EmbeddedEngine, launch: dict[str, Any]) -> APIRouter:
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
    return {**card, "root": name, "parent": None, "max_model_len": engine.decoder.config.max_position_embeddings}
