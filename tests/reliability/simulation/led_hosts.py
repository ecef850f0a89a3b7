"""Several hosts that their hub leads: it sees each of them as an engine, and orders what it serves."""

import random
from collections.abc import Collection
from types import SimpleNamespace
from unittest import mock

from refitd.engine.engines_file import EngineSpec
from refitd.engine.kind import HOST_KIND
from refitd.engine.port import EnginePort
from refitd.engine.refitd import adapter
from refitd.policy.strategy import StrategyName
from refitd.rollout.hosts import ReportedHosts
from refitd.state.records import EngineRecord
from refitd_client.contract.follow import HostOrder
from refitd_client.contract.naming import parse_version_id

from .hosts import HUB, Host, Hosts
from .led_promises import LedHostPromises, LedHubPromises
from .life import Life
from .links import Damage, Link
from .orders import HostTransport, LedHostEngine, OrderBook, Stage, is_refused, leads_as
from .place import url_of
from .world import RUN

GROUPED = 0.5  # of the hubs
ALONE = 0.5  # of the hubs have no engines of their own
ORDER_SECONDS = 5.0  # in which an order comes that is waited for
OTHER_HUB = "another hub"


class LedHost(Host):
    """A host that its hub leads."""

    world: "LedHosts"

    def _promises(self) -> LedHostPromises:
        return LedHostPromises(self)


class LedHosts(Hosts):
    """A world in which the hub leads its hosts, which its settings name.

    A hub of a group leads with another epoch after each start, as another one of its services; one that is alone has
    epoch 0 for ever.
    """

    def __init__(
        self, seed: int, *, strategy: StrategyName = StrategyName.ALL, vllm: str = "", followers: int = 2
    ) -> None:
        chance = random.Random(~seed)
        self.is_grouped = chance.random() < GROUPED
        self._is_alone = chance.random() < ALONE
        self._names = [f"host{number}" for number in range(followers)]
        self.epoch = 1 if self.is_grouped else 0
        self.book = OrderBook()
        self.links: dict[str, Link] = {}
        super().__init__(seed, strategy=strategy, vllm=vllm, followers=followers)
        time = SimpleNamespace(monotonic=self.loop.time)
        self._patches.enter_context(mock.patch.object(adapter, "time", time))

    @property
    def urls(self) -> list[str]:
        """See `Place`."""
        own = [] if self._is_alone else super().urls
        return [*own, *(f"{HOST_KIND}={url_of(name)}" for name in self._names)]

    def connect(self, spec: EngineSpec, life: Life) -> EnginePort:
        """See `Place`."""
        if spec.engine != HOST_KIND:
            return super().connect(spec, life)
        name = spec.url.removeprefix("http://").removesuffix(":1")

        def sends(order: HostOrder) -> None:
            self.promises.ordered(name, order)

        transport = HostTransport(self.links[name], life, self.book, sends)
        return LedHostEngine(spec.url, transport, leads_as(HUB, self.epoch))

    def leading(self, life: Life) -> ReportedHosts:
        """See `Place`."""
        return ReportedHosts(life.store, life.fleet, self.clock, lambda _, __: None, takes=False, leader=HUB)

    def start(self) -> None:
        """See `Place`."""
        if self.life is None and self.is_grouped:
            self.epoch += 1
        super().start()

    def mend(self) -> None:
        """See `Place`."""
        for link in self.links.values():
            link.mend()
        super().mend()

    def close(self) -> None:
        """See `World`."""
        self.book.close()
        super().close()

    def hold(self) -> None:
        """See `World`."""
        assert not self.book.wrong, self.book.wrong
        super().hold()

    def _host(self, name: str, vllm: str) -> LedHost:
        return LedHost(name, self, vllm)

    def _link_hub(self) -> None:
        for host in self.hosts:
            self.links[host.name] = Link(host, random.Random(self.chance.random()), self.counts)

    def _promises(self) -> LedHubPromises:
        return LedHubPromises(self)

    def links_of(self, host: Host) -> list[Link]:
        """See `Hosts`. The hub's link to it among them."""
        return [self.links[host.name], *super().links_of(host)]

    def record_of(self, name: str) -> EngineRecord | None:
        """The hub's record of a host; None while the hub is dead, or does not know the host yet."""
        return None if self.life is None else self.life.store.engines.get(f"{name}:1")

    def wants_operator(self, engine: EngineRecord, tended: Collection[str]) -> bool:
        """See `Place`. What is wrong on a host is mended there first."""
        if not super().wants_operator(engine, tended):
            return False
        lives = [(host, host.life) for host in self.hosts if self.leads(engine) and host.life is not None]
        return not any(
            host.wants_operator(each, tended) for host, life in lives for each in life.store.engines.values()
        )

    # What may happen beside.

    def cut_orders(self, index: int, *, cut: bool) -> None:
        """A host cannot be called from its hub any more, and hears it as before."""
        self.links[self.host(index).name].cut = cut

    def damage_orders(self, index: int, orders: list[Damage], others: list[Damage]) -> None:
        """The next orders to a host are lost, not answered or late, and the hub's next questions."""
        link = self.links[self.host(index).name]
        link.parts.extend(orders)
        link.answers.extend(others)

    def until_an_order(self, index: int, stage: Stage) -> None:
        """Wait until an order to a host has come to a stage. It may not come."""
        self.loop.run_until_complete(self.book.reaches(self.host(index).name, stage, ORDER_SECONDS))

    def order_as_another(self, index: int, number: int, *, behind: int, again: bool) -> None:
        """Somebody who does not lead a host orders it something: a service of the hub's group whose lead is over, by
        its epoch that is so far behind, or for 0 another hub. Nothing of that is obeyed.
        """
        host = self.host(index)
        newest = self.book.fences.get(host.name)
        if host.life is None or newest is None or behind > newest:
            return  # the host is down, or was never ordered anything, or its hub has not led that often
        known = sorted(host.life.store.versions, key=parse_version_id)
        version = known[number % len(known)] if known else None
        leader, fence = (HUB, newest - behind) if behind else (OTHER_HUB, newest + 1)
        order = HostOrder(run=RUN, version=version, fence=fence, leader=leader, told_by=OTHER_HUB, again=again)
        before = host.following().desired
        assert self.loop.run_until_complete(is_refused(order, host.life)), f"{host.name} obeys {order}"
        assert host.following().desired == before, f"{host.name} refuses {order}, and goes there"
        self.counts["refused orders"] += 1
