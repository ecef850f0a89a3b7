"""How long 1,000 hosts take to get a version, and what the hub sends: a model of links, with the product's own plan.

A discrete-event model. Each host has one link, whose two directions each carry one block after another at its speed. A
follower asks its parent of each stripe, as `policy/relays.py` has planned it, for its blocks in order, some at a time;
a parent hands a block on when it has it whole. Disks, checks and engines are left out: what one host takes to check a
version and to load it into its engines, which hosts do at the same time, comes on top.

A dead host answers nothing: its children give it up after `GIVEN_UP` seconds, tell the hub, and have another parent.
By then the hub knows who is silent, since all that live have reported that they pull. A follower whose relay is dead
asks the hub at once, and again after some time where the hub has sent enough copies (`hub_serves`). One whose relay
has got another child in its place hears that with the answer to its next report.
"""

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from figures import Figure

from refitd.follow.byte_source import RELAY_CONNECT_SECONDS as GIVEN_UP
from refitd.follow.relay_plans import HEARD_SECONDS
from refitd.follow.transfer import PARTS, PAUSES, block_for
from refitd.policy.relays import Parents, RelayHost, home_of, hub_serves, plan_relays
from refitd.state.followers import LEASE_SECONDS

HOSTS, ENGINES = 1000, 8
SPEED = 10e9 / 8  # bytes a second, in each direction of a link
LATENCY = 0.0005  # seconds from a request to the first byte of its answer
FULL = 15.2e9  # bytes of a model of 7.6 billion parameters in bfloat16
DELTA = FULL * 0.01 * 3  # of 1 % of the elements, each with its index
CHILDREN = (0, 1, 2, 4)
DEAD = 0.05
HUB = "hub"
REPORTS = LEASE_SECONDS / 3  # between two reports of a follower
if HEARD_SECONDS > GIVEN_UP:
    raise RuntimeError("a dead host is given up before the hub knows that it is silent: the model does not hold")


@dataclass(slots=True)
class _Place:
    """A host. Each direction of its link is free from a time on; `wanted` names who waits for parts that it lacks.

    `named` are the relays that the hub has named to it last, `lost` those of them that were dead, `refused` is when the
    hub first refused it a part.
    """

    sends_from: float = 0.0
    takes_from: float = 0.0
    has: set[int] = field(default_factory=set[int])
    wanted: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    sent: int = 0
    named: Parents = ()
    lost: set[str] = field(default_factory=set[str])
    refused: float | None = None


