"""vLLM's weight transfer, as its trainer classes and `HTTPVLLMWeightSyncClient` call it (0.29 to 0.33).

/init_weight_transfer_engine      the trainer's group is joined in the workers' places; nothing to do for disk
/start_weight_update              begins an update
/update_weights                   a folder (`path`), tensors of the group, patches, or handles of GPU memory
/finish_weight_update             what has come is one version; answered when engines serve it
/shutdown_weight_transfer_engine  the group is left
/get_world_size                   1: the front stands for all engines of the run
/weight_info                      the `weight_version` that the engines serve
/update_weight_version            done where this is the version that the engines serve
/pause, /resume                   requests are held back at the front, and let through
/is_paused                        whether they are held back
/reset_prefix_cache               done: an engine that loads a version keeps nothing of the one before
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from refitd_client.contract.decoding import from_json
from refitd_front.assembly import sent_part
from refitd_front.handles import read_handles
from refitd_front.members import MOST_RANKS, TrainerGroup
from refitd_front.pausing import Gatekeeper
from refitd_front.sessions import Sessions
from refitd_front.sglang import UNREADABLE, Handler
from refitd_front.versions import Versions

GROUP = "vllm"
"""The name of the trainer's group here: vLLM's has none."""
_BACKENDS = "disk, nccl, sparse_nccl and ipc are taken here"


class _InitInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The init info of every backend that is taken: NCCL's two, `ipc` (`packed` alone) and `disk` (nothing)."""

    master_address: str | None = None
    master_port: int | None = None
    nccl_unique_id_b64: str | None = None
    rank_offset: int = 1
    world_size: int | None = None
    packed: bool = False
    packed_buffer_size_bytes: int = 2**30
    packed_num_buffers: int = 2


class _Init(msgspec.Struct, frozen=True):
    init_info: msgspec.Raw


