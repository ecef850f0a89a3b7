"""SGLang among the kinds of engines."""

from typing import Any

from refitd.engine.kind import EngineKind, EngineServer
from refitd.engine.port import EnginePort
from refitd.engine.sglang.adapter import SglangEngine
from refitd.engine.sglang.adapters import SglangAdapters
from refitd.engine.sglang.info import PAUSE_MODES
from refitd.engine.sglang.unit import SglangMember, SglangUnit


def _connect(server: EngineServer) -> EnginePort:
    access = server.access
    if access.lora is not None:
        return SglangAdapters(
            server.url,
            name=access.lora,
            keep=access.lora_keep,
            api_key=server.api_key,
            admin_key=server.admin_key,
            load_timeout=access.load_timeout,
            guard=server.guard,
            root=access.root,
            root_there=server.root,
        )
    options: dict[str, Any] = {
        "api_key": server.api_key,
        "admin_key": server.admin_key,
        "pause_mode": access.pause_mode,
        "load_timeout": access.load_timeout,
        "guard": server.guard,
        "root": access.root,
        "allow_dtype_cast": access.allow_dtype_cast,
        "leads": server.leads,
        "sockets": server.sockets,
    }
    if server.pair:
        return SglangUnit([SglangMember(url, **options) for url in (server.url, *server.pair)])
    return SglangEngine(server.url, **options)


# Modules, scripts, and what SGLang calls its own processes (sglang::tokenizer_worker); the embedded engine imitates it.
_SGLANG_PROGRAMS = r"(?:.*/)?sglang(?:\.\S+|::.*|/launch_server\.py)?|refitd_embedded(?:\.\S+)?"
_INSIDE = "install this very refitd beside every rank, with REFITD_SGLANG_ROOT set to the root as the server sees it"
SGLANG = EngineKind(
    name="sglang",
    pause_modes=tuple(PAUSE_MODES),
    programs=_SGLANG_PROGRAMS,
    inside=_INSIDE,
    connect=_connect,
    pairs=True,
)
