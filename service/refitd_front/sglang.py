"""SGLang's routes for weights, as slime, miles, verl, NeMo-RL and AReaL call them; and those of AReaL's vLLM server.

AReaL's server has the routes of SGLang by other names, which stand on the right.

/pause_generation                        begins an update; requests are held back at the front
                                           /areal_pause_generation
/begin_weight_update                     begins an update
/update_weights_from_disk                the folder becomes a version; answered when engines serve it
                                           /areal_update_weights
/load_lora_adapter                       likewise, where versions are adapters
                                           /v1/load_lora_adapter
/unload_lora_adapter                     done: refitd unloads adapters that are not used any more
/init_weights_update_group               the trainer's group is joined in the engines' places
                                           /areal_init_weights_update_group
/update_weights_from_distributed         tensors are received in the engines' places
                                           /areal_set_update_weight_meta, /areal_update_weights_xccl
/destroy_weights_update_group            the group is left
/pull_weights                            slime's and miles': names the folder that a later load is about
/post_process_weights                    done: an engine that loads a version quantises it by itself
/end_weight_update                       what was received becomes a version that engines serve
/continue_generation                     likewise, and requests are let through
                                           /areal_continue_generation
/flush_cache                             done: an engine that loads a version keeps nothing of the one before
"""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from refitd_client.contract.decoding import from_json
from refitd_front.assembly import PartRefusedError, UpdatePart, sent_part
from refitd_front.members import MOST_RANKS, TrainerGroup
from refitd_front.pausing import Gatekeeper
from refitd_front.sessions import Sessions
from refitd_front.versions import Versions

Handler = Callable[[Request], Awaitable[Response]]
UNREADABLE = (ValueError, msgspec.MsgspecError, RecursionError)
"""What reading a call's body raises, where it is none."""
_FILES = frozenset({None, "auto", "safetensors"})
_Selector = Literal["all", "target"]
"""The models that tensors are of. A version is a whole model: one of a draft model alone is none."""


class _Update(msgspec.Struct, frozen=True):
    model_path: str
    weight_version: str | None = None
    load_format: str | None = None


class _LoadAdapter(msgspec.Struct, frozen=True):
    lora_path: str


class _Pull(msgspec.Struct, frozen=True):
    local_checkpoint_dir: str
    source_dir: str
    target_version: int


class _Pause(msgspec.Struct, frozen=True):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class _Begin(msgspec.Struct, frozen=True):
    selector: _Selector = "all"


class _Group(msgspec.Struct, frozen=True):
    group_name: str = "weight_update_group"


