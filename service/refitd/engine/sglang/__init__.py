"""SGLang among the kinds of engines."""

from refitd.engine.http import Transport
from refitd.engine.kind import EngineKind, EngineServer
from refitd.engine.port import EnginePort
from refitd.engine.sglang.adapters import SglangAdapters
from refitd.engine.sglang.dialect import SglangDialect
from refitd.engine.sglang.info import PAUSE_MODES
from refitd.engine.sglang.pair import PairMember, SglangPair
from refitd.engine.transaction import ServerEngine


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


# Modules, scripts, and what SGLang calls its own processes (sglang::tokenizer_worker); the embedded engine imitates it.
_SGLANG_PROGRAMS = r"(?:.*/)?sglang(?:\.\S+|::.*|/launch_server\.py)?|refitd_embedded(?:\.\S+)?"
_INSIDE = "install this very refitd beside every rank, with REFITD_SGLANG_ROOT set to the root as the server sees it"
SGLANG = EngineKind(
    name="sglang",
    pause_modes=PAUSE_MODES,
    programs=_SGLANG_PROGRAMS,
    inside=_INSIDE,
    connect=_connect,
    pairs=True,
)
