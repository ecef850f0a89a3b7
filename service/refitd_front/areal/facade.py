"""An engine as AReaL sees it: the routes of SGLang, and those of AReaL's own vLLM server, on a port of its own, with
refitd as the only writer of weights. The routes of vLLM's that have another name stand on the right.

/generate, /v1/completions, … (PASSED)   to the engine and back, untouched, as a stream
/pause_generation                        the facade's gate: running requests are aborted, new ones wait
                                           /areal_pause_generation
/update_weights_from_disk                the folder becomes a version; answered when engines serve it
                                           /areal_update_weights
/load_lora_adapter                       likewise, where versions are adapters
                                           /v1/load_lora_adapter
/unload_lora_adapter                     done: refitd unloads adapters that are not used any more
/init_weights_update_group               the trainer's group is joined in the engine's place (`group_calls.py`)
                                           /areal_init_weights_update_group
/update_weights_from_distributed         the tensors are received in the engine's place
                                           /areal_set_update_weight_meta, /areal_update_weights_xccl
/continue_generation                     what was received becomes a version that engines serve, and the gate opens
                                           /areal_continue_generation
other routes that write weights          refused: they would change the engine behind refitd's back
/release_…, /resume_memory_occupation    refused: AReaL calls them where trainer and engine take turns on their GPUs
                                           /sleep, /wake_up
any other path                           404: the facade passes on no route that it does not name

Requests have a plain path, are within the limits and, where the facade has a token, carry it, as with the service.
"""

import asyncio
import re
import resource
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
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
from refitd.engine.http import Key, KeyRefusedError
from refitd.memory import BodyMemory
from refitd.problem import ProblemError, Slug
from refitd.tokens import FacadeTokens
from refitd_client.contract.decoding import from_json
from refitd_front.areal.assembly import BucketKey, BucketRefusedError, bucket_key
from refitd_front.areal.group_calls import GroupCalls
from refitd_front.areal.members import MOST_RANKS, TrainerGroup
from refitd_front.areal.passing import ABORTS, GENERATES, PASSED, Abort, EngineProxy, PauseGate
from refitd_front.areal.updates import Updates

_PATH_SEGMENT = rb"(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+"
_PLAIN = re.compile(rb"/(?:%b(?:/%b)*)?" % (_PATH_SEGMENT, _PATH_SEGMENT))
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]
_WRITES = (
    *("/update_weights_from_tensor", "/update_weights_from_ipc"),
    *("/destroy_weights_update_group", "/begin_weight_update", "/end_weight_update"),
    *("/update_weight_version", "/load_lora_adapter_from_tensors", "/weights_checker"),
    *("/areal_set_update_weight_meta_lora", "/areal_update_weights_lora_xccl", "/areal_update_weights_lora"),
)
_OFFLOADS = ("/release_memory_occupation", "/resume_memory_occupation", "/sleep", "/wake_up")
# Why a route is refused.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        _WRITES,
        "would change the engine behind refitd, which is the only one that writes its weights: set AReaL's "
        "weight_update_mode to disk",
    ),
    **dict.fromkeys(
        _OFFLOADS,
        "is not carried through: refitd loads weights when there are any, also into memory that was given back. Start "
        "the engine outside AReaL, with its own share of the GPU (mem_fraction_static, vLLM's gpu_memory_utilization), "
        "and leave scheduling_strategy at separation",
    ),
}
CLOSE_SECONDS = 5
# A trainer has a connection for each rollout.
PATIENCE = Patience(slots=ConnectionSlots(all=2048, peer=1024, health=16))
Say = Callable[[str, str], None]
HEALTH = frozenset({"/health", "/ping"})  # orchestrators ask these, without a token
DRAIN_SECONDS = 30.0
PAUSE_AGAIN_SECONDS = 0.5
MAX_GENERATE_BYTES = 32 * 2**20  # a prompt may hold images
MEMORY = BodyMemory(most=2**30)  # for the bodies of all facades of the process

log = structlog.get_logger("refitd")


class _Update(msgspec.Struct, frozen=True):
    model_path: str


class _LoadAdapter(msgspec.Struct, frozen=True):
    lora_path: str


class _Init(msgspec.Struct, frozen=True, kw_only=True):
    """AReaL 1.0's `build_init_weights_group_request`. `pp_rank`: the engines' stage that the group is for."""

    master_address: str
    master_port: int | str
    rank_offset: int
    world_size: int
    backend: str
    group_name: str
    pp_rank: int = 0