class _Init(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's, and AReaL 1.0's `build_init_weights_group_request`. `pp_rank`: the engines' stage that it is for."""

    master_address: str
    master_port: int | str
    rank_offset: int
    world_size: int
    backend: str = "nccl"
    group_name: str = "weight_update_group"
    pp_rank: int = 0


class _Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's, and AReaL 1.0's `build_distributed_weight_update_requests`, without adapters."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = None
    weight_version: str | None = None
    selector: _Selector = "all"


class SglangCalls:
    """The calls to one address. `engine` is its name."""

    def __init__(self, engine: str, sessions: Sessions, versions: Versions, gate: Gatekeeper) -> None:
        self._engine = engine
        self._sessions = sessions
        self._versions = versions
        self._gate = gate
        self._named: tuple[UpdatePart, str | None] | None = None  # by the call before the one that takes it
        self._pulled: tuple[str, Path] | None = None

    def routes(self) -> Mapping[str, Handler]:
        """Return what answers each path."""
        named = {
            self._pause: ("/pause_generation", "/areal_pause_generation"),
            self._continue: ("/continue_generation", "/areal_continue_generation"),
            self._begin: ("/begin_weight_update",),
            self._end: ("/end_weight_update",),
            self._update: ("/update_weights_from_disk", "/areal_update_weights"),
            self._load_adapter: ("/load_lora_adapter", "/v1/load_lora_adapter"),
            self._unload_adapter: ("/unload_lora_adapter", "/v1/unload_lora_adapter"),
            self._init_group: ("/init_weights_update_group", "/areal_init_weights_update_group"),
            self._destroy_group: ("/destroy_weights_update_group",),
            self._take: ("/update_weights_from_distributed",),
            self._name: ("/areal_set_update_weight_meta",),
            self._take_named: ("/areal_update_weights_xccl",),
            self._pull: ("/pull_weights",),
            self._quantise: ("/post_process_weights",),
            self._flush: ("/flush_cache",),
        }
        return {path: handler for handler, paths in named.items() for path in paths}

    def looks(self) -> Mapping[str, Handler]:
        """Return what answers each path by GET, as all these trainers flush."""
        return {"/flush_cache": self._flush}

    async def _pause(self, request: Request) -> Response:
        try:
            how = from_json(await request.body() or b"{}", _Pause)
        except UNREADABLE as error:
            return _said(f"not paused: {error}")
        self._sessions.begin()
        if (fault := await self._gate.pause(aborts=how.mode == "abort")) is not None:
            return JSONResponse({"message": f"not paused: {fault}"}, status_code=503)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _: Request) -> Response:
        fault = await self._sessions.finish()
        self._gate.resume()  # also after a fault: the engine has the weights of before
        if fault is not None:
            return JSONResponse({"message": f"generation goes on with the weights of before: {fault}"}, status_code=400)
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _begin(self, request: Request) -> Response:
        try:
            from_json(await request.body() or b"{}", _Begin)
        except UNREADABLE as error:
            return _said(f"no update has begun: {error}")
        self._sessions.begin()
        return _said(None)

    async def _end(self, _: Request) -> Response:
        return _said(await self._sessions.finish(expected=True))

    async def _update(self, request: Request) -> Response:
        try:
            call = from_json(await request.body(), _Update)
        except UNREADABLE:
            fault: str | None = "the body is no JSON object with model_path"
        else:
            fault = await self._loaded(call)
        content: dict[str, Any] = {"success": fault is None, "num_paused_requests": 0}
        message = "Succeeded to update model weights." if fault is None else fault
        return JSONResponse({**content, "message": message}, status_code=200 if fault is None else 400)

    async def _loaded(self, call: _Update) -> str | None:
        if call.load_format not in _FILES:
            return f"load_format is {call.load_format}, and engines get a version as safetensors: leave it out"
        local, pulled = self._pulled or ("", Path())
        path = pulled if call.model_path == local else Path(call.model_path)
        return await self._versions.serve(path, call.weight_version)

    async def _load_adapter(self, request: Request) -> Response:
        try:
            path = Path(from_json(await request.body(), _LoadAdapter).lora_path)
        except UNREADABLE:
            fault: str | None = "the body is no JSON object with lora_path"
        else:
            fault = await self._versions.serve(path)
        content: dict[str, Any] = {"success": fault is None, "error_message": fault, "loaded_adapters": {}}
        return JSONResponse(content, status_code=200 if fault is None else 400)

    async def _unload_adapter(self, _: Request) -> Response:
        return JSONResponse({"success": True, "error_message": None, "loaded_adapters": {}})

    async def _pull(self, request: Request) -> Response:
        """Remember which folder is meant: each engine's host would copy it to the local folder, and load that.

        Version 0 is what the engines were started with. A trainer that pulls it begins.
        """
        try:
            call = from_json(await request.body(), _Pull)
            folder = Path(call.source_dir) / f"weight_v{call.target_version:06d}"
            if call.target_version:
                await self._versions.look(folder)
        except UNREADABLE as error:
            return _said(f"the weights cannot be pulled: {error}")
        if call.target_version:
            self._pulled = call.local_checkpoint_dir, folder
        else:
            self._versions.begin_anew()
        return _said(None)

    async def _quantise(self, _: Request) -> Response:
        return _said(None)

    async def _flush(self, _: Request) -> Response:
        return JSONResponse({"message": "Cache flushed: an engine keeps nothing of the version before."})

    async def _init_group(self, request: Request) -> Response:
        try:
            call = from_json(await request.body(), _Init)
            group = announced_group(call)
        except UNREADABLE as error:
            return _said(f"the group cannot be joined: {error}")
        # A group for each stage of the engines' pipelines gets all tensors: one of them is enough.
        kept = call.pp_rank == 0
        return _said(await self._sessions.join(self._engine, group, call.rank_offset, kept=kept))

    async def _destroy_group(self, request: Request) -> Response:
        try:
            call = from_json(await request.body() or b"{}", _Group)
        except UNREADABLE as error:
            return _said(f"the group cannot be left: {error}")
        await self._sessions.leave(call.group_name)
        return _said(None)

    async def _take(self, request: Request) -> Response:
        fault = await self._name_bucket(request)
        return await self._take_named(request) if fault is None else _said(fault)

    async def _name(self, request: Request) -> Response:
        return _said(await self._name_bucket(request))

    async def _name_bucket(self, request: Request) -> str | None:
        try:
            call = from_json(await request.body(), _Bucket)
            if call.load_format not in {None, "auto", "flattened_bucket"}:
                raise PartRefusedError(f"its load_format is {call.load_format}, and only flattened_bucket is one")
            is_flat = call.load_format == "flattened_bucket"
            part = sent_part(call.group_name, call.names, call.dtypes, call.shapes, is_flat=is_flat)
        except UNREADABLE as error:
            return f"the bucket cannot be taken: {error}"
        self._named = part, call.weight_version
        return None

    async def _take_named(self, _: Request) -> Response:
        named, self._named = self._named, None
        if named is None:
            return _said("the bucket cannot be taken: /areal_set_update_weight_meta has to name its tensors first")
        part, label = named
        fault = await self._sessions.bucket(self._engine, part)
        if fault is None and label is not None:
            self._sessions.name(label)
        return _said(fault)


def announced_group(call: _Init) -> TrainerGroup:
    """The group that a call announces.

    Raises:
        ValueError: it is none that can be joined.
    """
    if call.backend not in {"gloo", "nccl"}:
        raise ValueError(f"its backend is {call.backend}, and only gloo and nccl are: have the trainer update by disk")
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
