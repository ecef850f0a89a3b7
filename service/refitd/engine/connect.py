"""From what the operator says of an engine to the adapter that speaks to it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from refitd.engine.dialing import Guard
from refitd.engine.engines_file import EngineSpec
from refitd.engine.plugin.leading import Leads
from refitd.engine.port import EnginePort
from refitd.engine.sglang.adapter import SglangEngine
from refitd.engine.sglang.adapters import SglangAdapters


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAccess:
    """How the service drives its engines, as the operator says. Times are in seconds.

    Attributes:
        root: the folder that versions lie in.
        load_timeout: how long an engine may take for a load.
        pause_mode: what an engine does with requests in flight while it loads.
        allow_dtype_cast: whether versions may have other dtypes than the model that engines serve.
        api_key: file with the default key for requests; None where engines want none.
        admin_key: file with the default key for changes; None where engines want none.
        lora: name of the adapter that engines get in place of a model; None for models.
        lora_keep: how many versions of an adapter stay loaded.
    """

    root: Path
    load_timeout: float
    pause_mode: str
    allow_dtype_cast: bool = False
    api_key: Path | None = None
    admin_key: Path | None = None
    lora: str | None = None
    lora_keep: int = 1


class KeyFiles(TypedDict):
    """Files with the keys that open an engine for requests, and for changes."""

    api_key: Path | None
    admin_key: Path | None


IsNamed = Callable[[str], bool]
"""Whether the operator named the engine with this URL: only such engines are sent the service's default keys."""


def key_files(access: EngineAccess, spec: EngineSpec, is_named: IsNamed) -> KeyFiles:
    """The engine's own key files, else the service's where the operator named the engine, else none."""
    default = is_named(spec.url)
    return {
        "api_key": spec.api_key_file or (access.api_key if default else None),
        "admin_key": spec.admin_key_file or (access.admin_key if default else None),
    }


def connector(
    access: EngineAccess, guard: Guard, is_named: IsNamed, leads: Leads | None = None
) -> Callable[[EngineSpec], EnginePort]:
    """Return a function that makes the adapter for an engine. It reads no file and calls no server yet.

    Args:
        access: how engines are driven; the default keys among it.
        guard: says which addresses may be called.
        is_named: says which engines are sent the default keys.
        leads: what plugins are told of the service that loads their engines.
    """

    def connect(spec: EngineSpec) -> EnginePort:
        if access.lora is not None:
            return SglangAdapters(
                spec.url,
                name=access.lora,
                keep=access.lora_keep,
                **key_files(access, spec, is_named),
                load_timeout=access.load_timeout,
                guard=guard,
            )
        return SglangEngine(
            spec.url,
            **key_files(access, spec, is_named),
            pause_mode=access.pause_mode,
            load_timeout=access.load_timeout,
            guard=guard,
            root=access.root,
            allow_dtype_cast=access.allow_dtype_cast,
            leads=leads,
        )

    return connect
