"""vLLM among the kinds of engines."""

from refitd.engine.kind import EngineKind, EngineServer
from refitd.engine.port import EnginePort
from refitd.engine.transaction import ServerEngine
from refitd.engine.vllm.adapters import VllmAdapters
from refitd.engine.vllm.dialect import PAUSE_MODES, VllmDialect, WatchedTransport
from refitd.engine.vllm.info import INSIDE


def _connect(server: EngineServer) -> EnginePort:
    access, http = server.access, server.transport(WatchedTransport)
    if access.lora is not None:
        return VllmAdapters(http, server)
    opens = server.root if access.root is not None and server.leads is not None else None
    dialect = VllmDialect(http, pause_mode=access.pause_mode, opens=opens)
    return ServerEngine(dialect, server.plugin(), access.load_timeout)


# `vllm serve`, `python -m vllm.entrypoints…`, and what vLLM calls its own processes (VLLM::EngineCore).
_VLLM_PROGRAMS = r"(?:.*/)?vllm(?:\.\S+)?|VLLM::.*"
VLLM = EngineKind(name="vllm", pause_modes=PAUSE_MODES, programs=_VLLM_PROGRAMS, inside=INSIDE, connect=_connect)
