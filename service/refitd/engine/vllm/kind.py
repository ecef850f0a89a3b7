"""vLLM among the kinds of engines."""

from refitd.engine.kind import EngineKind, EngineServer
from refitd.engine.port import EnginePort
from refitd.engine.vllm.adapter import PAUSE_MODES, VllmEngine
from refitd.engine.vllm.adapters import VllmAdapters
from refitd.engine.vllm.obstacles import INSIDE


def _connect(server: EngineServer) -> EnginePort:
    access = server.access
    if access.lora is not None:
        return VllmAdapters(
            server.url,
            name=access.lora,
            keep=access.lora_keep,
            api_key=server.api_key,
            admin_key=server.admin_key,
            load_timeout=access.load_timeout,
            guard=server.guard,
            several_ranks=access.vllm_stock_ranks,
            root=access.root,
            root_there=server.root,
        )
    return VllmEngine(
        server.url,
        api_key=server.api_key,
        admin_key=server.admin_key,
        pause_mode=access.pause_mode,
        load_timeout=access.load_timeout,
        guard=server.guard,
        several_ranks=access.vllm_stock_ranks,
        root=access.root,
        root_there=server.root,
        allow_dtype_cast=access.allow_dtype_cast,
        leads=server.leads,
        sockets=server.sockets,
    )


# `vllm serve`, `python -m vllm.entrypoints…`, and what vLLM calls its own processes (VLLM::EngineCore).
_VLLM_PROGRAMS = r"(?:.*/)?vllm(?:\.\S+)?|VLLM::.*"
VLLM = EngineKind(name="vllm", pause_modes=PAUSE_MODES, programs=_VLLM_PROGRAMS, inside=INSIDE, connect=_connect)
