"""Hosts that follow an object store into which trainers publish: the product's own, but for the store and threads.

No service runs beside a trainer here. Who is in which state is seen from the store, whose every change is looked at.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from refitd.policy.strategy import StrategyName
from refitd_client.bucket import collection
from refitd_client.bucket import run as bucket_run
from refitd_client.bucket import target as bucket_target
from refitd_client.bucket.pointer import LEASE_SECONDS, UPLOAD_SECONDS, BucketVersion, Pointer
from refitd_client.contract import manifest
from refitd_client.contract.naming import parse_version_folder
from refitd_client.write import version_folder
from refitd_hosts.follow import bucket, puller
from refitd_hosts.follow.bucket import BucketUpstream
from refitd_hosts.follow.upstream import FollowedSources
from refitd_hosts.push import pusher

from .disk import SIM_BLOCK, SimFolder, templates
from .host_disk import Published
from .hosts import Host, HostPromises
from .promises import RUN, Promises
from .sim_bucket import HASTE, SimBucket, SimStore, StoreCall, StoreFault, TagKind
from .store_hub import StoreHub
from .store_promises import StorePromises
from .store_trainer import StoreCollector, StoreProcess, StoreTrainer
from .world import World

SIM_PART = 200  # bytes of a file that one request uploads
TRAINERS = 2
PUSHED = 0.4  # of the worlds have a hub that pushes
STEERED_SECONDS = 10.0  # in which a hub that has pushed a version says that it is wanted
ENDS_SECONDS = 120.0  # in which a process ends what it does, when everything works


class StoreHost(Host):
    """A host whose upstream is the store. `client` is its process's way there."""

    world: "StoreWorld"

    def __init__(self, name: str, world: "StoreWorld", vllm: str) -> None:
        self.client = SimBucket(world.store, random.Random(world.chance.random()))
        super().__init__(name, world, vllm)  # type: ignore[arg-type]

    def _promises(self) -> Promises:  # type: ignore[override]
        return StoreHostPromises(self)

    def sources(self) -> FollowedSources:
        before, self.client = self.client, SimBucket(self.world.store, random.Random(self.chance.random()))
        self.client.cut, self.client.slow = before.cut, before.slow
        return FollowedSources([BucketUpstream(self.client)])

    def kill(self) -> None:
        self.client.alive = False
        super().kill()

    def mend(self) -> None:
        self.client.mend()
        super().mend()


class StoreHostPromises(HostPromises):
    """What holds on a host that follows a store: the pointer says what is wanted."""

    _world: StoreHost

    def _newest_wins(self) -> None:
        pointer, life, said = self._world.world.watch.pointer, self._life, self._world.following()
        if pointer is None or pointer.target is None:
            return
        here = life.targets.of_run(RUN).target
        state = f"{self._world.name}: {said}, {[(v.id, v.state, v.barred) for v in life.store.versions.values()]}"
        assert said.desired == pointer.target, f"the pointer wants {pointer.target}; {state}"
        assert here is not None, f"{pointer.target} is wanted, and there is no target: {state}"
        assert here.id == pointer.target, f"{pointer.target} is wanted, and {here.id} is the target: {state}"
        assert said.fault is None, f"everything works again: {state}"
        assert said.pulling is None, f"something is being pulled: {state}"

    def _nothing_leaks(self) -> None:
        Promises._nothing_leaks(self)
        left = self._world.disk.left_behind()
        assert not left, f"leaked at {self._world.name}: {left}"


