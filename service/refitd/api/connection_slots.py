"""Which connections a server keeps when there are more than it takes. Pure.

A connection takes a slot. When a peer has all of its slots, or all slots are taken, the connection that has waited
longest for its client makes room: a client that opens sockets and sends nothing shuts out only itself. Where none
waits, because requests are being answered on all of them, a few slots are left on which only health is answered.
A peer that sends many requests at once may have more than its slots for a moment, while there are others: what came
less than `GRACE` seconds ago is a request on its way, and to close it would lose it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

GRACE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSlots:
    """How many connections there may be: in all, from one peer, and beyond these for health."""

    all: int = 512
    peer: int = 128
    health: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A connection. `waits_since` is when it began to wait for its client (seconds), None while it is answered."""

    key: int
    peer: str
    waits_since: float | None
    health_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What becomes of a new connection. `closes` is the key of the connection that makes room for it."""

    is_in: bool = True
    health_only: bool = False
    closes: int | None = None


def admission(peer: str, taken: Iterable[Taken], slots: ConnectionSlots, now: float) -> Admission:
    """Decide on a new connection.

    Args:
        peer: where it comes from, see `peer_of`.
        taken: the connections that there are, without it.
        slots: how many there may be.
        now: seconds of the clock of `waits_since`.
    """
    everything = list(taken)
    ordinary = [each for each in everything if not each.health_only]
    own = [each for each in ordinary if each.peer == peer]
    if len(own) < slots.peer and len(ordinary) < slots.all:
        return Admission()
    is_full = len(ordinary) >= slots.all
    closes = _longest(_makes_room(own, ordinary, slots), until=now if is_full else now - GRACE)
    if closes is not None:
        return Admission(closes=closes)
    if not is_full and _longest(own, until=now) is not None:
        return Admission()
    spare = [each for each in everything if each.health_only]
    if len(spare) < slots.health:
        return Admission(health_only=True)
    closes = _longest(spare, until=now)
    return Admission(is_in=closes is not None, health_only=True, closes=closes)


def peer_of(client: tuple[str, int] | None) -> str:
    """The peer that an address belongs to: the machine itself, an IPv4 address or an IPv6 network of 64 bits."""
    try:
        address = ip_address((client[0] if client is not None else "").partition("%")[0])
    except ValueError:
        return "local"  # a Unix socket
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return "local"
    return str(address) if address.version == 4 else str(int(address) >> 64)


def _makes_room(own: Sequence[Taken], ordinary: Sequence[Taken], slots: ConnectionSlots) -> Sequence[Taken]:
    """Those of which one makes room: the peer's own, else those of peers with more than their slots, else all."""
    if len(own) >= slots.peer:
        return own
    held = Counter(each.peer for each in ordinary)
    return [each for each in ordinary if held[each.peer] > slots.peer] or ordinary


def _longest(taken: Sequence[Taken], *, until: float) -> int | None:
    """Which of those has waited longest that began to wait no later than `until`."""
    waiting = [(each.waits_since, each.key) for each in taken if each.waits_since is not None]
    longest = min(waiting, default=None)
    return None if longest is None or longest[0] > until else longest[1]