class Transfer:
    """One version on its way to all hosts, in blocks of `unit` bytes."""

    def __init__(self, size: int, unit: int, children: int, dead: float, seed: int = 1) -> None:
        self._parts = -(-size // unit)
        self._unit = unit
        self._children = children
        self._stripes = max(children, 1)
        self._known = _planned(children)
        self._plan = plan_relays(self._known, children) if children else {host.name: (None,) for host in self._known}
        chance = self._chance = random.Random(seed)
        self._dead = set(chance.sample([host.name for host in self._known], int(dead * len(self._known))))
        self._places = {host.name: _Place(named=self._plan[host.name]) for host in self._known}
        self._places[HUB] = _Place(has=set(range(self._parts)))
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._queues: dict[tuple[str, int], deque[int]] = {}
        self._complained: set[str] = set()
        self.seconds = 0.0

    def run(self) -> "Transfer":
        """Until every host that is alive has every part."""
        alive = [host.name for host in self._known if host.name not in self._dead]
        for name in alive:
            for stripe in range(self._stripes):
                queue = deque(part for part in range(self._parts) if self._stripe(part) == stripe)
                self._queues[name, stripe] = queue
                for _ in range(min(-(-PARTS // self._stripes), len(queue))):
                    self._ask(0.0, name, queue.popleft())
            self._later(self._chance.random() * REPORTS, partial(self._report, name=name))
        while self._events:
            at, _, happens = heapq.heappop(self._events)
            happens(at)
        if any(len(self._places[name].has) < self._parts for name in alive):
            raise RuntimeError("a host that is alive waits for ever")
        return self

    @property
    def copies(self) -> float:
        """How many copies of the version the hub has sent."""
        return self._places[HUB].sent / self._parts

    def _stripe(self, part: int) -> int:
        return part % self._stripes

    def _later(self, at: float, happens: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, happens))

    def _ask(self, at: float, name: str, part: int, tried: int = 0) -> None:
        """Ask the relay that was named for the part, the hub where there is none."""
        place = self._places[name]
        relay = place.named[self._stripe(part)]
        if relay is None or relay in place.lost:
            self._ask_hub(at, name, part, tried)
        elif relay in self._dead:
            self._later(at + GIVEN_UP, lambda at: self._give_up(at, name, part, relay))
        elif part in self._places[relay].has:
            self._send(at + LATENCY, relay, name, part)
        else:
            self._places[relay].wanted[part].append(name)

    def _ask_hub(self, at: float, name: str, part: int, tried: int) -> None:
        """The hub sends the part, or refuses it for now."""
        place = self._places[name]
        waited = None if place.refused is None else at - place.refused
        if not self._children or hub_serves(self._plan[name], self.copies, waited):
            self._send(at + LATENCY, HUB, name, part)
            return
        place.refused = at if place.refused is None else place.refused
        pause = PAUSES[min(tried, len(PAUSES) - 1)]
        self._later(at + pause, lambda at: self._ask(at, name, part, tried + 1))

    def _send(self, at: float, parent: str, name: str, part: int) -> None:
        giver, taker = self._places[parent], self._places[name]
        begin = max(at, giver.sends_from)
        giver.sends_from = begin + self._unit / SPEED
        giver.sent += 1
        taker.takes_from = max(begin, taker.takes_from) + self._unit / SPEED
        self._later(taker.takes_from, lambda at: self._arrived(at, name, part))

    def _arrived(self, at: float, name: str, part: int) -> None:
        self.seconds = at
        place = self._places[name]
        place.has.add(part)
        for child in place.wanted.pop(part, ()):
            self._send(at, name, child, part)
        if queue := self._queues[name, self._stripe(part)]:
            self._ask(at, name, queue.popleft())

    def _give_up(self, at: float, name: str, part: int, relay: str) -> None:
        """A relay did not answer: the hub hears it, and is asked for the part meanwhile."""
        if relay not in self._places[name].lost:
            self._places[name].lost.add(relay)
            self._later(at + LATENCY, lambda at: self._hear(at, name, relay))
        self._ask(at, name, part)

    def _hear(self, at: float, name: str, relay: str) -> None:
        """A follower reports that a relay gave nothing: the hub plans anew, and the follower hears its new relays.

        All that live have reported by now that they pull (`HEARD_SECONDS`), so the hub knows who is silent.
        """
        self._complained.add(relay)
        hosts = [
            replace(
                host,
                is_used=host.name not in self._complained,
                is_silent=host.name in self._dead,
                avoids=frozenset(self._places[host.name].lost),
            )
            for host in self._known
        ]
        self._plan = plan_relays(hosts, self._children, self._plan)
        self._later(at + LATENCY, lambda _: self._name(name))

    def _report(self, at: float, name: str) -> None:
        """A follower that still pulls says so, and hears which relays it has by now."""
        if len(self._places[name].has) < self._parts:
            self._later(at + LATENCY, lambda _: self._name(name))
            self._later(at + REPORTS, partial(self._report, name=name))

    def _name(self, name: str) -> None:
        self._places[name].named = self._plan[name]


def _planned(children: int) -> list[RelayHost]:
    """The followers, as they come one after another."""
    hosts: list[RelayHost] = []
    for number in range(HOSTS):
        home = home_of("", hosts, children) if children else None
        hosts.append(RelayHost(name=f"host{number}", number=number, home=home))
    return hosts


def hosts_simulated(folder: Path) -> list[Figure]:
    """Full versions and deltas, by children of each relay, with and without dead hosts."""
    del folder
    return [figure for children in CHILDREN for figure in _figures(children)]


def _figures(children: int) -> list[Figure]:
    found: list[Figure] = []
    for kind, size in (("full", FULL), ("1 % delta", DELTA)):
        unit = block_for(int(size))
        alone = -(-int(size) // unit) * unit / SPEED
        for dead in (0.0, DEAD) if children else (0.0,):
            done = Transfer(int(size), unit, children, dead).run()
            name = f"simulated: {kind} to {HOSTS} hosts, k = {children}" + (f", {dead:.0%} dead" if dead else "")
            detail: dict[str, Any] = {
                "simulated": True,
                "engines": HOSTS * ENGINES,
                "bytes": int(size),
                "seconds of one follower alone": round(alone, 2),
                "copies that the hub sends": round(done.copies, 2),
            }
            is_promised = kind == "full" and children > 1 and not dead
            limit = 1.5 * alone if is_promised else 1.01 * HOSTS * alone  # no worse than each from the hub
            found.append(Figure(name=name, measured=round(done.seconds, 2), unit="s", limit=limit, detail=detail))
    return found
