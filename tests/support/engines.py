"""Engines of servers at a URL, with what a test says of them and the defaults of the service for the rest."""

from pathlib import Path
from typing import Any

from refitd.engine.http import Transport
from refitd.engine.kind import EngineAccess, EngineServer
from refitd.engine.sglang import SglangAdapters
from refitd.engine.sglang.dialect import SglangDialect
from refitd.engine.sglang.pair import PairMember, SglangPair
from refitd.engine.transaction import ServerEngine
from refitd.engine.vllm import VllmAdapters
from refitd.engine.vllm.dialect import VllmDialect, WatchedTransport


def server_at(
    url: str,
    *,
    root: Path | None = None,
    root_there: str | None = None,
    load_timeout: float = 600.0,
    pause_mode: str = "auto",
    allow_dtype_cast: bool = False,
    name: str | None = None,
    keep: int = 1,
    **known: Any,
) -> EngineServer:
    """A server; `known` are attributes of `EngineServer`, `name` and `keep` of its adapters."""
    access = EngineAccess(
        root=root,
        load_timeout=load_timeout,
        pause_mode=pause_mode,
        allow_dtype_cast=allow_dtype_cast,
        lora=name,
        lora_keep=keep,
    )
    unsaid: dict[str, Any] = {"api_key": None, "admin_key": None, "guard": None, "leads": None}
    return EngineServer(url=url, root=root_there or str(root), access=access, **(unsaid | known))


def sglang_engine(url: str, **options: Any) -> ServerEngine:
    """An SGLang."""
    server = server_at(url, **options)
    dialect = SglangDialect(server.transport(Transport), pause_mode=server.access.pause_mode)
    return ServerEngine(dialect, server.plugin(), server.access.load_timeout)


def sglang_pair(*urls: str, **options: Any) -> SglangPair:
    """Several SGLangs that are updated together."""
    servers = [server_at(url, **options) for url in urls]
    members = [(SglangDialect(each.transport(Transport), in_pair=True), each) for each in servers]
    return SglangPair([PairMember(dialect, each.plugin(), each.access.load_timeout) for dialect, each in members])


def sglang_adapters(url: str, **options: Any) -> SglangAdapters:
    """Adapters on an SGLang."""
    server = server_at(url, **options)
    return SglangAdapters(server.transport(Transport), server)


def vllm_engine(url: str, **options: Any) -> ServerEngine:
    """A vLLM."""
    server = server_at(url, **options)
    access = server.access
    opens = server.root if access.root is not None and server.leads is not None else None
    dialect = VllmDialect(
        server.transport(WatchedTransport),
        pause_mode=access.pause_mode,
        opens=opens,
    )
    return ServerEngine(dialect, server.plugin(), access.load_timeout)


def vllm_adapters(url: str, **options: Any) -> VllmAdapters:
    """Adapters on a vLLM."""
    server = server_at(url, **options)
    return VllmAdapters(server.transport(WatchedTransport), server)
