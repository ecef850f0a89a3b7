"""What a kind of engine registers of itself, and what its engines are made with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from refitd.engine.http import Transport
from refitd.engine.plugin import EnginePlugin, Leads, plugins_of
from refitd.engine.port import EnginePort
from refitd.engine.wire import Guard

_TransportT = TypeVar("_TransportT", bound=Transport)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAccess:
    """How the service drives its engines, as the operator says. Times are in seconds.

    Attributes:
        root: the folder that versions lie in; None for a reader that has none.
        load_timeout: how long an engine may take for a load.
        pause_mode: what an engine does with requests in flight while it loads; "auto" for the best that it can.
        allow_dtype_cast: whether versions may have other dtypes than the model that engines serve.
        api_key: file with the default key for requests; None where engines want none.
        admin_key: file with the default key for changes; None where engines want none.
        lora: name of the adapter that engines get in place of a model; None for models.
        lora_keep: how many versions of an adapter stay loaded.
        path_map: where engines see the root; None where they see it as the service does.
    """

    root: Path | None
    load_timeout: float
    pause_mode: str
    allow_dtype_cast: bool = False
    api_key: Path | None = None
    admin_key: Path | None = None
    lora: str | None = None
    lora_keep: int = 1
    path_map: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServer:
    """One server, as its dialect calls it.

    Attributes:
        url: of the server.
        api_key: its key for requests, or the key's file; None where it wants none.
        admin_key: its key for changes, likewise.
        guard: says which addresses may be called; None: all.
        leads: the lease that the service asks plugins for; None for a reader that leads no engine.
        root: where the server sees the root.
        access: how all engines are driven.
        pair: URLs of the other servers that are updated together with it, as one engine.
        plugins: makes the client of the plugin in one server; None where no server shares anything with others.
    """

    url: str
    api_key: str | Path | None
    admin_key: str | Path | None
    guard: Guard | None
    leads: Leads | None
    root: str
    access: EngineAccess
    pair: tuple[str, ...] = ()
    plugins: Callable[[], EnginePlugin] | None = None

    def transport(self, kind: type[_TransportT], url: str | None = None) -> _TransportT:
        """The way to the server, or to another one of the pair. No connection is opened yet."""
        return kind(url or self.url, api_key=self.api_key, admin_key=self.admin_key, guard=self.guard)

    def plugin(self) -> EnginePlugin:
        return (self.plugins or plugins_of(self.access, self.leads))()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """A kind of server that refitd can drive.

    Attributes:
        name: what the operator calls it, as in `--engine NAME=URL`: lower-case letters and digits.
        pause_modes: what its servers can do with requests in flight while they load, the best first.
        inside: how refitd gets into a server of this kind, for an operator.
        connect: makes the engine of a server. It reads no file and calls no server yet.
        pairs: whether it can update several servers as one engine.
    """

    name: str
    pause_modes: tuple[str, ...]
    inside: str
    connect: Callable[[EngineServer], EnginePort]
    pairs: bool = False
