"""The port to refitd's code inside an engine's process, the plugin; and the lease by which a service leads engines.

A server without the plugin loads by itself: `NoPlugin`. The ring that has the plugin registers what finds it.
"""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from refitd.engine.port import Coming, LoaderUse, Offered, RankProof, Target
from refitd.parts import registered
from refitd_client.contract.plugin import Owner, Receiver
from refitd_client.files.durable import replace_file
from refitd_client.files.plain_file import read_plain

if TYPE_CHECKING:
    from refitd.engine.kind import EngineAccess

LEASE_SECONDS = 30.0  # longer where engines are asked more seldom
PROBES = 5  # that a lease outlasts at least
_ID_FILE = "id"
_ID_BYTES = 64  # bytes


def _often() -> float:
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leads:
    """A lease: who leads, and for how many seconds at least. `apart` says how many seconds the service lets pass now
    between two looks at an engine that is at rest.
    """

    owner: Owner
    seconds: float = LEASE_SECONDS
    apart: Callable[[], float] = _often

    @property
    def lasts(self) -> float:
        """Seconds that a lease lasts that is taken or renewed now."""
        return max(self.seconds, PROBES * self.apart())


def leads_of(root: Path, state_folder: Path, probe_interval: float, apart: Callable[[], float] = _often) -> Leads:
    """Return the lease of the service of a root. Its name is kept in the state folder, made once. Blocks.
    `state_folder`: the service's own. `probe_interval`: seconds between two looks at an engine, as the operator wants.

    Raises:
        OSError: the folder cannot be read or written.
    """
    return leads_as(root, _name(state_folder), 0, probe_interval, apart)


def leads_as(root: Path, service: str, epoch: int, probe_interval: float, apart: Callable[[], float] = _often) -> Leads:
    """Return the lease of a service of this name. `epoch`: of the group that it leads; 0 for a service alone."""
    owner = Owner(service=service, root=str(root), host=socket.gethostname(), pid=os.getpid(), epoch=epoch)
    return Leads(owner=owner, seconds=max(LEASE_SECONDS, PROBES * probe_interval), apart=apart)


def _name(folder: Path) -> str:
    path = folder / _ID_FILE
    if not path.is_file():
        replace_file(path, f"{os.urandom(16).hex()}\n".encode(), by=folder / f".{_ID_FILE}-{os.getpid()}")
    return read_plain(path, _ID_BYTES).decode(errors="replace").strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How an engine was started, by its HTTP API. `spread`: each data-parallel rank has ranks of its own."""

    port: int | None
    seed: int | None
    ranks: int = 1
    dp_ranks: int = 1
    spread: bool = True

    @property
    def seats(self) -> int:
        """How many processes hold weights."""
        return self.ranks * (self.dp_ranks if self.spread else 1)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Every rank holds the version open, checked."""


@dataclass(frozen=True, slots=True)
class PrepareRefused:
    """A rank would not load it. Nothing was paused and nothing is left open. `needs_full` as in `Refit`."""

    reason: str
    needs_full: bool = False


@dataclass(frozen=True, slots=True)
class Unprepared:
    """A rank did not answer: the update checks the version in the pause, as it does without a socket."""

    reason: str


Preparation = Prepared | PrepareRefused | Unprepared


class PluginPort(Protocol):
    """The plugin in one engine. No call raises for what an engine does.

    What it says can only make an update shorter, or spare the engine one that it would refuse: what the engine serves
    is said by the answer to the update itself.
    """

    @property
    def release(self) -> str | None:
        """The plugin's release; None where the server itself loads."""
        ...

    @property
    def takes_offers(self) -> bool:
        """Whether the engine can load from the memory of a trainer on its host."""
        ...

    @property
    def receivers(self) -> tuple[Receiver, ...]:
        """Its ranks that can receive weights over a process group, without the engine's id."""
        ...

    @property
    def proves(self) -> bool:
        """Whether its ranks can prove versions with their GPUs."""
        ...

    @property
    def reason(self) -> str | None:
        """Why the server itself loads."""
        ...

    @property
    def loader(self) -> LoaderUse | None:
        """What the plugin does not copy by itself, as of the last handshakes."""
        ...

    @property
    def led_by(self) -> str | None:
        """Which other service leads the engine, as a sentence."""
        ...

    def vouches_for(self, target: Target) -> bool:
        """Whether the answer to a load will say what the engine holds after it."""
        ...

    async def look(self, launch: Launch, *, anew: bool = False) -> None:
        """Find the ranks of the engine that was started so. `anew`: whatever was found just now."""
        ...

    async def prefetch(self, version: Coming | Offered) -> Sequence[RankProof]:
        """Have a version prepared before the service has checked it; return what the ranks prove of it."""
        ...

    async def prepare_for(self, target: Target, within: float) -> Preparation:
        """Have what an engine is to serve prepared while it serves. `within`: seconds to prepare files."""
        ...

    def is_done(self) -> None:
        """Note that a load was sent: it takes what was prepared."""
        ...

    def was_loaded(self, how: str) -> None:
        """Note that a load succeeded. `how`: the engine's word for it."""
        ...

    async def forget(self) -> None:
        """Have the ranks close what they prepared and did not load."""
        ...

    async def contents(self, *, of_all: bool = False) -> list[str]:
        """The digests of what the ranks hold that answer an update; an empty one where a rank does not say.

        `of_all`: all ranks of this engine answer, not the first of each data-parallel one.
        """
        ...


class NoPlugin:
    """The plugin of a server that loads by itself, in a service without the ring that has the plugin."""

    release: str | None = None
    takes_offers = False
    receivers: tuple[Receiver, ...] = ()
    proves = False
    reason: str | None = "this refitd is installed without its plugin"
    loader: LoaderUse | None = None
    led_by: str | None = None

    def vouches_for(self, target: Target) -> bool:
        return False

    async def look(self, launch: Launch, *, anew: bool = False) -> None: ...

    async def prefetch(self, version: Coming | Offered) -> Sequence[RankProof]:
        return ()

    async def prepare_for(self, target: Target, within: float) -> Preparation:
        return Unprepared("no plugin answers for it")

    def is_done(self) -> None: ...

    def was_loaded(self, how: str) -> None: ...

    async def forget(self) -> None: ...

    async def contents(self, *, of_all: bool = False) -> list[str]:
        return []


PluginMaker = Callable[["EngineAccess", Leads | None], Callable[[], PluginPort]]
"""Returns what makes the plugin's client of one server. What the clients share is made once."""


def plugins_of(access: "EngineAccess", leads: Leads | None) -> Callable[[], PluginPort]:
    """Return what makes the plugin's client of one server."""
    makers: list[PluginMaker] = list(registered("plugins"))
    return makers[0](access, leads) if makers else NoPlugin
