"""POST /generate: whole answers, or one event for each token."""

import json
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from refitd_embedded.answers import Answer, answer
from refitd_embedded.disconnect import ClientLeftError, while_connected
from refitd_embedded.engine import Engine
from refitd_embedded.intake import is_batch, requests_of
from refitd_embedded.request import Request as Prompt
from refitd_embedded.wire import GenerateBody


def generate_routes(engine: Engine) -> APIRouter:
    """The routes, bound to one engine."""
    router = APIRouter()

    @router.api_route("/generate", methods=["POST", "PUT"])
    async def generate(body: GenerateBody, http: Request) -> Response:
        try:
            prompts = requests_of(body, engine.bounds)
            batch = is_batch(body, prompts)
            if body.stream:
                return StreamingResponse(_events(engine, prompts, batch=batch), media_type="text/event-stream")
            answers = await while_connected(http, _answers(engine, prompts))
        except ValueError as problem:
            return _refused(body, str(problem))
        except ClientLeftError:
            return Response(status_code=499)
        return JSONResponse(answers if batch else answers[0])

    return router


async def _answers(engine: Engine, prompts: list[Prompt]) -> list[Answer]:
    async with engine.admitted(prompts) as progress:
        await progress.done()
    return [answer(prompt, engine.labels.weight_version) for prompt in prompts]


async def _events(engine: Engine, prompts: list[Prompt], *, batch: bool) -> AsyncIterator[bytes]:
    """Each event repeats the answer so far. When the client leaves, this is cancelled and its requests are aborted."""
    places = {prompt.rid: place for place, prompt in enumerate(prompts)}
    try:
        async with engine.admitted(prompts) as progress:
            async for prompt in progress:
                yield _event(
                    answer(prompt, engine.labels.weight_version) | ({"index": places[prompt.rid]} if batch else {})
                )
    except ValueError as problem:
        yield _event(_stream_error(str(problem)))
    yield b"data: [DONE]\n\n"


def _refused(body: GenerateBody, message: str) -> Response:
    """A stream reports its errors inside the stream, with 200."""
    if body.stream:
        events = _event(_stream_error(message)) + b"data: [DONE]\n\n"
        return Response(events, media_type="text/event-stream")
    return JSONResponse({"error": {"message": message}}, status_code=400)


def _stream_error(message: str) -> Answer:
    return {"error": {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}}


def _event(content: Answer) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
