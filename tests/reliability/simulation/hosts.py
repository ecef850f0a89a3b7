"""Several hosts: a hub with its trainer and engines, and followers with theirs, between links that fail.

The followers' parts are the product's own, the puller and what it writes among them. Made up are the links, and what
lies at the hub.
"""

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from refitd.policy.chain import NoBase, chain_of
from refitd.policy.strategy import StrategyName
from refitd.state.version import VersionRecord
from refitd_client.contract.follow import Following
from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.states import EngineState, VersionState
from refitd_client.write import version_folder
from refitd_hosts.follow import puller
from refitd_hosts.follow.follower import UpstreamFollower
from refitd_hosts.follow.puller import Puller
from refitd_hosts.follow.upstream import FollowedSources, FollowerIdentity
from refitd_hosts.policy.hosts import ANOTHER

from .disk import SIM_BLOCK, Pause, SimFolder, seen_at
from .fault import Call, Fault
from .host_disk import HostDisk, HostFolders, Published
from .life import Life
from .links import Damage, Link
from .place import Place
from .promises import RUN, Promises
from .server import SimServer
from .upstream import SimHub
from .world import World

ENGINES = ("a", "b")  # of each host
HUB = "hub"


class Host(Place):
    """A host with a follower. `links` lead from it to the other hosts, by their names."""

    follows = True
    is_free = True  # whether it decides for itself
    disk: HostDisk

    def __init__(self, name: str, world: "Hosts", vllm: str) -> None:
        self.name = name
        self.world = world
        state = world.state / name
        state.mkdir()
        disk = HostDisk(state, world.known)
        super().__init__(
            world.loop, random.Random(world.chance.random()), state=state, disk=disk, strategy=world.strategy
        )
        self.links: dict[str, Link] = {}
        self.boots = 0
        self._add_servers(ENGINES[: world.chance.randint(1, 2)], vllm)

    def _promises(self) -> "HostPromises":
        return HostPromises(self)

    def folders(self, pause: Pause) -> Any:
        return HostFolders(self.disk, pause, self.promises.before_discard, self.promises.before_recycling)

    def follow(self, life: Life) -> UpstreamFollower:
        sources = self.sources()
        self.boots += 1
        return UpstreamFollower(
            life.store,
            life.targets,
            life.fleet,
            Puller(self.disk.root, sources, guard=self.disk.guard_for(life.store)),
            sources,
            identity=FollowerIdentity(name=self.name, process=f"{self.name}-{self.boots}"),
            run=None,
            nudge=life.catalog.nudge,
            freely=self.is_free,
        )

    def sources(self) -> FollowedSources:
        return FollowedSources([SimHub(self.links[HUB])])

    def following(self) -> Following:
        assert self.life is not None
        assert self.life.follower is not None
        return self.life.follower.following()

    def stop_engine(self, name: str, *, starts: bool) -> None:
        """SIGKILL to an engine, if there is one of that name, which comes back at once or not."""
        if name in self.servers:
            (self.start_engine if starts else self.kill_engine)(name)

    def goes_wrong(self, name: str, call: Call, fault: Fault) -> None:
        """The next call of a kind goes wrong, if there is an engine of that name."""
        if name in self.servers:
            self.fault(name, call, fault)

    def kill(self) -> None:
        """See `Place`. Nothing that it does on its way out changes its root."""
        if self.life is not None:
            self.life.alive = False
            self.disk.process_ends()
        super().kill()

    def mend(self) -> None:
        for link in self.links.values():
            link.mend()
        super().mend()
        self.pause_updates(paused=False)


class HostPromises(Promises):
    """What holds on a host that follows: what is published is what trainers have published at the hub."""

    _world: Host

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        hub = host.world.promises
        self._contents, self.lent_at, self.orders, self._paths = hub._contents, hub.lent_at, hub.orders, hub._paths

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        """Nothing is good on a host that never was at the hub. No rollback goes to a version whose name has other
        contents there.
        """
        if after.state is not VersionState.RETIRED or after.reason != ANOTHER:
            super().version_changed(before, after)
        if after.state is VersionState.SEALED and (before is None or before.state is not VersionState.SEALED):
            is_known = after.id in self._world.world.was_good
            assert is_known, f"2: {after.id} is SEALED at {self._world.name} and never was at the hub"

    def _holds(self, version: str, engine: str, server: SimServer) -> None:
        """3: also where the hub has lost its root and publishes other bytes under a name: what an engine is called in
        sync with are the bytes that this host has under the name.
        """
        super()._holds(version, engine, server)
        record, folder = self._life.store.versions.get(version), self._world.disk.folders.get(self._paths[version])
        if record is not None and record.state is VersionState.SEALED and folder is not None:
            holds, has = set(server.tensors), folder.content
            assert holds == {has}, f"3: {engine} is called in sync with {version}, holds {holds}, and here lies {has}"

    def _is_proven(self, version: str, engine: str, server: SimServer) -> None:
        """Nor is anything served there that the hub has not wanted to be served."""
        super()._is_proven(version, engine, server)
        assert self._is_wanted(version), (
            f"5: {engine} at {self._world.name} serves {version}, which the hub never wanted"
        )

    def _is_wanted(self, version: str) -> bool:
        return version in self._world.world.wanted

    def _may_go_back(self, version: str) -> bool:
        """So does who follows a hub that has gone back, or that has lost the version."""
        return version in self._world.world.was_left or super()._may_go_back(version)

    def _newest_wins(self) -> None:
        world, life = self._world.world, self._life
        assert world.life is not None
        target = world.life.targets.of_run(RUN).target
        said = self._world.following()
        if target is None or target.state is not VersionState.SEALED or not target.files.owned:
            return
        if isinstance(chain_of(target, world.life.store.versions), NoBase):
            return  # its trainer has deleted what it stands on: the hub's engines have it, and nobody else can
        here = life.targets.of_run(RUN).target
        state = f"{self._world.name}: {said}, {[(v.id, v.state, v.barred) for v in life.store.versions.values()]}"
        assert said.desired == target.id, f"the hub wants {target.id}; {state}"
        assert here is not None, f"{target.id} is wanted, and there is no target: {state}"
        assert here.id == target.id, f"{target.id} is wanted, and {here.id} is the target: {state}"
        assert said.fault is None, f"everything works again: {state}"
        assert said.pulling is None, f"something is being pulled: {state}"

    def _nothing_leaks(self) -> None:
        super()._nothing_leaks()
        hub, desired = self._world.world.life, self._life.store.runs.desired.get(RUN)
        assert hub is not None
        left, wanted = set(self._world.disk.left_behind()), hub.store.versions.get(desired or "")
        if desired is not None and (wanted is None or isinstance(chain_of(wanted, hub.store.versions), NoBase)):
            left -= self._world.disk.being_pulled()  # the host goes on with the pull when the hub has it again
        assert not left, f"leaked at {self._world.name}: {sorted(left)}"
        assert not list(hub.hosts.followers.pulled()), "leaked: the hub keeps what nobody pulls"


