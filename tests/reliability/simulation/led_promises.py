"""What holds where a hub leads its hosts: they serve what was ordered, and its orders are those of its update."""

from typing import TYPE_CHECKING

from refitd.policy.chain import NoBase, chain_of
from refitd.state.records import AttemptRecord, EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.follow import OrderState
from refitd_client.contract.states import EngineState, VersionState
from refitd_hosts.follow.orders import LEADERS
from refitd_hosts.hub.engine import NOTHING_PROVED

from .forgetting import ForgettingHubPromises
from .hosts import HostPromises
from .promises import RUN
from .server import SimServer

if TYPE_CHECKING:
    from .led_hosts import LedHost, LedHosts


def _may_order_back(engine: EngineRecord) -> bool:
    """Whether the hub may bring a host to the last good version, from whatever it serves: its contents are in doubt, an
    operator has asked for a load, or at the last look it proved nothing, as while it mends one that was restarted.
    """
    proves_nothing = engine.serving is None and engine.contents.model_path == NOTHING_PROVED
    return not engine.known or engine.debts.reload or proves_nothing


class LedHostPromises(HostPromises):
    """What holds on a host that is led: it goes where its hub has ordered it, and nowhere by itself."""

    _world: "LedHost"

    def served(self, server: SimServer) -> None:
        """See `Promises`. A host counts as an engine, so what its engines hold is what the hub's engines hold."""
        super().served(server)
        self._world.world.promises.holds(server)

    def hold_now(self) -> None:
        """A host desires only what its hub ordered, and remembers the newest lead that it obeyed: of the last hubs, as
        many as its record has room for. Each hub that is emptied has another name.
        """
        super().hold_now()
        if self._world.life is None:
            return
        world, name = self._world.world, self._world.name
        desired = self._life.store.runs.desired.get(RUN)
        assert desired is None or desired in world.book.given[name], (
            f"{name} is to serve {desired}, which its hub never ordered"
        )
        lead = self._life.store.origin.lead
        for leader, newest in world.book.fences[name].items():
            assert lead.leader, f"{name} is led by nobody"
            if leader not in lead.heard and len(lead.heard) == LEADERS:
                continue
            known = lead.heard.get(leader, 0)
            assert known >= newest, f"{name} has forgotten epoch {newest} of {leader}, and knows {known}"

    def _is_wanted(self, version: str) -> bool:
        """An order that is taken back while engines are brought to a delta leaves them on what that stands on."""
        given, beneath = self._world.world.book.given[self._world.name], self._world.world.promises.beneath
        return version in given or any(version in beneath.get(each or "", ()) for each in given)

    def _may_go_back(self, version: str) -> bool:
        """So does who was ordered back: what it was ordered to was refused, or its contents were in doubt."""
        return version in self._world.world.book.back[self._world.name] or super()._may_go_back(version)


class LedHubPromises(ForgettingHubPromises):
    """What holds at a hub that leads: each order is one of its update, and in the end each host serves the target."""

    _world: "LedHosts"

    def __init__(self, world: "LedHosts") -> None:
        super().__init__(world)
        self._aims: dict[str, str] = {}  # by engine, what a host is being brought to

    def is_another(self, notices: frozenset[str]) -> None:
        super().is_another(notices)
        self._aims.clear()

    def attempt_changed(self, attempt: AttemptRecord) -> None:
        super().attempt_changed(attempt)
        engine = self._life.store.engines.get(attempt.engine)
        if attempt.outcome is not None or engine is None or not self._world.leads(engine):
            return
        goals = self._life.targets.of_engine(engine)  # it may serve what it is to be loaded with again
        known = {goal.id for goal in (goals.target, goals.loadable, goals.last_good) if goal is not None}
        assert attempt.version in known, f"{engine.id} is brought to {attempt.version}, and its goals are {known}"
        self._aims[attempt.engine] = attempt.version
        self._world.book.decided(attempt.engine)

    def ordered(self, host: str, version: str | None) -> None:
        """The hub tells a host what to serve: what it is bringing the host to, or what that served before."""
        book, engine = self._world.book, self._world.record_of(host)
        aim = self._aims.get(host)
        if version != aim:
            before = version is None or version in book.given[host]
            assert before, f"{host} is ordered to serve {version}, is being brought to {aim}, and never was there"
        book.given[host].add(version)
        if version is not None and (version != aim or engine is None or _may_order_back(engine)):
            here = self._life.store.versions.get(version)
            book.back[host].update(
                each.id for each in self._life.store.versions.values() if here is None or each.order > here.order
            )

    def hold_in_the_end(self) -> None:
        """Each host serves the target, and the hub's record of it says so."""
        super().hold_in_the_end()
        target = self._life.targets.of_run(RUN).target
        if target is None or not self._is_for_hosts(target):
            return
        for host in self._world.hosts:
            record, told = self._world.record_of(host.name), host.following()
            state = f"{target.id} is the target, {host.name} says {told}, and the hub of it {record}"
            assert record is not None, state
            assert record.state is EngineState.IN_SYNC, f"11: {state}"
            assert record.serving == told.serves == told.desired == target.id, f"11: {state}"
            assert record.contents.weight_version == target.label, f"11: {state}"
            assert (told.order, told.leads, told.leader) == (OrderState.SERVED, True, self._world.service), (
                f"11: {state}"
            )
            assert told.fence <= self._world.highest, f"{host.name} is led by an epoch that never was: {state}"
            self._holds_these_bytes(host, target, state)

    def _holds_these_bytes(self, host: "LedHost", target: VersionRecord, state: str) -> None:
        """3: a host that serves the target holds what lies at the hub, and nothing else that had the name."""
        assert host.life is not None
        content = self._world.disk.folders[target.path].content
        for engine in host.life.store.engines.values():
            server = host.server_of(engine)
            if engine.state is EngineState.IN_SYNC and engine.serving == target.id and server.up:
                assert set(server.tensors) == {content}, (
                    f"3: {engine.id} holds {server.tensors}, not {content}: {state}"
                )

    def _is_for_hosts(self, target: VersionRecord) -> bool:
        """Whether hosts can have it: its publisher is refitd's, and its trainer has deleted nothing beneath it."""
        is_there = target.state is VersionState.SEALED and target.files.owned
        return is_there and not isinstance(chain_of(target, self._life.store.versions), NoBase)
