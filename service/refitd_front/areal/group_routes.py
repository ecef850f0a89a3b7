"""The routes of AReaL's group calls at one engine's facade: their bodies, and what AReaL hears.

AReaL's client for SGLang names a bucket's tensors in the call that takes it; its client for vLLM in a call before that.
"""

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from refitd_client.contract.decoding import from_json
from refitd_front.areal.assembly import BucketKey, BucketRefusedError, bucket_key
from refitd_front.areal.group_calls import GroupCalls
from refitd_front.areal.members import MOST_RANKS, TrainerGroup

Call = Callable[[Request], Awaitable[Response]]


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


class GroupRoutes:
    """The group calls at one engine's facade. `calls` are their handlers, by path."""

    def __init__(self, engine: str, groups: GroupCalls) -> None:
        self._engine = engine
        self._groups = groups
        self._named: BucketKey | None = None
        self.calls: Mapping[str, Call] = {
            **dict.fromkeys(("/init_weights_update_group", "/areal_init_weights_update_group"), self._init),
            "/update_weights_from_distributed": self._take,
            "/areal_set_update_weight_meta": self._name,
            "/areal_update_weights_xccl": self._take_named,
        }

    async def _init(self, request: Request) -> Response:
        try:
            call = from_json(await request.body(), _Init)
            group = announced_group(call)
        except (ValueError, msgspec.MsgspecError) as error:
            return _said(f"the group cannot be joined: {error}")
        # A group for each stage of the engines' pipelines gets all tensors: one of them is enough.
        kept = call.pp_rank == 0
        return _said(await self._groups.init(self._engine, group, call.rank_offset, kept=kept))

    async def _take(self, request: Request) -> Response:
        try:
            key = _key(await request.body())
        except (BucketRefusedError, msgspec.MsgspecError) as error:
            return _said(f"the bucket cannot be taken: {error}")
        return _said(await self._groups.bucket(self._engine, key))

    async def _name(self, request: Request) -> Response:
        try:
            self._named = _key(await request.body())
        except (BucketRefusedError, msgspec.MsgspecError) as error:
            return _said(f"the bucket cannot be taken: {error}")
        return _said(None)

    async def _take_named(self, _: Request) -> Response:
        key, self._named = self._named, None
        if key is None:
            return _said("the bucket cannot be taken: /areal_set_update_weight_meta has to name its tensors first")
        return _said(await self._groups.bucket(self._engine, key))


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


def _key(body: bytes) -> BucketKey:
    call = from_json(body, _Bucket)
    return bucket_key(call.group_name, call.names, call.dtypes, call.shapes)


def _said(fault: str | None) -> Response:
    message = "Succeeded." if fault is None else fault
    return JSONResponse({"success": fault is None, "message": message}, status_code=200 if fault is None else 400)