class Hosts(World):
    """A world in which so many followers follow the hub."""

    heal_seconds = (30.0, 90.0)  # a pull that failed is tried again within 60

    def __init__(
        self, seed: int, *, strategy: StrategyName = StrategyName.ALL, vllm: str = "", followers: int = 2
    ) -> None:
        self.known = Published()
        self.was_good: set[str] = set()  # ids of versions that were SEALED at the hub
        self.was_left: set[str] = set()  # ids of versions that hosts may go back from
        self.counts: Counter[str] = Counter()
        self._patches = ExitStack()
        self._patches.enter_context(mock.patch.object(puller, "BLOCK", SIM_BLOCK))
        self._patches.enter_context(mock.patch.object(version_folder, "free_bytes", self._free_bytes))
        super().__init__(seed, strategy=strategy, vllm=vllm)
        self.disk.keeps_manifests = False  # links hand out no manifest that a hub keeps, nor what that names
        self.hosts = [self._host(f"host{number}", vllm) for number in range(followers)]
        for host in self.hosts:
            for other in (self, *self.hosts):
                if other is not host:
                    host.links[other.name] = Link(other, random.Random(self.chance.random()), self.counts)
        self.places += self.hosts
        self._link_hub()
        for host in self.hosts:
            host.start()

    def _host(self, name: str, vllm: str) -> Host:
        return Host(name, self, vllm)

    def _link_hub(self) -> None:
        pass

    def heal(self) -> None:
        self.start()
        self.pause_updates(paused=False)
        super().heal()

    def _tend(self, place: Place, tended: set[str]) -> bool:
        """See `World`. A host that decides for itself may have given up what its upstream wants, for an engine that
        broke: its operator restarts the engine and asks for a load, as `refitd explain` says there.
        """
        found = super()._tend(place, tended)
        if not isinstance(place, Host) or not place.is_free or place.life is None:
            return found
        store = place.life.store
        wanted = store.versions.get(store.runs.desired.get(RUN, ""))
        broken = [each for each in store.engines.values() if each.state is EngineState.TAINTED]
        key = f"{place.name} gave up {None if wanted is None else wanted.id}"
        if not broken or wanted is None or wanted.career.given_up is None or key in tended:
            return found
        tended.add(key)
        self._restart([place.server_of(each) for each in broken])
        for each in broken:
            place.life.fleet.resync(each.id)
        return True

    def _free_bytes(self, folder: Path) -> int:
        is_full = any(host.disk.no_room for host in self.hosts if folder.is_relative_to(host.disk.root))
        return 0 if is_full else 2**40

    def close(self) -> None:
        for host in self.hosts:
            host.kill()
            for server in host.servers.values():
                server.die()
        super().close()
        self._patches.close()

    def _promises(self) -> Promises:
        return HubPromises(self)

    def host(self, index: int) -> Host:
        return self.hosts[index % len(self.hosts)]

    def damage(self, index: int, parts: Sequence[Damage], answers: Sequence[Damage] = ()) -> None:
        """What goes over a host's links next is damaged: parts of files, and other answers."""
        for link in self.host(index).links.values():
            link.parts.extend(parts)
            link.answers.extend(answers)

    def cut(self, index: int, *, cut: bool) -> None:
        for link in self.links_of(self.host(index)):
            link.cut = cut

    def slow(self, index: int, seconds: float) -> None:
        for link in self.links_of(self.host(index)):
            link.slow = seconds

    def links_of(self, host: Host) -> list[Link]:
        return list(host.links.values())


class HubPromises(Promises):
    """Notes what was good at the hub."""

    _world: Hosts

    def __init__(self, world: Hosts) -> None:
        super().__init__(world)
        self.beneath: dict[str, set[str]] = {}  # by the ids of deltas, what they have ever stood on

    def published(self, path: str, order: Order, folder: SimFolder) -> None:
        super().published(path, order, folder)
        if folder.base is not None:
            beneath = self.beneath.setdefault(version_id(RUN, order), set())
            beneath.update({folder.base}, self.beneath.get(folder.base, ()))
        if (manifest := seen_at(path, folder).structure.manifest) is not None:
            self._world.known.note(path, manifest, folder)

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        super().version_changed(before, after)
        if after.state is VersionState.SEALED:
            self._world.was_good.add(after.id)
            if after.barred:
                self._world.was_left.add(after.id)
        elif after.id in self._world.was_good:
            self._world.was_left.add(after.id)
