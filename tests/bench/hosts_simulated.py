"""How long 1,000 hosts take to get a version, and what the hub sends: a model of links, with the product's own plan.

A discrete-event model. Each host has one link, whose two directions each carry one block after another at its speed. A
follower asks its parent of each stripe, as `policy/relays.py` has planned it, for its blocks in order, some at a time;
a parent hands a block on when it has it whole. Disks, checks and engines are left out: what one host takes to check a
version and to load it into its engines, which hosts do at the same time, comes on top.

A dead host answers nothing: its children give it up after `GIVEN_UP` seconds, tell the hub, and have another parent.
The hub does not know that it is dead, and has others send to it, until its lease ends and the others report again.
"""

import heapq
import random
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from figures import Figure

from refitd.follow.byte_source import CONNECT_SECONDS as GIVEN_UP
from refitd.follow.transfer import PARTS
from refitd.policy.relays import Parents, RelayHost, home_of, plan_relays
from refitd.state.followers import LEASE_SECONDS
from refitd_client.contract.manifest import BLOCK

HOSTS, ENGINES = 1000, 8
SPEED = 10e9 / 8  # bytes a second, in each direction of a link
LATENCY = 0.0005  # seconds from a request to the first byte of its answer
FULL = 15.2e9  # bytes of a model of 7.6 billion parameters in bfloat16
DELTA = FULL * 0.01 * 3  # of 1 % of the elements, each with its index
CHILDREN = (0, 1, 2, 4, 8)
DEAD = 0.05
FORGOTTEN = LEASE_SECONDS * 4 / 3  # when the hub has forgotten a dead host, and the others have reported again
HUB = "hub"


@dataclass(slots=True)
class _Place:
    """A host. Each direction of its link is free from a time on; `wanted` are requests for blocks that it lacks."""

    sends_from: float = 0.0
    takes_from: float = 0.0
    has: set[int] = field(default_factory=set[int])
    wanted: dict[int, list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))
    sent: int = 0


class Transfer:
    """One version on its way to all hosts."""

    def __init__(self, blocks: int, children: int, dead: float, seed: int = 1) -> None:
        self._blocks = blocks
        self._stripes = max(children, 1)
        self._known = _planned(children)
        self._plan: dict[str, Parents] = {}
        self._plan = plan_relays(self._known, children) if children else {host.name: (None,) for host in self._known}
        chance = random.Random(seed)
        self._dead = set(chance.sample([host.name for host in self._known], int(dead * len(self._known))))
        self._places = {host.name: _Place() for host in self._known}
        self._places[HUB] = _Place(has=set(range(blocks)))
        self._events: list[tuple[float, int, str, int]] = []
        self._count = 0
        self._queues: dict[tuple[str, int], deque[int]] = {}
        self._given_up = False
        self.seconds = 0.0

    def run(self) -> "Transfer":
        """Until every host that is alive has every block."""
        alive = [host.name for host in self._known if host.name not in self._dead]
        for name in alive:
            for stripe in range(self._stripes):
                queue = deque(range(stripe, self._blocks, self._stripes))
                self._queues[name, stripe] = queue
                for _ in range(min(-(-PARTS // self._stripes), len(queue))):
                    self._ask(0.0, name, queue.popleft())
        if self._dead:
            self._later(FORGOTTEN, HUB, 0)
        while self._events:
            at, _, name, block = heapq.heappop(self._events)
            if name == HUB:
                self._plan_anew([host for host in self._known if host.name not in self._dead])
            elif block < 0:
                self._give_up(at, name, -block - 1)
            else:
                self._arrived(at, name, block)
        if any(len(self._places[name].has) < self._blocks for name in alive):
            raise RuntimeError("a host that is alive waits for ever")
        return self

    @property
    def copies(self) -> float:
        """How many copies of the version the hub has sent."""
        return self._places[HUB].sent / self._blocks

    def _ask(self, at: float, name: str, block: int) -> None:
        parent = self._plan[name][block % self._stripes] or HUB
        if parent in self._dead:
            self._later(at + GIVEN_UP, name, -block - 1)
        elif block in self._places[parent].has:
            self._send(at + LATENCY, parent, name, block)
        else:
            self._places[parent].wanted[block].append((name, block))

    def _send(self, at: float, parent: str, name: str, block: int) -> None:
        giver, taker = self._places[parent], self._places[name]
        begin = max(at, giver.sends_from)
        giver.sends_from = begin + BLOCK / SPEED
        giver.sent += 1
        taker.takes_from = max(begin, taker.takes_from) + BLOCK / SPEED
        self._later(taker.takes_from, name, block)

    def _later(self, at: float, name: str, block: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, name, block))

    def _arrived(self, at: float, name: str, block: int) -> None:
        self.seconds = at
        place = self._places[name]
        place.has.add(block)
        for child, wanted in place.wanted.pop(block, ()):
            self._send(at, name, child, wanted)
        if queue := self._queues[name, block % self._stripes]:
            self._ask(at, name, queue.popleft())

    def _give_up(self, at: float, name: str, block: int) -> None:
        """The block comes from the hub, which plans anew: all children of dead hosts tell it at about this time."""
        if not self._given_up:
            self._given_up = True
            self._plan_anew([replace(host, is_used=host.name not in self._dead) for host in self._known])
        self._send(at, HUB, name, block)

    def _plan_anew(self, hosts: list[RelayHost]) -> None:
        self._plan = plan_relays(hosts, self._stripes, self._plan)


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
        blocks = -(-int(size) // BLOCK)
        alone = blocks * BLOCK / SPEED
        for dead in (0.0, DEAD) if children else (0.0,):
            done = Transfer(blocks, children, dead).run()
            name = f"simulated: {kind} to {HOSTS} hosts, k = {children}" + (f", {dead:.0%} dead" if dead else "")
            detail: dict[str, Any] = {
                "simulated": True,
                "engines": HOSTS * ENGINES,
                "bytes": blocks * BLOCK,
                "seconds of one follower alone": round(alone, 2),
                "copies that the hub sends": round(done.copies, 2),
            }
            is_promised = kind == "full" and children > 1 and not dead
            limit = 1.5 * alone if is_promised else 1.01 * HOSTS * alone  # no worse than each from the hub
            found.append(Figure(name=name, measured=round(done.seconds, 2), unit="s", limit=limit, detail=detail))
    return found