class _Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """AReaL 1.0's `build_distributed_weight_update_requests`, without adapters."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str


class Facade:
    """The facade of one engine. `tokens` open the facade itself; the keys are files, and open the engine."""

    def __init__(
        self,
        engine: str,
        updates: Updates,
        groups: GroupCalls,
        *,
        api_key: Path | None,
        admin_key: Path | None,
        tokens: FacadeTokens,
    ) -> None:
        self._url = engine
        self._updates = updates
        self._groups = groups
        self._named: BucketKey | None = None  # by the call before the one that takes it
        self._gate = PauseGate(engine, lambda: updates.under_way > 0 or groups.is_under_way)
        self._changes = Key(admin_key or api_key)
        reads = None if api_key is None else Key(api_key)
        self._engine = EngineProxy(engine, reads=reads, takes_callers=not tokens.are_set)
        self._door = auth.Door(
            tokens=tokens.read,
            in_files=tokens.file is not None,
            open=HEALTH,
            as_password=True,  # AReaL sends credentials where its engines' addresses have some, and no header
        )

    def app(self) -> Starlette:
        small = [Middleware(RequestLimit)]
        large = [Middleware(RequestLimit, most=MAX_GENERATE_BYTES, is_read=False, memory=MEMORY)]
        own = {
            **dict.fromkeys(ABORTS, self._pause),
            **dict.fromkeys(("/continue_generation", "/areal_continue_generation"), self._continue),
            **dict.fromkeys(("/update_weights_from_disk", "/areal_update_weights"), self._update),
            **dict.fromkeys(("/load_lora_adapter", "/v1/load_lora_adapter"), self._load_adapter),
            "/unload_lora_adapter": self._unload_adapter,
        }
        of_groups = {
            **dict.fromkeys(("/init_weights_update_group", "/areal_init_weights_update_group"), self._init_group),
            "/update_weights_from_distributed": self._take,
            "/areal_set_update_weight_meta": self._name,
            "/areal_update_weights_xccl": self._take_named,
        }
        named = [Middleware(RequestLimit, most=MAX_GENERATE_BYTES, memory=MEMORY)]
        routes = [
            *(Route(path, call, methods=["POST"], middleware=small) for path, call in own.items()),
            *(Route(path, call, methods=["POST"], middleware=named) for path, call in of_groups.items()),
            *(Route(path, _refuse, methods=METHODS) for path in REFUSED),
            *(Route(path, self._through, methods=[method], middleware=large) for path, method in PASSED.items()),
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
        await self._engine.aclose()

    async def _pause(self, request: Request) -> Response:
        self._gate.close()
        self._groups.begin()
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._end_all(ABORTS[request.scope["path"]])
        except (httpx.HTTPError, KeyRefusedError, TimeoutError) as error:
            self._gate.open()  # the trainer hears that nothing is paused, and so nothing is
            log.error("AReaL's pause failed", engine=self._url, error=str(error) or "requests still run")
            return JSONResponse({"message": f"not paused: {error or 'requests still run'}"}, status_code=503)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _end_all(self, abort: Abort) -> None:
        """Abort what runs, again and again: a request may have been on its way to the engine the first time."""
        while not self._gate.is_idle:
            await self._engine.end_all(abort, self._changes)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gate.idle(), PAUSE_AGAIN_SECONDS)

    async def _continue(self, _: Request) -> Response:
        fault = await self._groups.finish()
        self._gate.open()  # also after a fault: the engine has the weights of before
        if fault is not None:
            return JSONResponse({"message": f"generation goes on with the weights of before: {fault}"}, status_code=400)
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _update(self, request: Request) -> Response:
        fault = await self._served(request, _Update, "model_path")
        content: dict[str, Any] = {"success": fault is None, "num_paused_requests": 0}
        message = "Succeeded to update model weights." if fault is None else fault
        return JSONResponse({**content, "message": message}, status_code=200 if fault is None else 400)

    async def _load_adapter(self, request: Request) -> Response:
        fault = await self._served(request, _LoadAdapter, "lora_path")
        content: dict[str, Any] = {"success": fault is None, "error_message": fault, "loaded_adapters": {}}
        return JSONResponse(content, status_code=200 if fault is None else 400)

    async def _unload_adapter(self, _: Request) -> Response:
        return JSONResponse({"success": True, "error_message": None, "loaded_adapters": {}})

    async def _served(self, request: Request, form: type[msgspec.Struct], key: str) -> str | None:
        try:
            path = Path(getattr(from_json(await request.body(), form), key))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return f"the body is no JSON object with {key}"
        if not path.is_absolute():
            return f"{key} {str(path)!r} is no absolute path: the engine and refitd may start from different folders"
        return await self._updates.serve(path)

    async def _init_group(self, request: Request) -> Response:
        try:
            call = from_json(await request.body(), _Init)
            group = announced_group(call)
        except (ValueError, msgspec.MsgspecError) as error:
            return _said(f"the group cannot be joined: {error}")
        # A group for each stage of the engines' pipelines gets all tensors: one of them is enough.
        kept = call.pp_rank == 0
        return _said(await self._groups.init(self._url, group, call.rank_offset, kept=kept))

    async def _take(self, request: Request) -> Response:
        fault = await self._name_bucket(request)
        return await self._take_named(request) if fault is None else _said(fault)

    async def _name(self, request: Request) -> Response:
        return _said(await self._name_bucket(request))

    async def _name_bucket(self, request: Request) -> str | None:
        try:
            call = from_json(await request.body(), _Bucket)
            self._named = bucket_key(call.group_name, call.names, call.dtypes, call.shapes)
        except (BucketRefusedError, msgspec.MsgspecError) as error:
            return f"the bucket cannot be taken: {error}"
        return None

    async def _take_named(self, _: Request) -> Response:
        key, self._named = self._named, None
        if key is None:
            return _said("the bucket cannot be taken: /areal_set_update_weight_meta has to name its tensors first")
        return _said(await self._groups.bucket(self._url, key))

    async def _through(self, request: Request) -> Response:
        async with AsyncExitStack() as stack:
            if request.scope["path"] in GENERATES:
                await stack.enter_async_context(self._gate.passing())
            held = stack.pop_all()
        return await self._engine.answer(request, held)


async def _refuse(request: Request) -> Response:
    path = request.scope["path"]
    return JSONResponse({"success": False, "message": f"{path} {REFUSED[path]}"}, status_code=409)


async def _no_route(request: Request, _: Exception) -> Response:
    detail = f"a facade passes on {', '.join(PASSED)} alone: ask the engine itself for anything else"
    return answer(ProblemError(Slug.NOT_FOUND, detail), request.scope)


def announced_group(call: _Init) -> TrainerGroup:
    """The group that a call announces.

    Raises:
        ValueError: it is none that can be joined.
    """
    if call.backend not in {"gloo", "nccl"}:
        raise ValueError(f"its backend is {call.backend}, and only gloo and nccl are: set weight_update_mode to disk")
    if not 1 <= call.world_size - 1 <= MOST_RANKS:
        raise ValueError(f"it has {call.world_size} ranks, and between 2 and {MOST_RANKS + 1} can be")
    return TrainerGroup(
        name=call.group_name,
        address=call.master_address,
        port=int(call.master_port),
        ranks=call.world_size - 1,
        backend="nccl" if call.backend == "nccl" else "gloo",
    )


def _said(fault: str | None) -> Response:
    message = "Succeeded." if fault is None else fault
    return JSONResponse({"success": fault is None, "message": message}, status_code=200 if fault is None else 400)


def is_plain(path: bytes) -> bool:
    """Return whether a path, as sent, is its own normal form: without escapes, dot segments or empty segments."""
    return _PLAIN.fullmatch(path) is not None


class PlainPath:
    """ASGI middleware that answers 400 where the path is not plain.

    A facade decides by the path of a request. Where an HTTP library or the engine reads the same path differently
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

    def __init__(self, engine: str, app: Starlette, host: str, port: int, say: Say) -> None:
        super().__init__(app, host, port, patience=PATIENCE, health=HEALTH)
        self._engine = engine
        self._say = say

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    def listens(self, url: str) -> None:
        self._say(self._engine, url)


def allow_many_connections() -> None:
    """Raise the limit of file descriptors as far as the system allows: each request needs two."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def serve_facades(
    facades: Mapping[str, tuple[Facade, int]], host: str, updates: Updates, groups: GroupCalls, say: Say
) -> None:
    """Serve each engine's facade on its port, until SIGTERM or SIGINT. Updates and groups are closed at the end.

    Args:
        facades: by the engine's URL, with the facade's port.
        say: is called with the engine and the facade's URL for each facade that listens.
    """
    servers = [_Server(engine, facade.app(), host, port, say) for engine, (facade, port) in facades.items()]
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(server.serve()) for server in servers]
            await stop.wait()
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*running)
    finally:
        await groups.aclose()
        updates.close()
        for facade, _ in facades.values():
            await facade.aclose()
