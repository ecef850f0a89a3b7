"""The front: an address at which a trainer finds its engines, with refitd as the only writer of their weights.

Calls that update weights are answered here (`sglang.py`, `vllm.py`). Routes for requests (PASSED) go to the engines and
back, untouched and as a stream. Other routes that write weights or give memory back are refused: they would change an
engine behind refitd. Any other path is a 404: the front passes on no route that it does not name.

Requests have a plain path, are within the limits and, where the front has a token, carry it, as with the service.
"""

import asyncio
import re
import resource
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import AsyncExitStack, contextmanager

import structlog
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from refitd.api import auth
from refitd.api.connection import ConnectionSlots, Patience
from refitd.api.errors import answer
from refitd.api.limits import RequestLimit
from refitd.api.server import BoundedServer
from refitd.memory import BodyMemory
from refitd.problem import ProblemError, Slug
from refitd.tokens import FrontTokens
from refitd_front.engines import NoEngineError, RequestTargets, RunEngines
from refitd_front.passing import ABORTS
from refitd_front.pausing import Gatekeeper, PauseGate
from refitd_front.sessions import Sessions
from refitd_front.sglang import SglangCalls
from refitd_front.versions import Versions
from refitd_front.vllm import VllmCalls

_PATH_SEGMENT = rb"(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+"
_PLAIN = re.compile(rb"/(?:%b(?:/%b)*)?" % (_PATH_SEGMENT, _PATH_SEGMENT))
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]
_INFORMS = (
    *("/v1/models", "/model_info", "/get_model_info", "/get_weight_version", "/version"),
    *("/health", "/health_generate", "/ping", "/ready", "/load", "/v1/loads"),
)
_TELLING_KEYS = ("/server_info", "/get_server_info")
_GENERATING = (
    *("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
    *("/inference/v1/generate", "/classify", "/encode", "/score", "/v1/score", "/rerank", "/v1/rerank", "/pooling"),
)
_TEXT = ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens")
# Only these are passed on, each with its method; an engine's other routes (memory, profiles, settings) are for refitd.
PASSED: Mapping[str, str] = {
    **dict.fromkeys((*_GENERATING, *_TEXT), "POST"),
    **dict.fromkeys(_INFORMS, "GET"),
}
GENERATES = frozenset(_GENERATING)
# Calls that name every tensor of a model.
_NAMING = frozenset(("/update_weights", "/update_weights_from_distributed", "/areal_set_update_weight_meta"))
_WRITES = (
    *("/update_weights_from_tensor", "/update_weights_from_ipc", "/load_lora_adapter_from_tensors"),
    *("/weights_checker", "/weight_checker", "/collective_rpc", "/start_draft_weight_update"),
    *("/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance"),
    *("/areal_set_update_weight_meta_lora", "/areal_update_weights_lora_xccl", "/areal_update_weights_lora"),
)
_OFFLOADS = ("/release_memory_occupation", "/resume_memory_occupation", "/sleep", "/wake_up")
# Why a route is refused.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        _WRITES,
        "would change the engine behind refitd, or carries a pickle, which is never loaded here: have the trainer "
        "update by disk, or by broadcast",
    ),
    **dict.fromkeys(
        _OFFLOADS,
        "is not carried through: refitd loads weights when there are any, also into memory that was given back. Start "
        "the engine with its own share of the GPU (mem_fraction_static, vLLM's gpu_memory_utilization), and leave "
        "AReaL's scheduling_strategy at separation",
    ),
}
CLOSE_SECONDS = 5
# A trainer has a connection for each rollout.
PATIENCE = Patience(slots=ConnectionSlots(all=2048, peer=1024, health=16))
Say = Callable[[str, str], None]
HEALTH = frozenset({"/health", "/ping"})  # orchestrators ask these, without a token
MAX_GENERATE_BYTES = 32 * 2**20  # a prompt may hold images, and a call names all tensors of a model
MEMORY = BodyMemory(most=2**30)  # for the bodies of all addresses of the process

log = structlog.get_logger("refitd")


