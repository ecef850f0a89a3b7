"""The port to refitd's code inside an engine's process, the plugin; and the lease by which a service leads engines.

A server without the plugin loads by itself. The ring that has the plugin registers what finds it.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from refitd.engine.port import Coming, LoaderUse, Offered, RankProof, Target
from refitd.parts import registered
from refitd_client.contract.plugin import Owner, Receiver
from refitd_client.files.durable import replace_file
from refitd_client.files.plain_file import read_plain

if TYPE_CHECKING:
    from refitd.engine.kind import EngineAccess

LEASE_SECONDS = 30.0  # at least
PROBES = 5  # that a lease outlasts
_ID_FILE = "id"
_ID_BYTES = 64  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Leads:
    """A lease: who leads, and for how many seconds one lasts that is taken or renewed now."""

    owner: Owner
    lasts: Callable[[], float] = field(default=lambda: LEASE_SECONDS, compare=False)


def service_name(state_folder: Path) -> str:
    """Return the name of the service that has this folder, made once. Blocks; raises OSError."""
    path = state_folder / _ID_FILE
    if not path.is_file():
        replace_file(path, f"{os.urandom(16).hex()}\n".encode(), by=state_folder / f".{_ID_FILE}-{os.getpid()}")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSeen:
    """What the last look at a server's plugin has found.

    Attributes:
        release: the plugin's; None where the server itself loads.
        reason: why the server itself loads.
        takes_offers: whether the engine can load from the memory of a trainer on its host.
        receivers: its ranks that can receive weights over a process group, without the engine's id.
        proves: whether its ranks can prove versions with their GPUs.
        loader: what the plugin does not copy by itself.
        led_by: which other service leads the engine, as a sentence.
    """

    release: str | None = None
    reason: str | None = None
    takes_offers: bool = False
    receivers: tuple[Receiver, ...] = ()
    proves: bool = False
    loader: LoaderUse | None = None
    led_by: str | None = None


class EnginePlugin:
    """The plugin in one engine; as it is here, that of a server that loads by itself. No call raises for what an engine
    does.

    What the plugin says can only make an update shorter, or spare the engine one that it would refuse: what the engine
    serves is said by the answer to the update itself.

    Attributes:
        seen: what the last look has found.
    """

    seen = PluginSeen(reason="this refitd is installed without its plugin")

    def vouches_for(self, target: Target) -> bool:
        """Whether the answer to a load will say what the engine holds after it."""
        return self.seen.release is not None and (target.files is not None or target.offered is not None)

    async def look(self, launch: Launch, *, anew: bool = False) -> None:
        """Find the ranks of the engine that was started so. `anew`: whatever was found just now."""

    async def prefetch(self, version: Coming | Offered) -> Sequence[RankProof]:
        """Have a version prepared before the service has checked it; return what the ranks prove of it."""
        return ()

    async def prepare_for(self, target: Target, within: float) -> Preparation:
        """Have what an engine is to serve prepared while it serves. `within`: seconds to prepare files."""
        return Unprepared("no plugin answers for it")

    def is_done(self) -> None:
        """Note that a load was sent: it takes what was prepared."""

    def was_loaded(self, how: str) -> None:
        """Note that a load succeeded. `how`: the engine's word for it."""

    async def forget(self) -> None:
        """Have the ranks close what they prepared and did not load."""

    async def contents(self, *, of_all: bool = False) -> list[str]:
        """The digests of what the ranks hold that answer an update; an empty one where a rank does not say.

        `of_all`: all ranks of this engine answer, not the first of each data-parallel one.
        """
        return []


PluginMaker = Callable[["EngineAccess", Leads | None], Callable[[], EnginePlugin]]
"""Returns what makes the plugin's client of one server. What the clients share is made once."""


def plugins_of(access: "EngineAccess", leads: Leads | None) -> Callable[[], EnginePlugin]:
    """Return what makes the plugin's client of one server."""
    makers: list[PluginMaker] = list(registered("plugins"))
    return makers[0](access, leads) if makers else EnginePlugin
