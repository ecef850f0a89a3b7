"""Which follower pulls from which, so that the hub sends few copies. Pure: who there is, and who pulled from whom.

A version is pulled in as many stripes as a follower may have children, k: its blocks, counted through all of its files,
are of the stripes in turns. Each stripe has a tree of its own. A follower hands on in one of the trees alone, which is
its home, a k-th of a version to each of k children: nobody sends more than one copy, and a tree's depth grows with the
logarithm of the followers. (Castro et al., "SplitStream: high-bandwidth multicast in cooperative environments",
SOSP 2003.) The first of each tree pulls from the hub, which so sends one copy in all.

In each stripe followers have an order that never changes: those at home there by their number, then those at home
elsewhere, then those that nobody can reach. A follower pulls only from one before it. So nobody waits for itself, also
while some still go by an older plan.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Parents = tuple[str | None, ...]
"""From whom a follower pulls, a name by stripe; None is the hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayHost:
    """A follower, as far as the plan depends on it.

    Attributes:
        name: unique.
        number: in which order followers came; unique.
        home: the stripe in which it hands on; None where others cannot reach it.
        zone: label of its place; followers pull within a zone where they can.
        is_used: whether others pull from it; not while it counts as dead, or if it gave wrong bytes.
        avoids: names of followers that it does not pull from, because they did not give it what it asked for.
    """

    name: str
    number: int
    home: int | None
    zone: str = ""
    is_used: bool = True
    avoids: frozenset[str] = frozenset()


def home_of(zone: str, hosts: Iterable[RelayHost], children: int) -> int:
    """The stripe in which a new follower hands on: where the fewest do in its zone, then where the fewest do at all."""
    there = [(host.zone == zone, host.home) for host in hosts if host.home is not None]
    in_zone = Counter(home for is_near, home in there if is_near)
    in_all = Counter(home for _, home in there)
    return min(range(children), key=lambda stripe: (in_zone[stripe], in_all[stripe], stripe))


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
    for name, parents in (before or {}).items():
        trees.keep(name, parents)
    for stripe in range(children):
        trees.attach(stripe, at_home=True)
    for stripe in range(children):  # the tree of another stripe may have left something over
        trees.attach(stripe, at_home=False)
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
        child = self._hosts.get(name)
        if child is None or len(parents) != len(self._parents[name]):
            return
        for stripe, parent in enumerate(parents):
            known = None if parent is None else self._hosts.get(parent)
            if known is not None and self._may(child, known) and _rank(known, stripe) < _rank(child, stripe):
                self._join(child, known, stripe)

    def attach(self, stripe: int, *, at_home: bool) -> None:
        """Give those without a parent one that is before them: of those at home in the stripe, or of all."""
        depth: dict[str, int] = {}
        earlier: list[RelayHost] = []
        for host in self._order[stripe]:
            if self._parents[host.name][stripe] is None:
                nearest = min(
                    (each for each in earlier if self._may(host, each)),
                    key=lambda each: (each.zone != host.zone, depth[each.name], each.number),
                    default=None,
                )
                if nearest is not None:
                    self._join(host, nearest, stripe)
            parent = self._parents[host.name][stripe]
            depth[host.name] = 0 if parent is None else depth.get(parent, 0) + 1
            if host.home == stripe or not at_home:
                earlier.append(host)

    def _may(self, child: RelayHost, parent: RelayHost) -> bool:
        return self._spare[parent.name] > 0 and parent.name not in child.avoids

    def _join(self, child: RelayHost, parent: RelayHost, stripe: int) -> None:
        self._spare[parent.name] -= 1
        self._parents[child.name][stripe] = parent.name


def _rank(host: RelayHost, stripe: int) -> tuple[bool, bool, int]:
    return host.home != stripe, host.home is None, host.number
