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


IsNamed = Callable[[str], bool]
"""Whether the operator named the engine with this URL: only such engines are sent the service's default keys."""


def key_files(settings: Settings, spec: EngineSpec, is_named: IsNamed) -> KeyFiles:
    """The engine's own key files, else the service's where the operator named the engine, else none."""
    default = is_named(spec.url)
    return {
        "api_key": spec.api_key_file or (settings.engine_key_file if default else None),
        "admin_key": spec.admin_key_file or (settings.engine_admin_key_file if default else None),
    }


def connector(
    settings: Settings, guard: Guard, is_named: IsNamed, leads: Leads | None = None
) -> Callable[[EngineSpec], Engine]:
    """Return a function that makes the adapter for an engine. It reads no file and calls no server yet.

    Args:
        settings: the service's; the default keys among them.
        guard: says which addresses may be called.
        is_named: says which engines are sent the default keys.
        leads: what plugins are told of the service that loads their engines.
    """

    def connect(spec: EngineSpec) -> Engine:
        if settings.lora is not None:
            return SglangAdapters(
                spec.url,
                name=settings.lora,
                keep=settings.lora_keep,
                **key_files(settings, spec, is_named),
                load_timeout=settings.load_timeout,
                guard=guard,
            )
        return SglangEngine(
            spec.url,
            **key_files(settings, spec, is_named),
            pause_mode=settings.pause_mode,
            load_timeout=settings.load_timeout,
            guard=guard,
            root=settings.root.resolve(),
            allow_dtype_cast=settings.allow_dtype_cast,
            leads=leads,
        )

    return connect
