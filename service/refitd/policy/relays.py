"""Which follower pulls from which, so that the hub sends few copies. Pure: who there is, and who pulled from whom.

A version is pulled in as many stripes as a follower may have children, k: its blocks, counted through all of its files,
are of the stripes in turns. Each stripe has a tree of its own. A follower hands on in one of the trees alone, which is
its home, a k-th of a version to each of k children: nobody sends more than one copy, and a tree's depth grows with the
logarithm of the followers. (Castro et al., "SplitStream: high-bandwidth multicast in cooperative environments",
SOSP 2003.) The first of each tree pulls from the hub, which so sends one copy in all.

In each stripe followers have an order that never changes: those at home there by their number, then those at home
elsewhere, then those that nobody can reach. A follower pulls only from one before it. So nobody waits for itself, also
while some still go by an older plan.

Who is silent may be dead: it gets a relay after all others, and a place that another needs is taken from it. A dead
follower leaves as many places as its children need, so that these need not go to the hub.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Parents = tuple[str | None, ...]
"""From whom a follower pulls, a name by stripe; None is the hub."""
REFUSED_SECONDS = 3.0  # after which the hub serves a follower all the same


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayHost:
    """A follower, as far as the plan depends on it.

    Attributes:
        name: unique.
        number: in which order followers came; unique.
        home: the stripe in which it hands on; None where others cannot reach it.
        zone: label of its place; followers pull within a zone where they can.
        is_used: whether others pull from it; not while it counts as dead, or if it gave wrong bytes.
        is_silent: whether it has not reported as it should have, so that it may be dead.
        avoids: names of followers that it does not pull from, because they did not give it what it asked for.
    """

    name: str
    number: int
    home: int | None
    zone: str = ""
    is_used: bool = True
    is_silent: bool = False
    avoids: frozenset[str] = frozenset()


def home_of(zone: str, hosts: Iterable[RelayHost], children: int) -> int:
    """The stripe in which a new follower hands on: where the fewest do in its zone, then where the fewest do at all."""
    there = [(host.zone == zone, host.home) for host in hosts if host.home is not None]
    in_zone = Counter(home for is_near, home in there if is_near)
    in_all = Counter(home for _, home in there)
    return min(range(children), key=lambda stripe: (in_zone[stripe], in_all[stripe], stripe))


def hub_serves(parents: Parents, copies: float, refused: float | None) -> bool:
    """Whether the hub gives blocks of a version to a follower that asks it for them.

    Whoever asks gets them until as many copies of the version were sent as it has stripes. From then on a follower that
    has a relay for each stripe is to ask those again; one that was refused for a while is served for good.

    Args:
        parents: whom the plan names to the follower.
        copies: of the version that the hub has sent.
        refused: seconds since it first refused the version to this follower, None where it has not.
    """
    return copies < len(parents) or None in parents or (refused is not None and refused >= REFUSED_SECONDS)


def plan_relays(
    hosts: Sequence[RelayHost], children: int, before: Mapping[str, Parents] | None = None
) -> dict[str, Parents]:
    """Decide from whom each follower pulls each stripe.

    Args:
        hosts: the followers of a run.
        children: how many each may have at most, over all stripes; as many stripes there are.
        before: the plan so far. What of it still can be stays; what came from the hub is decided anew.
    """
    trees = _Trees(hosts, children)
    for is_silent in (False, True):
        for host in hosts:
            if host.is_silent is is_silent and before is not None and host.name in before:
                trees.keep(host.name, before[host.name])
        for stripe in range(children):
            trees.attach(stripe, at_home=True, is_silent=is_silent)
        for stripe in range(children):  # the tree of another stripe may have left something over
            trees.attach(stripe, at_home=False, is_silent=is_silent)
    return trees.plan


class _Trees:
    """The trees while they grow. `spare` is how many more children a follower may have."""

    def __init__(self, hosts: Sequence[RelayHost], children: int) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._parents: dict[str, list[str | None]] = {host.name: [None] * children for host in hosts}
        self._spare = {host.name: children if host.is_used and host.home is not None else 0 for host in hosts}
        self._order = [sorted(hosts, key=lambda host, at=stripe: _rank(host, at)) for stripe in range(children)]

    @property
    def plan(self) -> dict[str, Parents]:
        return {name: tuple(parents) for name, parents in self._parents.items()}

    def keep(self, name: str, parents: Parents) -> None:
        """Leave a follower with the parents that it had, as far as they may be."""
        child = self._hosts[name]
        if len(parents) != len(self._parents[name]):
            return
        for stripe, parent in enumerate(parents):
            known = None if parent is None else self._hosts.get(parent)
            if known is not None and self._may(child, known) and _rank(known, stripe) < _rank(child, stripe):
                self._join(child, known, stripe)

    def attach(self, stripe: int, *, at_home: bool, is_silent: bool) -> None:
        """Give those without a parent one that is before them: of those at home in the stripe, or of all.

        Args:
            stripe: whose tree grows.
            at_home: whether only those at home there get children.
            is_silent: whether those that are silent get a parent, or those that are not.
        """
        earlier = _Earlier(self._spare)
        depth: dict[str, int] = {}
        for host in self._order[stripe]:
            parents = self._parents[host.name]
            if parents[stripe] is None and host.is_silent is is_silent:
                nearest = earlier.nearest(host) or self._freed(host, stripe, depth)
                if nearest is not None:
                    self._join(host, nearest, stripe)
            parent = parents[stripe]
            depth[host.name] = 0 if parent is None else depth.get(parent, 0) + 1
            if host.home == stripe or not at_home:
                earlier.add(host, depth[host.name])

    def _freed(self, host: RelayHost, stripe: int, depth: Mapping[str, int]) -> RelayHost | None:
        """One before the follower, which is at home in the stripe: a child gives way, as another can take it.

        A child that is not at home there can go anywhere. Where those before the follower have none of that kind, the
        last child gives way that comes after the follower: it gets a place in its turn, where there is more choice.
        """
        room = [each for each in self._hosts.values() if each.home == stripe and self._spare[each.name] > 0]
        if host.home != stripe or host.is_silent or not room:
            return None
        found: list[tuple[tuple[bool, int, bool, int, int], RelayHost, RelayHost]] = []
        for child in self._order[stripe]:
            name = self._parents[child.name][stripe]
            if name is None or name not in depth or name in host.avoids:
                continue
            is_home = child.home == stripe
            if is_home and child.number <= host.number:
                continue
            if is_home or any(each.name not in child.avoids for each in room):
                parent = self._hosts[name]
                last = -child.number if is_home else depth[name]
                found.append(((is_home, last, parent.zone != host.zone, depth[name], parent.number), child, parent))
        if not found:
            return None
        _, child, parent = min(found, key=lambda each: each[0])
        self._parents[child.name][stripe] = None
        self._spare[parent.name] += 1
        return parent

    def _may(self, child: RelayHost, parent: RelayHost) -> bool:
        return self._spare[parent.name] > 0 and parent.name not in child.avoids

    def _join(self, child: RelayHost, parent: RelayHost, stripe: int) -> None:
        self._spare[parent.name] -= 1
        self._parents[child.name][stripe] = parent.name


class _Earlier:
    """Those that come before a follower and may have children, the flattest first."""

    def __init__(self, spare: Mapping[str, int]) -> None:
        self._spare = spare
        self._heaps: dict[bool, dict[str, list[tuple[int, int, RelayHost]]]] = {False: {}, True: {}}

    def add(self, host: RelayHost, depth: int) -> None:
        """One more."""
        if self._spare[host.name] > 0:
            heapq.heappush(self._heaps[host.is_silent].setdefault(host.zone, []), (depth, host.number, host))

    def nearest(self, child: RelayHost) -> RelayHost | None:
        """Whom a follower is to pull from: one that is not silent, of its zone, with a short way from the hub."""
        for heaps in self._heaps.values():
            at_hand = self._first(heaps.get(child.zone, []), child)
            far = () if at_hand else (self._first(heap, child) for zone, heap in heaps.items() if zone != child.zone)
            found = at_hand or min((each for each in far if each), default=None)
            if found is not None:
                return found[2]
        return None

    def _first(self, heap: list[tuple[int, int, RelayHost]], child: RelayHost) -> tuple[int, int, RelayHost] | None:
        """The first of a zone that has room and that the follower does not avoid. Drops those that are full."""
        aside: list[tuple[int, int, RelayHost]] = []
        found = None
        while heap and found is None:
            first = heap[0]
            if self._spare[first[2].name] > 0 and first[2].name not in child.avoids:
                found = first
            elif self._spare[first[2].name] > 0:
                aside.append(heapq.heappop(heap))
            else:
                heapq.heappop(heap)
        for each in aside:
            heapq.heappush(heap, each)
        return found


def _rank(host: RelayHost, stripe: int) -> tuple[bool, bool, int]:
    return host.home != stripe, host.home is None, host.number
