"""From what the operator says of an engine to the adapter that speaks to it."""

from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from refitd.engine.dialing import Guard
from refitd.engine.engines_file import EngineSpec
from refitd.engine.plugin.leading import Leads
from refitd.engine.port import Engine
from refitd.engine.sglang.adapter import SglangEngine
from refitd.engine.sglang.adapters import SglangAdapters
from refitd.settings import Settings


class KeyFiles(TypedDict):
    """Files with the keys that open an engine for requests, and for changes."""

    api_key: Path | None
    admin_key: Path | None


def key_files(settings: Settings, spec: EngineSpec) -> KeyFiles:
    """The engine's own, else the service's."""
    return {
        "api_key": spec.api_key_file or settings.engine_key_file,
        "admin_key": spec.admin_key_file or settings.engine_admin_key_file,
    }


def connector(settings: Settings, guard: Guard, leads: Leads | None = None) -> Callable[[EngineSpec], Engine]:
    """A function that makes the adapter for an engine. Keys come from files, the engine's own before the service's.

    `guard` says which addresses may be called, `leads` what plugins are told of who loads their engines. Nothing is
    read or called yet.
    """

    def connect(spec: EngineSpec) -> Engine:
        if settings.lora is not None:
            return SglangAdapters(
                spec.url,
                name=settings.lora,
                keep=settings.lora_keep,
                **key_files(settings, spec),
                load_timeout=settings.load_timeout,
                guard=guard,
            )
        return SglangEngine(
            spec.url,
            **key_files(settings, spec),
            pause_mode=settings.pause_mode,
            load_timeout=settings.load_timeout,
            guard=guard,
            root=settings.root.resolve(),
            allow_dtype_cast=settings.allow_dtype_cast,
            leads=leads,
        )

    return connect
