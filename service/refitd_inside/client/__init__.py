"""Which ranks belong to an engine, by their handshakes. Pure.

Two of a server's launch settings say which it is: the port that it listens on and its random seed, which SGLang draws
anew at each start unless it is given one. Its HTTP side tells both (/server_info), and so does each rank's handshake.
Where engines of several containers cannot be told apart by them, none is taken: wrong ranks are worse than none.

A handshake is what one rank answers when it is greeted. Any process may have written it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from refitd.engine.plugin import Launch, PluginSeen
from refitd.engine.port import LoaderUse
from refitd_client.contract.decoding import converted
from refitd_client.contract.manifest import FOREIGN_CHARACTERS
from refitd_client.contract.plugin import ASIDE, PROTOCOL, Handshake, Receiver

MOST_REASON = 500  # of a rank, in a sentence
NO_PLUGIN = "no plugin answers for it"


@dataclass(frozen=True, slots=True)
class Member:
    socket: str
    handshake: Handshake


@dataclass(frozen=True, slots=True)
class EngineRankGroup:
    """All ranks of an engine, in order, each with the plugin on. `release` is the plugin's."""

    members: tuple[Member, ...]
    release: str

    @property
    def seen(self) -> PluginSeen:
        shakes = [member.handshake for member in self.members]
        receivers = (
            Receiver(
                engine="",
                rank=member.handshake.rank,
                name=member.socket,
                host=shown(member.handshake.host),
                boot=shown(member.handshake.boot),
                device=shown(member.handshake.device),
                backends=[each for each in ("gloo", "nccl") if each in member.handshake.backends],
                needs=shown(member.handshake.needs),
            )
            for member in self.members
            if member.handshake.backends
        )
        loaders = [loader for shake in shakes if (loader := _loader_of(shake)) is not None]
        return PluginSeen(
            release=self.release,
            takes_offers=all("handover" in shake.kinds for shake in shakes),
            receivers=tuple(receivers),
            proves=all(shake.proves for shake in shakes),
            loader=max(loaders, key=lambda loader: loader.whole, default=None),  # of the rank where it is most
        )

    @property
    def first(self) -> tuple[Member, ...]:
        found: dict[int | None, Member] = {}
        for member in self.members:  # in order; with DP attention the first of a group need not be rank 0
            found.setdefault(member.handshake.dp_rank, member)
        return tuple(found.values())


@dataclass(frozen=True, slots=True)
class Stock:
    """The server itself loads. `reason` is a sentence."""

    reason: str
    members: ClassVar[tuple[Member, ...]] = ()
    first: ClassVar[tuple[Member, ...]] = ()

    @property
    def seen(self) -> PluginSeen:
        return PluginSeen(reason=self.reason or None)


def rank_group_of(launch: Launch, found: Sequence[Member], faults: Sequence[str]) -> EngineRankGroup | Stock:
    """Return the ranks of an engine, or why SGLang itself loads. `found`: the ranks that gave a handshake, of any
    engine. `faults`: sentences on sockets that gave none.
    """
    wanted = (launch.port, launch.seed, launch.ranks)
    mine = [m for m in found if (m.handshake.port, m.handshake.seed, m.handshake.ranks) == wanted]
    if not mine or launch.port is None or launch.seed is None:
        return Stock("; ".join([NO_PLUGIN, *faults[:1]]))
    seats = Counter((each.handshake.dp_rank if launch.spread else None, each.handshake.rank) for each in mine)
    if len({member.handshake.host for member in mine}) > 1 or max(seats.values()) > 1:
        return Stock(
            f"several engines with port {launch.port} and seed {launch.seed} share the root, and cannot be told "
            "apart: give them different ports"
        )
    if aside := [member.handshake for member in mine if member.handshake.state != "on"]:
        return Stock(f"{ASIDE}: {shown(aside[0].reason)}")
    if len(mine) < launch.seats:
        few = f"only {len(mine)} of its {launch.seats} ranks answer for the plugin"
        return Stock("; ".join([few, *faults[:1]]))
    if len({member.handshake.plugin for member in mine}) > 1:
        return Stock("its ranks have different releases of the plugin")
    members = sorted(mine, key=lambda member: (member.handshake.dp_rank or 0, member.handshake.rank))
    return EngineRankGroup(tuple(members), shown(mine[0].handshake.plugin))


def _loader_of(handshake: Handshake) -> LoaderUse | None:
    """What one rank gives to SGLang's loader; None before the first load."""
    plan = handshake.plan
    if plan is None:
        return (
            LoaderUse(whole=True, reason="it has learned no load plan from its last load") if handshake.served else None
        )
    if not plan.replays:
        return LoaderUse(whole=True, reason=shown(plan.reason))
    if plan.loader:
        said = "1 tensor is" if plan.loader == 1 else f"{plan.loader} tensors are"
        return LoaderUse(whole=False, reason=f"{said} not only copied")
    return None


def read_handshake(reply: Mapping[str, Any]) -> Handshake | str:
    """The handshake in a reply, or why it cannot be used, in a sentence without a subject."""
    protocol = reply.get("protocol")
    if protocol != PROTOCOL:
        return f"speaks protocol {protocol!a:.20} and refitd {PROTOCOL}: install the same refitd beside the engine"
    try:
        handshake = converted(reply, Handshake)
    except msgspec.ValidationError as error:
        return f"says hello in another form ({error})"
    if not 0 <= handshake.rank < handshake.ranks:
        return f"says that it is rank {handshake.rank} of {handshake.ranks}"
    return handshake


def shown(text: str, most: int = FOREIGN_CHARACTERS) -> str:
    """Foreign text for a sentence: at most `most` characters, without control characters."""
    return ascii(text[:most])[1:-1]
