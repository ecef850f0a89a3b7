"""Several hosts that their hub leads: it sees each of them as an engine, and orders what it serves."""

import random
from collections.abc import Collection

from refitd.engine.plugin import Leads
from refitd.policy.strategy import StrategyName
from refitd.state.records import EngineRecord
from refitd_client.contract.follow import HostReply
from refitd_client.contract.naming import parse_version_id
from refitd_client.contract.plugin import Owner
from refitd_hosts.hub.reported import ReportedHosts

from .forgetting import ForgettingHosts
from .hosts import HUB, Host
from .led_promises import LedHostPromises, LedHubPromises
from .life import Life
from .links import Damage
from .orders import OrderBook, Stage
from .world import RUN

GROUPED = 0.5  # of the hubs
ALONE = 0.5  # of the hubs have no engines of their own
ORDER_SECONDS = 5.0  # in which an order comes that is waited for


class LedHost(Host):
    """A host that its hub leads."""

    world: "LedHosts"
    is_free = False
    _is_unwritten = False  # whether the journal did not hold all when the process was killed

    def _promises(self) -> LedHostPromises:
        return LedHostPromises(self)

    def kill(self) -> None:
        self._is_unwritten = self._is_unwritten or (self.life is not None and bool(self.life.journal._queue))
        super().kill()

    def start(self) -> None:
        """See `Place`. A reply that the journal did not hold yet when the process was killed counts as one that was
        lost on the way: nothing that it ordered was done, since what is done is written down first, after the reply.
        """
        super().start()
        if self._is_unwritten and self.life is not None:
            self._is_unwritten = False
            known, fences = self.life.store.origin.lead.heard, self.world.book.fences[self.name]
            kept = {leader: min(epoch, known[leader]) for leader, epoch in fences.items() if leader in known}
            self.world.book.fences[self.name] = kept


class LedHosts(ForgettingHosts):
    """A world in which the hub leads its hosts.

    A hub of a group leads with another epoch after each start, as another one of its services; one that is alone has
    epoch 0 for ever.
    """

    promises: LedHubPromises

    def __init__(
        self, seed: int, *, strategy: StrategyName = StrategyName.ALL, vllm: str = "", followers: int = 2
    ) -> None:
        chance = random.Random(~seed)
        self.is_grouped = chance.random() < GROUPED
        self._is_alone = chance.random() < ALONE
        self.epoch = self.highest = 1 if self.is_grouped else 0
        self.book = OrderBook()
        super().__init__(seed, strategy=strategy, vllm=vllm, followers=followers)

    @property
    def urls(self) -> list[str]:
        return [] if self._is_alone else super().urls

    def leading(self, life: Life) -> ReportedHosts:
        return ReportedHosts(
            life.store,
            self.clock,
            Leads(owner=Owner(service=self.service, root="/root", host=HUB, pid=1, epoch=self.epoch)),
        )

    def heard_report(self, name: str, reply: HostReply) -> bool:
        self.book.reported(name)
        if not self.book.replied(name, reply):
            return False
        for version in reply.serve.values():
            self.promises.ordered(name, version)
        return True

    def heard_reply(self, name: str, reply: HostReply, *, is_new: bool) -> None:
        self.book.heard(name, reply, is_new=is_new)

    def start(self) -> None:
        if self.life is None and self.is_grouped:
            self.epoch += 1
            self.highest = max(self.highest, self.epoch)
        super().start()

    def _host(self, name: str, vllm: str) -> LedHost:
        return LedHost(name, self, vllm)

    def _promises(self) -> LedHubPromises:
        return LedHubPromises(self)

    def record_of(self, name: str) -> EngineRecord | None:
        """The hub's record of a host; None while the hub is dead, or does not know the host yet."""
        return None if self.life is None else self.life.store.engines.get(name)

    def wants_operator(self, engine: EngineRecord, tended: Collection[str]) -> bool:
        if not super().wants_operator(engine, tended):
            return False
        lives = [(host, host.life) for host in self.hosts if self.leads(engine) and host.life is not None]
        return not any(
            host.wants_operator(each, tended) for host, life in lives for each in life.store.engines.values()
        )

    # What may happen beside.

    def cut_orders(self, index: int, *, cut: bool) -> None:
        self.host(index).links[HUB].cut = cut

    def damage_orders(self, index: int, orders: list[Damage], others: list[Damage]) -> None:
        """The next orders to a host are lost, not answered or late, and the hub's next questions."""
        self.host(index).links[HUB].answers.extend([*orders, *others])

    def until_an_order(self, index: int, stage: Stage, since: int | None = None) -> None:
        """Wait until an order to a host has come to a stage, one more than `since`. It may not come."""
        self.loop.run_until_complete(self.book.reaches(self.host(index).name, stage, ORDER_SECONDS, since))

    def order_as_another(self, index: int, number: int, *, behind: int) -> None:
        """A service of the hub's group whose lead is over replies to a host, by its epoch that is so far behind: it is
        not obeyed.
        """
        host = self.host(index)
        newest = self.book.fences[host.name].get(self.service)
        if host.life is None or host.life.follower is None or newest is None or behind > newest:
            return  # the host is down, or was never told anything, or its hub has not led that often
        known = sorted(host.life.store.versions, key=parse_version_id)
        version = known[number % len(known)] if known else None
        before = host.following().desired
        reply = HostReply(lease_seconds=30.0, serve={RUN: version}, leader=self.service, epoch=newest - behind)
        host.life.follower._answered(reply)
        told = host.following()
        assert told.refused is not None, f"{host.name} obeys {reply}"
        assert told.desired == before, f"{host.name} refuses {reply}, and goes there"
        self.counts["refused orders"] += 1
