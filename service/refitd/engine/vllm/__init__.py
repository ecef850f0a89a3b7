"""vLLM among the kinds of engines, and LoRA adapters on a vLLM server (`engine/adapters.py`), which has
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora.

What vLLM 0.32.0 was seen to do, and what follows from it:

- It reads an adapter that it does not hold in memory (`--max-cpu-loras`, 1 unless it is given) from its folder when a
  request names it, and dies where the folder is gone. So the folders that it lists, and those of the adapters that were
  unloaded last, of which requests may still be under way, count as folders that it may read (`Reached.may_read`). It
  does not list the latter: after a restart of the service the record knows them (`Reached.may_read_more`).
- A name that is loaded with `load_inplace` keeps that flag: vLLM reads the folder again at each step of each request,
  and continues running requests with other weights. So a name that is in use is unloaded and loaded anew; requests that
  are under way end with the adapter that they began with, and the prefix cache is emptied.
- It answers 200 to an adapter with NaN, with a tensor missing or of another shape. A fixed prompt is scored with each
  adapter that was loaded; one with a wrong answer, or with that of the model alone, is unloaded again. NaN stays behind
  in what the engine keeps, and later requests for other adapters answer NaN as well (seen on a CPU): contents are
  unknown then.
- A load that fails in one of several processes shifts the answers of all, as for models.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from refitd.engine.adapters import AdapterProof, ListedAdapter, NamedAdapters, Scores, ServerBeneath
from refitd.engine.http import NoReply, Reply, Transport
from refitd.engine.kind import EngineKind, EngineServer
from refitd.engine.port import ChangeCheck, EnginePort, Obstacle, Target, Unreached
from refitd.engine.transaction import ServerEngine
from refitd.engine.vllm import contents
from refitd.engine.vllm.dialect import (
    PAUSE_MODES,
    VllmDialect,
    WatchedTransport,
    ask_how_started,
    asleep,
    check_changes,
    empty_caches,
    unreached,
)
from refitd.engine.vllm.info import (
    INSIDE,
    LORA,
    Capabilities,
    Label,
    VllmServerInfo,
    adapter_obstacles,
    lacking_for_adapters,
    read_label,
)


@dataclass(frozen=True, slots=True)
class _Known:
    """A process of the server: how it was started, and the label of the model beneath its adapters."""

    server: VllmServerInfo
    label: str


class VllmAdapters(NamedAdapters):
    server = "vLLM"
    probe_route = "/weight_info"
    load_route, unload_route = LORA, "/v1/unload_lora_adapter"

    def __init__(self, http: Transport, server: EngineServer) -> None:
        super().__init__(http, server)
        self._known: _Known | None = None
        self._was_away = True  # whether another process may answer than at the last probe
        self._unloaded: deque[str] = deque(maxlen=self._keep)  # folders, the last ones

    @property
    def _is_known(self) -> bool:
        return not self._was_away

    @property
    def _can(self) -> Capabilities:
        return Capabilities() if self._known is None else self._known.server.capabilities

    async def _look(self, reply: Reply | NoReply, listed: Sequence[ListedAdapter] | str) -> ServerBeneath | Unreached:
        label = read_label(reply, self._http.url)
        known, names = self._known, set[str]() if isinstance(listed, str) else {each.name for each in listed}
        is_new = self._was_away or (self._served is not None and self._served not in names)
        is_replaced = known is not None and isinstance(label, Label) and label.weight_version != known.label
        fault = label if isinstance(label, str) else None
        if (is_new or is_replaced) and isinstance(reply, Reply):
            fault = await self._ask_how_started(label)
        fault = fault or (listed if isinstance(listed, str) else None)
        if fault is not None or self._known is None:
            self._was_away = True
            return unreached(fault or "", reply)
        server = self._known.server
        return ServerBeneath(
            model_path=server.model_path,
            version=server.version,
            configuration=server.configuration,
            startup_path=server.model_path,
            process=server.process,
            is_replaced=is_replaced,
        )

    async def _ask_how_started(self, label: Label | str) -> Obstacle | str | None:
        """Learn how the server was started; what it lacks or why that cannot be said, None where it was."""
        server = await ask_how_started(self._http)
        if not isinstance(server, VllmServerInfo):
            return server
        if isinstance(label, str):
            return label
        if self._known is not None and server.process != self._known.server.process:
            self._lost = None
        self._known, self._was_away = _Known(server, label.weight_version), False
        return lacking_for_adapters(server.capabilities, self._http.url)

    async def fingerprint(self, alike: str | None = None) -> str | None:
        """See `EnginePort`: the answers of the adapter that it serves."""
        listed = await self._listed()
        newest = None if isinstance(listed, str) else self._newest(listed)
        if newest is None:
            return None
        return await contents.fingerprint_of(self._http, alike, checker=False, adapter=newest.name)

    async def check_changes(self) -> ChangeCheck:
        return await check_changes(self._http)

    def _obstacles(self) -> Iterator[Obstacle]:
        return adapter_obstacles(self._can, self._keep)

    async def _left_alone(self) -> str | None:
        return await asleep(self._http) if self._can.sleeps else None

    def _may_read(self, listed: Sequence[ListedAdapter]) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*(each.path for each in listed), *self._unloaded]))

    @property
    def _may_read_more(self) -> bool:
        return len(self._unloaded) < self._keep

    async def _load(self, name: str, path: str) -> Reply | NoReply:
        reply = await super()._load(name, path)
        if self._can.ranks > 1 and (isinstance(reply, NoReply) or self._failure(reply) is not None):
            if isinstance(reply, NoReply):
                why = reply.reason
            else:
                why = f"the engine answered {reply.status}: {reply.short_message}"
            self._lost = f"{why}; its processes answer other calls than they are asked since: restart it"
        return reply

    async def _change(self, route: str, body: dict[str, Any]) -> Reply | NoReply:
        # With the key for requests: it is the one that vLLM wants for all routes beneath /v1.
        return await self._http.ask(route, body, self._load_timeout)

    def _failure(self, reply: Reply) -> str | None:
        return None if reply.ok and reply.text.strip('"').startswith("Success") else reply.short_message

    async def _unload(self, adapter: ListedAdapter) -> str | None:
        fault = await super()._unload(adapter)
        if fault is None and adapter.path not in self._unloaded:
            self._unloaded.append(adapter.path)
        return fault

    async def _proof(self, name: str, target: Target, *, again: bool) -> AdapterProof:
        if again and (fault := await empty_caches(self._http, multimodal=self._can.multimodal)) is not None:
            return AdapterProof(f"loaded, but {fault}")
        found, doubt = await contents.answered(self._http, None, target, name)
        if doubt is None and found is not None:
            # Not those of the adapter before: one that is not in memory is read from its folder, and vLLM dies where a
            # trainer has deleted that.
            doubt = await self._answers_of_another(name, target, [None])
        if doubt is None:
            return AdapterProof(None, found)
        unloaded = await self._unload(ListedAdapter(name, target.label, target.path)) is None
        if found is None:
            doubt = f"{doubt}; where other adapters answer so as well, restart it"
        return AdapterProof(f"loaded, but {doubt}", withdrawn=unloaded and found is not None)

    async def _scores(self, adapter: str | None) -> Scores | str | None:
        # vLLM looks up no cached prefix for a prompt that is to be scored.
        answer = await contents.scored(self._http, adapter)
        return answer.values if isinstance(answer, contents.Scores) else answer


def _connect(server: EngineServer) -> EnginePort:
    access, http = server.access, server.transport(WatchedTransport)
    if access.lora is not None:
        return VllmAdapters(http, server)
    opens = server.root if access.root is not None and server.leads is not None else None
    dialect = VllmDialect(http, pause_mode=access.pause_mode, opens=opens)
    return ServerEngine(dialect, server.plugin(), access.load_timeout)


VLLM = EngineKind(name="vllm", pause_modes=PAUSE_MODES, inside=INSIDE, connect=_connect)