class StoreWorld(World):
    """A world in which so many followers follow a store. `watch` holds what the store promises. `pushed`: the first of
    those who publish is a hub that pushes; None leaves that to chance.
    """

    has_hub = False
    heal_seconds = (30.0, 60.0)

    def __init__(
        self,
        seed: int,
        *,
        strategy: StrategyName = StrategyName.ALL,
        vllm: str = "",
        followers: int = 2,
        pushed: bool | None = None,
    ) -> None:
        self.known = Published()
        self.was_good: set[str] = set()  # ids of versions that have counted
        self.was_left: set[str] = set()  # ids of versions that were rolled back from
        self.counts: Counter[str] = Counter()
        templates()  # read before what follows changes how files are digested
        self._patches = ExitStack()
        super().__init__(seed, strategy=strategy, vllm=vllm)
        self._patch()
        self.contents = itertools.count(1)
        self.store = SimStore(self.loop, self.chance.choice(list(TagKind)))
        self.counts = self.store.counts
        self.watch = StorePromises(self, self.store)
        self.store.watcher = self.watch
        self._names = itertools.count(1)
        is_pushed = self.chance.random() < PUSHED if pushed is None else pushed
        self.hub = StoreHub(self, vllm) if is_pushed else None
        self.trainers = [self._trainer(index, step=0) for index in range(0 if self.hub is None else 1, TRAINERS)]
        self.collectors: list[StoreCollector] = []
        self.hosts = [StoreHost(f"host{number}", self, vllm) for number in range(followers)]
        self.places += [*self.hosts, *([] if self.hub is None else [self.hub])]
        for place in self.places:
            place.start()

    def _patch(self) -> None:
        """Files are small here and are to have several blocks and parts, and the store's time is short."""
        clock = SimpleNamespace(monotonic=lambda: self.loop.time() * HASTE, time=self._wall_time)
        for module, name, value in (
            (manifest, "BLOCK", SIM_BLOCK),
            (puller, "BLOCK", SIM_BLOCK),
            (version_folder, "free_bytes", self._free_bytes),
            (bucket_run, "PART", SIM_PART),
            (bucket, "LEASE_SECONDS", LEASE_SECONDS / HASTE),
            (bucket_run, "secrets", SimpleNamespace(token_hex=lambda most: f"{next(self._names):0{2 * most}x}")),
            (bucket_target, "time", clock),
            (pusher, "COLLECT_SECONDS", pusher.COLLECT_SECONDS / HASTE),
            (collection, "time", clock),
        ):
            self._patches.enter_context(mock.patch.object(module, name, value))

    def _wall_time(self) -> float:
        return self.chance.random() * 4e9

    def _free_bytes(self, folder: Path) -> int:
        is_full = any(host.disk.no_room for host in self.hosts if folder.is_relative_to(host.disk.root))
        return 0 if is_full else 2**40

    def close(self) -> None:
        for process in self._processes():
            process.kill()
        for place in self.places:
            place.kill()
            for server in place.servers.values():
                server.die()
        super().close()
        self._patches.close()

    def hold(self) -> None:
        super().hold()
        self.watch.hold_now()
        for process in self._processes():
            process.check()
        if self.hub is not None:
            self.hub.check()

    # What the store tells.

    def counts_now(self, path: str, version: str, folder: SimFolder) -> None:
        order = parse_version_folder(path.rpartition("/")[2])
        assert order is not None
        self.was_good.add(version)
        self.promises.published(path, order, folder)

    def is_of_hub(self, version: BucketVersion) -> bool:
        """Whether the hub wrote it. A hub that was killed goes on with its run, also without a new version."""
        return self.hub is not None and (version.id, version.digest) in self.hub.written

    def pointer_moved(self, pointer: Pointer) -> None:
        """Followers may serve what it wants, and go back from what is barred."""
        self.wanted.update(filter(None, [pointer.target]))
        self.was_left.update(version.id for version in pointer.versions if version.barred)

    # Who there is.

    def host(self, index: int) -> StoreHost:
        return self.hosts[index % len(self.hosts)]

    def trainer(self, index: int) -> StoreTrainer | StoreHub:
        """One of those who publish, each on a host of its own. The first may be a hub that pushes."""
        both = [*([] if self.hub is None else [self.hub]), *self.trainers]
        return both[index % len(both)]

    def clients(self, who: str) -> list[SimBucket]:
        """The ways to the store of `host0` or `trainer1`, of `collectors`, or of `all`."""
        named = {each.name: [each.client] for each in self.hosts}
        named |= {f"trainer{number}": [self.trainer(number).client] for number in range(TRAINERS)}
        named["collectors"] = [each.client for each in self.collectors]
        return [client for clients in named.values() for client in clients] if who == "all" else named.get(who, [])

    def _processes(self) -> list[StoreProcess]:
        return [*self.trainers, *self.collectors]

    def _trainer(self, index: int, *, step: int) -> StoreTrainer:
        spool = self.state / f"spool-{index}"
        return StoreTrainer(self, spool, f"trainer{index}-{next(self._names)}", step=step, steers=index == 0)

    # What may happen.

    def publish_to_store(self, index: int, *, delta: bool, within: float, then: float = 0.0) -> None:
        """A trainer publishes, if it does nothing else, and is waited for so long; then so much time passes."""
        trainer = self.trainer(index)
        if not trainer.is_busy or isinstance(trainer, StoreHub):
            trainer.publish(delta=delta)
        self._until(lambda: not trainer.is_busy, within)
        if then:
            self.wait(then)

    def roll_back_in_store(self, index: int, *, within: float) -> None:
        trainer = self.trainer(index)
        if not trainer.is_busy or isinstance(trainer, StoreHub):
            trainer.roll_back()
        self._until(lambda: not trainer.is_busy, within)

    def lose_files_of_hub(self, *, then: float) -> None:
        """The hub has the files of what it has pushed no more, and so much time passes."""
        if self.hub is not None:
            self.hub.lose_files()
        self.wait(then)

    def restart_store_trainer(self, index: int, *, back: int) -> None:
        """SIGKILL to a trainer or a hub, which comes again, from a checkpoint of so many steps before."""
        trainer = self.trainer(index)
        trainer.kill()
        if isinstance(trainer, StoreHub):
            if back:
                trainer.restart_trainer(back=back)
            trainer.start()
        else:
            at = self.trainers.index(trainer)
            self.trainers[at] = self._trainer(index % TRAINERS, step=max(0, trainer.step - back))

    def collect(self, *, keep: int | None = None, dry: bool = False, within: float, killed: bool = False) -> None:
        """Somebody collects, is waited for so long, and killed then or left to it."""
        collector = StoreCollector(self)
        self.collectors = [each for each in self.collectors if each.is_busy]
        self.collectors.append(collector)
        collector.collect(keep=keep, dry=dry)
        self._until(lambda: not collector.is_busy, within)
        if killed:
            collector.kill()

    def rot(self, index: int) -> None:
        """A byte of what a trainer publishes next changes before it is uploaded; a hub finds that itself."""
        trainer = self.trainer(index)
        if isinstance(trainer, StoreTrainer):
            trainer.rots = True

    def goes_wrong(self, who: str, call: StoreCall, faults: Iterable[StoreFault]) -> None:
        for client in self.clients(who):
            client.faults[call].extend(faults)

    def cut(self, who: str, *, cut: bool) -> None:
        for client in self.clients(who):
            client.cut = cut

    def set_down(self, *, down: bool) -> None:
        self.store.is_down = down

    def slow(self, who: str, seconds: float) -> None:
        for client in self.clients(who):
            client.slow = seconds

    def heal(self) -> None:
        """See `World`. A trainer publishes once more, time passes, and somebody collects."""
        self.store.is_down = False
        for client in self.clients("all"):
            client.mend()
        for host in self.hosts:
            host.mend()
        self._until(lambda: not any(process.is_busy for process in self._processes()), ENDS_SECONDS)
        assert not any(process.is_busy for process in self._processes()), "somebody does not come to an end"
        if self.hub is not None:
            self.hub.mend()
        self._publish_in_the_end()
        if self.hub is not None and not self.hub.is_lost:  # what it tries again so late may be in vain
            self.wait(pusher.LONGEST_PUSH_RETRY_SECONDS)
        self.wait(UPLOAD_SECONDS / HASTE + 5.0)
        last = None
        for _ in range(2):
            self.collect(within=ENDS_SECONDS)
            last = self.collectors[-1].done
            self.wait(LEASE_SECONDS / HASTE + 5.0)
        assert last is not None, "everything works again, and no collector comes to its end"
        self.watch.nothing_leaks(last)
        super().heal()

    def _publish_in_the_end(self) -> None:
        """One of the trainers goes on, or what takes its place where it says that another has the run."""
        index = self.chance.randrange(TRAINERS)
        for _ in range(3):
            trainer = self.trainer(index)
            if isinstance(trainer, StoreHub):
                trainer.overtake(None if self.watch.pointer is None else self.watch.pointer.newest)
            self.publish_to_store(index, delta=False, within=ENDS_SECONDS)
            assert not trainer.is_busy, "a publication does not come to an end"
            if not trainer.has_failed:
                break
            assert trainer.is_lost, "everything works again, and a trainer cannot publish"
            self.restart_store_trainer(index, back=0)
        else:
            raise AssertionError("everything works again, and no new trainer can publish")
        self.wait(STEERED_SECONDS)
        pointer = self.watch.pointer
        assert pointer is not None
        assert pointer.target == pointer.versions[0].id, (
            f"{pointer.versions[0].id} was published, and the pointer wants another"
        )