class Front:
    """One address of the front.

    Args:
        name: what calls to this address are told apart by, where a trainer calls each of its engines.
        tokens: open the address.
        has_key: whether requests carry a key of the front's own, which what a server says of itself would tell.
    """

    def __init__(
        self,
        name: str,
        engines: RequestTargets,
        versions: Versions,
        sessions: Sessions,
        *,
        tokens: FrontTokens,
        has_key: bool,
    ) -> None:
        self.engines = engines
        self._passed = PASSED if has_key else {**PASSED, **dict.fromkeys(_TELLING_KEYS, "GET")}
        self._gate = PauseGate(name, lambda: versions.under_way > 0 or sessions.is_under_way)
        keeper = Gatekeeper(self._gate, engines)
        self._sglang = SglangCalls(name, sessions, versions, keeper)
        self._vllm = VllmCalls(name, sessions, versions, keeper)
        self._door = auth.Door(
            tokens=tokens.read,
            in_files=tokens.file is not None,
            open=HEALTH,
            as_password=True,  # trainers send credentials where their engines' addresses have some, and no header
        )

    def app(self) -> Starlette:
        large = [Middleware(RequestLimit, most=MAX_GENERATE_BYTES, is_read=False, memory=MEMORY)]
        small = [Middleware(RequestLimit, is_read=False)]
        calls = {**self._sglang.routes(), **self._vllm.routes()}
        looks = {**self._sglang.looks(), **self._vllm.looks()}
        routes = [
            *(
                Route(path, call, methods=["POST"], middleware=large if path in _NAMING else small)
                for path, call in calls.items()
            ),
            *(Route(path, call, methods=["GET"]) for path, call in looks.items()),
            *(Route(path, _refuse, methods=METHODS) for path in REFUSED),
            *(Route(path, self._through, methods=[method], middleware=large) for path, method in self._passed.items()),
            *(Route(abort.route, self._to_all, methods=["POST"], middleware=large) for abort in ABORTS.values()),
        ]
        app = Starlette(
            routes=routes,
            middleware=[Middleware(PlainPath), Middleware(auth.Gate, door=self._door)],
            exception_handlers={404: _no_route},
        )
        app.router.redirect_slashes = False
        return app

    async def aclose(self) -> None:
        self._gate.open()
        await self.engines.aclose()

    async def _through(self, request: Request) -> Response:
        async with AsyncExitStack() as stack:
            if request.scope["path"] in GENERATES:
                await stack.enter_async_context(self._gate.passing())
            try:
                engine = await self.engines.choose()
            except NoEngineError as error:
                return JSONResponse({"error": {"message": str(error)}}, status_code=503, headers={"Retry-After": "1"})
            held = stack.pop_all()
        return await engine.answer(request, held)

    async def _to_all(self, request: Request) -> Response:
        """Pass a request on to each engine: nobody but the client knows which one has what is to be aborted."""
        replies = [await engine.answer(request, AsyncExitStack(), ends=True) for engine, _ in self.engines.all()]
        return next(iter(replies), Response(status_code=503))


async def _refuse(request: Request) -> Response:
    path = request.scope["path"]
    return JSONResponse({"success": False, "message": f"{path} {REFUSED[path]}"}, status_code=409)


async def _no_route(request: Request, _: Exception) -> Response:
    detail = f"the front passes on {', '.join(PASSED)} alone: ask the engine itself for anything else"
    return answer(ProblemError(Slug.NOT_FOUND, detail), request.scope)


def is_plain(path: bytes) -> bool:
    """Return whether a path, as sent, is its own normal form: without escapes, dot segments or empty segments."""
    return _PLAIN.fullmatch(path) is not None


class PlainPath:
    """ASGI middleware that answers 400 where the path is not plain.

    The front decides by the path of a request. Where an HTTP library or the engine reads the same path differently
    (`/./x`, `/a/../x`, `//x`, `/%78`, `/a\\x`, `http://host/x`), the decision is about another route than the one that
    is called.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_plain(scope["raw_path"]):
            detail = "write the path plainly: no '.' or '..', no '//', no '%' or '\\' in it, and no host before it"
            problem = ProblemError(Slug.BAD_PATH, detail)
            await answer(problem, scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _Server(BoundedServer):
    close_seconds = CLOSE_SECONDS

    def __init__(self, name: str, app: Starlette, host: str, port: int, say: Say) -> None:
        super().__init__(app, host, port, patience=PATIENCE, health=HEALTH)
        self._name = name
        self._say = say

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    def listens(self, url: str) -> None:
        self._say(self._name, url)


def allow_many_connections() -> None:
    """Raise the limit of file descriptors as far as the system allows: each request needs two."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def serve_fronts(
    fronts: Mapping[str, tuple[Front, str, int]], versions: Versions, sessions: Sessions, say: Say
) -> None:
    """Serve each address, until SIGTERM or SIGINT. Versions and sessions are closed at the end.

    Args:
        fronts: by name, with the host and port that each listens on.
        say: is called with the name and the URL of each that listens.
    """
    servers = [_Server(name, front.app(), host, port, say) for name, (front, host, port) in fronts.items()]
    looks = [front.engines.keep_looking for front, *_ in fronts.values() if isinstance(front.engines, RunEngines)]
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        async with asyncio.TaskGroup() as group:
            looking = [group.create_task(look()) for look in looks]
            running = [group.create_task(server.serve()) for server in servers]
            await stop.wait()
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*running)
            for task in looking:
                task.cancel()
    finally:
        await sessions.aclose()
        versions.close()
        for front, *_ in fronts.values():
            await front.aclose()
