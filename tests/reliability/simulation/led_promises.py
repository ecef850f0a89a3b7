"""What holds where a hub leads its hosts: they serve what was ordered, and its orders are those of its update."""

from typing import TYPE_CHECKING

from refitd.engine.refitd.answers import NOTHING_PROVED
from refitd.policy.aside import ANOTHER
from refitd.policy.chain import NoBase, chain_of
from refitd.state.records import AttemptRecord, EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.hosts import OrderState
from refitd_client.contract.states import EngineState, VersionState

from .hosts import HostPromises, HubPromises
from .promises import RUN
from .server import SimServer

if TYPE_CHECKING:
    from .led_hosts import LedHost, LedHosts


def _may_order_back(engine: EngineRecord) -> bool:
    """Whether the hub may bring a host to the last good version, from whatever it serves: its contents are in doubt, an
    operator has asked for a load, or at the last look it proved nothing, as while it mends one that was restarted.
    """
    proves_nothing = engine.serving is None and engine.model_path == NOTHING_PROVED
    return not engine.known or engine.reload or proves_nothing


class LedHostPromises(HostPromises):
    """What holds on a host that is led: it goes where its hub has ordered it, and nowhere by itself."""

    _world: "LedHost"

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        """See `Promises`. No rollback goes to a version whose name has other contents at the hub."""
        if after.state is not VersionState.RETIRED or after.reason != ANOTHER:
            super().version_changed(before, after)

    def served(self, server: SimServer) -> None:
        """See `Promises`. A host counts as an engine, so what its engines hold is what the hub's engines hold."""
        super().served(server)
        self._world.world.promises.holds(server)

    def hold_now(self) -> None:
        """A host desires only what its hub ordered, and remembers the newest lead that it obeyed."""
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
            known = lead.heard.get(leader, 0)
            assert known >= newest, f"{name} has forgotten epoch {newest} of {leader}, and knows {known}"

    def _holds(self, version: str, engine: str, server: SimServer) -> None:
        """3: also where the hub has lost its root and publishes other bytes under a name: what an engine is called in
        sync with are the bytes that this host has under the name.
        """
        super()._holds(version, engine, server)
        record, folder = self._life.store.versions.get(version), self._world.disk.folders.get(self._path_of(version))
        if record is not None and record.state is VersionState.SEALED and folder is not None:
            holds, has = set(server.tensors), folder.content
            assert holds == {has}, f"3: {engine} is called in sync with {version}, holds {holds}, and here lies {has}"

    def _is_wanted(self, version: str) -> bool:
        return version in self._world.world.book.given[self._world.name]

    def _may_go_back(self, version: str) -> bool:
        """So does who was ordered back: what it was ordered to was refused, or its contents were in doubt."""
        return version in self._world.world.book.back[self._world.name] or super()._may_go_back(version)


class LedHubPromises(HubPromises):
    """What holds at a hub that leads: each order is one of its update, and in the end each host serves the target."""

    _world: "LedHosts"

    def __init__(self, world: "LedHosts") -> None:
        super().__init__(world)
        self._aims: dict[str, str] = {}  # by engine, what a host is being brought to

    def holds(self, server: SimServer) -> None:
        """An engine of a host holds something."""
        self._held.update(server.tensors)

    @property
    def notices(self) -> frozenset[str]:
        """The versions whose notices were answered 2xx."""
        return frozenset(self._noticed)

    def is_another(self, notices: frozenset[str]) -> None:
        """The hub's disk was lost: it knows what its backup has, and its own engines may go back with it. Its hosts
        may not: what was promised of them stays.
        """
        self._noticed = set(notices)
        self._served &= notices
        self._restored.update(self._world.disk.folders)
        for known in (self._taken, self._proofs, self._reached, self._aims, self._freed):
            known.clear()

    def rolled_back(self, goal: str | None) -> None:
        """An operator has said where to go back to: from all that was ever published after it, known here or not."""
        to = None if goal is None else self._orders[self._path_of(goal)]
        self._world.was_left.update(id_ for id_, path in self._paths.items() if to is None or self._orders[path] > to)

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        """3: what counts as served was held by an engine: these bytes, and none that had the name before."""
        super().version_changed(before, after)
        folder, was_served = self._world.disk.folders.get(after.path), before is not None and before.served_at
        if after.served_at is not None and not was_served and folder is not None:
            assert folder.content in self._held, f"3: {after.id} is called served, and no engine held {folder.content}"

    def attempt_changed(self, attempt: AttemptRecord) -> None:
        """A host is brought to nothing but its goal."""
        super().attempt_changed(attempt)
        engine = self._life.store.engines.get(attempt.engine)
        if attempt.outcome is not None or engine is None or not self._world.leads(engine):
            return
        goals = self._life.targets.of_engine(engine.to_load)  # it may serve what it is to be loaded with again
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
            assert record.weight_version == target.label, f"11: {state}"
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
        is_there = target.state is VersionState.SEALED and target.owned
        return is_there and not isinstance(chain_of(target, self._life.store.versions), NoBase)