class _UpdateInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The update info of every backend that is taken."""

    path: str | None = None
    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    num_updates_list: list[int] | None = None
    ipc_handles: Any = None
    ipc_handles_pickled: str | None = None
    tensor_sizes: list[int] | None = None


class _Update(msgspec.Struct, frozen=True):
    update_info: msgspec.Raw


class _Finish(msgspec.Struct, frozen=True):
    weight_version: str | None = None


class _Rename(msgspec.Struct, frozen=True):
    new_version: str


class VllmCalls:
    """The calls to one address. `engine` is its name."""

    def __init__(self, engine: str, sessions: Sessions, versions: Versions, gate: Gatekeeper) -> None:
        self._engine = engine
        self._sessions = sessions
        self._versions = versions
        self._gate = gate

    def routes(self) -> Mapping[str, Handler]:
        """Return what answers each path by POST."""
        return {
            "/init_weight_transfer_engine": self._init,
            "/start_weight_update": self._start,
            "/update_weights": self._update,
            "/finish_weight_update": self._finish,
            "/shutdown_weight_transfer_engine": self._shutdown,
            "/update_weight_version": self._rename,
            "/pause": self._pause,
            "/resume": self._resume,
            "/reset_prefix_cache": self._flush,
        }

    def looks(self) -> Mapping[str, Handler]:
        """Return what answers each path by GET."""
        return {"/get_world_size": self._world_size, "/weight_info": self._info, "/is_paused": self._is_paused}

    async def _init(self, request: Request) -> Response:
        try:
            info = from_json(from_json(await request.body(), _Init).init_info, _InitInfo)
            group = announced_group(info)
        except UNREADABLE as error:
            return _said(f"the weight transfer cannot be initialised: {error} ({_BACKENDS})", "")
        if group is None:
            self._versions.begin_anew()
            return _said(None, "Weight transfer initialized")
        fault = await self._sessions.join(self._engine, group, info.rank_offset)
        return _said(fault, "Weight transfer initialized")

    async def _start(self, _: Request) -> Response:
        self._sessions.begin()
        return _said(None, "Weight update started")

    async def _update(self, request: Request) -> Response:
        try:
            info = from_json(from_json(await request.body(), _Update).update_info, _UpdateInfo)
            fault = await self._taken(info)
        except UNREADABLE as error:
            fault = f"the update cannot be taken: {error} ({_BACKENDS})"
        return _said(fault, "Weights updated")

    async def _taken(self, info: _UpdateInfo) -> str | None:
        if info.path is not None:
            return self._sessions.folder(Path(info.path))
        handles = None
        if info.ipc_handles is not None:
            raise ValueError("ipc_handles cannot come over HTTP: vLLM's client sends ipc_handles_pickled")
        if info.ipc_handles_pickled is not None:
            handles = await asyncio.to_thread(read_handles, info.ipc_handles_pickled, info.tensor_sizes)
        part = sent_part(
            GROUP, info.names, info.dtype_names, info.shapes, counts=info.num_updates_list, handles=handles
        )
        return await self._sessions.bucket(self._engine, part)

    async def _finish(self, request: Request) -> Response:
        try:
            label = from_json(await request.body() or b"{}", _Finish).weight_version
        except UNREADABLE as error:
            return _said(f"the update is not finished: {error}", "")
        if label is not None:
            self._sessions.name(label)
        return _said(await self._sessions.finish(expected=True), "Weight update finished")

    async def _shutdown(self, _: Request) -> Response:
        await self._sessions.leave(GROUP)
        return _said(None, "Weight transfer shut down")

    async def _rename(self, request: Request) -> Response:
        try:
            name = from_json(await request.body(), _Rename).new_version
        except UNREADABLE as error:
            return _said(f"the version is not named: {error}", "")
        if name == self._versions.served:
            return JSONResponse({"success": True, "message": "Weight version updated", "new_version": name})
        fault = (
            f"engines serve {self._versions.served or 'no version of this front'}, and a version keeps its name: give "
            "weight_version with the update (/finish_weight_update, /update_weights_from_disk)"
        )
        return JSONResponse({"success": False, "message": fault, **_error(fault)}, status_code=400)

    async def _world_size(self, _: Request) -> Response:
        return JSONResponse({"world_size": 1})

    async def _info(self, _: Request) -> Response:
        return JSONResponse({"weight_version": self._versions.served or "default"})

    async def _pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in {"abort", "wait", "keep"}:
            return _said(f"not paused: mode is {mode}, and abort, wait and keep are modes", "")
        if (fault := await self._gate.pause(aborts=mode == "abort", waits=mode == "wait")) is not None:
            return JSONResponse(_error(f"not paused: {fault}"), status_code=503)
        return JSONResponse({"status": "paused"})

    async def _resume(self, _: Request) -> Response:
        self._gate.resume()
        return JSONResponse({"status": "resumed"})

    async def _is_paused(self, _: Request) -> Response:
        return JSONResponse({"is_paused": self._gate.is_paused})

    async def _flush(self, _: Request) -> Response:
        return JSONResponse({"success": True})


def announced_group(info: _InitInfo) -> TrainerGroup | None:
    """The group that an init info announces; None where weights come without one.

    Raises:
        ValueError: it is none that can be joined.
    """
    if info.world_size is None:
        return None
    if not 1 <= info.world_size - 1 <= MOST_RANKS:
        raise ValueError(f"its group has {info.world_size} ranks, and between 2 and {MOST_RANKS + 1} can be")
    has_address = info.master_address is not None and info.master_port is not None
    if has_address == (info.nccl_unique_id_b64 is not None):
        raise ValueError("it names either master_address and master_port, or nccl_unique_id_b64")
    return TrainerGroup(
        name=GROUP,
        address=info.master_address or "",
        port=info.master_port or 0,
        ranks=info.world_size - 1,
        backend="vllm",
        chunk=info.packed_buffer_size_bytes if info.packed else 0,
        unique_id=info.nccl_unique_id_b64 or "",
    )


def _error(message: str) -> dict[str, Any]:
    """As vLLM's own errors."""
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}


def _said(fault: str | None, message: str) -> Response:
    return JSONResponse({"message": message}) if fault is None else JSONResponse(_error(fault), status_code=400)
