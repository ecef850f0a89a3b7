"""From what the operator says of an engine to the adapter that speaks to it."""

from collections.abc import Callable
from pathlib import Path

from refitd.engine.engines_file import EngineSpec
from refitd.engine.port import Engine
from refitd.engine.sglang.adapter import SglangEngine
from refitd.settings import Settings


def connector(settings: Settings) -> Callable[[EngineSpec], Engine]:
    """A function that makes the adapter for an engine. Keys come from files, the engine's own before the service's."""

    def connect(spec: EngineSpec) -> Engine:
        return SglangEngine(
            spec.url,
            api_key=_read(spec.api_key_file or settings.engine_key_file),
            admin_key=_read(spec.admin_key_file or settings.engine_admin_key_file),
            pause_mode=settings.pause_mode,
            load_timeout=settings.load_timeout,
        )

    return connect


def _read(file: Path | None) -> str | None:
    return None if file is None else file.read_text().strip()
