"""Whose handshakes belong to the engine that is asked about. Pure: handshakes in, its ranks out, or why there are none.

Two of a server's launch settings say which it is: the port that it listens on and its random seed, which SGLang draws
anew at each start unless it is given one. Its HTTP side tells both (/server_info), and so does each rank's handshake.
Where engines of several containers cannot be told apart by them, none is taken: wrong ranks are worse than none.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from refitd.engine.plugin.handshake import shown
from refitd.engine.port import Loader
from refitd_client.contract.plugin import Handshake

NOBODY = "no plugin speaks for it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What an engine's HTTP side says of how it was started. `spread`: each data-parallel rank has ranks of its own."""

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
class Member:
    """One rank, and the name of its socket."""

    socket: str
    handshake: Handshake


@dataclass(frozen=True, slots=True)
class EngineRankGroup:
    """All ranks of an engine, in order, each with the plugin on. `release` is the plugin's."""

    members: tuple[Member, ...]
    release: str

    @property
    def takes_offers(self) -> bool:
        """Whether all can load from a trainer's memory."""
        return all("handover" in member.handshake.kinds for member in self.members)

    @property
    def loader(self) -> Loader | None:
        """What goes through SGLang's loader in each load, on the rank where that is most; None where nothing does."""
        found = [loader for member in self.members if (loader := _loader_of(member.handshake)) is not None]
        return max(found, key=lambda loader: loader.whole, default=None)

    @property
    def first(self) -> tuple[Member, ...]:
        """Those who answer an update: the first tensor-parallel rank of each data-parallel one."""
        return tuple(member for member in self.members if member.handshake.rank == 0)


@dataclass(frozen=True, slots=True)
class Stock:
    """The engine's loads are SGLang's own, as far as anyone can tell. `reason` is a sentence."""

    reason: str


def rank_group_of(launch: Launch, found: Sequence[Member], faults: Sequence[str]) -> EngineRankGroup | Stock:
    """The rank group of the engine. `faults` are sentences on sockets that gave no handshake."""
    mine = [member for member in found if _is_of(member.handshake, launch)]
    if not mine:
        return Stock("; ".join([NOBODY, *faults[:1]]))
    if len({member.handshake.host for member in mine}) > 1 or _doubled(mine, launch):
        return Stock(
            f"several engines with port {launch.port} and seed {launch.seed} share the root, and nobody can tell them "
            "apart: give them different ports"
        )
    if aside := [member.handshake for member in mine if member.handshake.state != "on"]:
        return Stock(f"the plugin stands aside: {shown(aside[0].reason)}")
    if len(mine) < launch.seats:
        heard = f"only {len(mine)} of its {launch.seats} ranks answer for the plugin"
        return Stock("; ".join([heard, *faults[:1]]))
    if len({member.handshake.plugin for member in mine}) > 1:
        return Stock("its ranks have different releases of the plugin")
    members = sorted(mine, key=lambda member: (member.handshake.dp_rank or 0, member.handshake.rank))
    return EngineRankGroup(tuple(members), shown(mine[0].handshake.plugin))


def _loader_of(handshake: Handshake) -> Loader | None:
    """Nothing is said before the first load."""
    plan = handshake.plan
    if plan is None:
        return Loader(whole=True, reason="it has learned no load plan from its last load") if handshake.served else None
    if not plan.replays:
        return Loader(whole=True, reason=shown(plan.reason))
    if plan.loader:
        said = "1 tensor is" if plan.loader == 1 else f"{plan.loader} tensors are"
        return Loader(whole=False, reason=f"{said} not only copied")
    return None


def _is_of(handshake: Handshake, launch: Launch) -> bool:
    known = launch.port is not None and launch.seed is not None
    same = (handshake.port, handshake.seed) == (launch.port, launch.seed)
    return known and same and handshake.ranks == launch.ranks


def _doubled(members: Sequence[Member], launch: Launch) -> bool:
    """Whether two of them have the same seat."""
    seats = Counter((member.handshake.dp_rank if launch.spread else None, member.handshake.rank) for member in members)
    return any(count > 1 for count in seats.values())
