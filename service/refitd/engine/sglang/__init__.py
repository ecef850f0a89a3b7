"""SGLang among the kinds of engines, and LoRA adapters on an SGLang server (`engine/adapters.py`). It proves by its
list of adapters, and by its answers.

The server waits with an unload until no request uses the adapter, and loads nothing meanwhile. Each load has an id of
its own in the server, under which prefixes are cached: what an adapter of the same name computed before is not used.
"""

from collections.abc import Iterable, Sequence
from uuid import uuid4

from refitd.engine.adapters import AdapterProof, ListedAdapter, NamedAdapters, Scores, ServerBeneath
from refitd.engine.http import CALL_SECONDS, TRIAL_SECONDS, CallFailure, NoReply, Reply, Transport
from refitd.engine.kind import EngineKind, EngineServer
from refitd.engine.port import ChangeCheck, EnginePort, Obstacle, Target, Unreached
from refitd.engine.replies import way_in
from refitd.engine.sglang.dialect import SglangDialect, check_changes
from refitd.engine.sglang.info import (
    PAUSE_MODES,
    TRIAL,
    WORDS,
    SglangServerInfo,
    adapter_obstacles,
    read_model_info,
    read_server_info,
    read_trial,
)
from refitd.engine.sglang.pair import PairMember, SglangPair
from refitd.engine.transaction import ServerEngine


class SglangAdapters(NamedAdapters):
    server = "SGLang"
    probe_route = "/model_info"
    load_route, unload_route = "/load_lora_adapter", "/unload_lora_adapter"
    unlisted_hint = ": is --max-loaded-loras large enough?"
    _server: SglangServerInfo | None = None

    @property
    def _is_known(self) -> bool:
        return self._server is not None

    async def _look(self, reply: Reply | NoReply, listed: Sequence[ListedAdapter] | str) -> ServerBeneath | Unreached:
        info = read_model_info(reply, self._http.url)
        if isinstance(info, str):
            return Unreached(reason=info, advice=way_in(reply, WORDS), nothing_listens=reply.nothing_listens)
        if isinstance(listed, str):
            return Unreached(reason=listed, advice=way_in(reply, WORDS))
        if self._server is None or self._server.model_path not in {None, info.model_path}:
            server = read_server_info(await self._http.get("/server_info", CALL_SECONDS), self._http.url)
            if isinstance(server, str):
                return Unreached(reason=server, advice=way_in(reply, WORDS))
            self._server = server
        return ServerBeneath(
            model_path=info.model_path,
            version=self._server.version,
            configuration=self._server.configuration,
            startup_path=self._server.model_path,
            is_replaced=self._server.model_path not in {None, info.model_path},
        )

    async def check_changes(self) -> ChangeCheck:
        return await check_changes(self._http)

    def _obstacles(self) -> Iterable[Obstacle]:
        return () if self._server is None else adapter_obstacles(self._server)

    def _failure(self, reply: Reply) -> str | None:
        if reply.ok and reply.data is not None and reply.data.get("success") is True:
            return None
        told = (reply.data or {}).get("error_message")
        return told[:500] if isinstance(told, str) else reply.short_message

    async def _proof(self, name: str, target: Target, *, again: bool) -> AdapterProof:
        listed = await self._listed()
        before = self._newest([each for each in listed if each.name != name]) if isinstance(listed, list) else None
        others = [None] if before is None else [None, before]
        if (doubt := await self._answers_of_another(name, target, others)) is None:
            return AdapterProof(None)
        withdrawn = await self._unload(ListedAdapter(name, target.label, target.path)) is None
        return AdapterProof(f"loaded, but {doubt}", withdrawn=withdrawn)

    async def _scores(self, adapter: str | None) -> Scores | str | None:
        # No two of these requests share cached prefixes, by which an answer can differ in its last digits.
        named = {} if adapter is None else {"lora_path": adapter}
        reply = await self._http.ask("/generate", TRIAL | {"extra_key": uuid4().hex} | named, TRIAL_SECONDS)
        if isinstance(reply, NoReply) and reply.lost is CallFailure.TIMED_OUT:
            return None  # many requests are before it
        answer = read_trial(reply)
        return answer if isinstance(answer, str) else answer.scores


def _connect(server: EngineServer) -> EnginePort:
    access = server.access
    if access.lora is not None:
        return SglangAdapters(server.transport(Transport), server)
    if server.pair:
        urls = (server.url, *server.pair)
        members = [SglangDialect(server.transport(Transport, url), in_pair=True) for url in urls]
        return SglangPair([PairMember(each, server.plugin(), access.load_timeout) for each in members])
    dialect = SglangDialect(server.transport(Transport), pause_mode=access.pause_mode)
    return ServerEngine(dialect, server.plugin(), access.load_timeout)


_INSIDE = "install this very refitd beside every rank, with REFITD_SGLANG_ROOT set to the root as the server sees it"
SGLANG = EngineKind(
    name="sglang",
    pause_modes=tuple(PAUSE_MODES),
    inside=_INSIDE,
    connect=_connect,
    pairs=True,
)
