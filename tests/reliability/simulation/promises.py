"""The promises, held against the truth: what lies on the made-up disk and what the made-up servers compute with.

The numbers are those of docs/promises.md.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import Request

from refitd.api.versions import wait
from refitd.engine.port import Outcome
from refitd.engine.transaction import OTHER_TENSORS
from refitd.explain.run import glance_at
from refitd.policy.chain import NoBase, chain_of
from refitd.policy.goals import last_good, last_good_before
from refitd.policy.materialize import Copy
from refitd.policy.next_action import repair_with
from refitd.root.scan import Listing
from refitd.state.observer import Observer
from refitd.state.records import AttemptRecord, EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.states import EngineState, Standing, VersionState, WaitOutcome

from .disk import SimFolder
from .plugin import BASE
from .server import SimServer

if TYPE_CHECKING:
    from .life import Life
    from .place import Place

RUN = "run"
AT_ONCE = Request({"type": "http"})  # a question that waits for nothing: nothing is looked up for its client
LOST = -1  # the life of contents that nobody knows any more


@dataclass(slots=True)
class _Proof:
    """What the store called proven of an engine, and in which life of it."""

    version: str
    life: int


class Promises(Observer):
    """What was promised, and whether it holds."""

    def __init__(self, world: "Place") -> None:
        self._world = world
        self._contents: dict[str, set[int]] = {}  # path → what has ever lain there and was good
        self.lent_at: dict[str, set[int]] = {}  # path → what a trainer has offered from its memory
        self.orders: dict[str, Order] = {}
        self._paths: dict[str, str] = {}
        self._noticed: set[str] = set()
        self._proofs: dict[str, _Proof] = {}
        self._reached: dict[str, tuple[Order, int]] = {}  # by engine, and the life that it was proven in
        self._rewritten: set[str] = set()
        self._restored: set[str] = set()
        self._served: set[str] = set()
        self._again: set[str] = set()  # paths where something else was before, and the root was emptied
        self._taken: dict[str, int] = {}  # version → what was published, by a notice that was answered 2xx
        self._held: set[int] = set()
        self._lied: set[str] = set()  # engines that have ever given wrong checksums
        self._freed: set[str] = set()  # engines whose last version was out of use while they were to load another
        self._others: set[int] = set()  # what another writer has loaded
        self.recycled = 0
        self.copied = 0
        self.lost = 0
        self.trace: list[str] = []

    # What the world tells.

    def published(self, path: str, order: Order, folder: SimFolder) -> None:
        if path in self.orders:
            self._again.add(path)
        self.orders[path] = order
        self._paths[version_id(RUN, order)] = path
        if folder.make.is_good:
            self._contents.setdefault(path, set()).add(folder.content)

    def lent(self, path: str, order: Order, content: int) -> None:
        self.orders[path] = order
        self._paths[version_id(RUN, order)] = path
        self.lent_at.setdefault(path, set()).add(content)

    def taken(self, path: str, order: Order, content: int) -> None:
        """The notice of a publication was answered 2xx: its trainer may wait for it."""
        assert path in self.orders
        self._taken[version_id(RUN, order)] = content

    def written_by_another(self, content: int) -> None:
        """Another writer loads this into an engine, and it is good as far as that writer goes."""
        self._others.add(content)

    def removed(self, engine: str) -> None:
        self._proofs.pop(engine, None)
        self._reached.pop(engine, None)

    def judged_again(self) -> None:
        """The journal is rebuilt: versions are validated again, and engines are brought to the first that is good."""
        self._freed.update(self._reached)

    def _good(self, path: str) -> set[int]:
        return self._contents.get(path, set()) | self.lent_at.get(path, set())

    def rewritten(self, path: str) -> None:
        folder = self._world.disk.folders[path]
        self._rewritten.add(path)
        self._taken.pop(version_id(RUN, self.orders[path]), None)  # nobody promises what others write over
        if folder.make.is_good:
            self._contents.setdefault(path, set()).add(folder.content)

    def restored(self, path: str) -> None:
        self._restored.add(path)

    def noticed(self, version: str) -> None:
        self._noticed.add(version)

    def forgotten(self, *, but: Collection[str]) -> None:
        """The journal went bad. What was decided stands, and the scan finds what has files."""
        self._noticed.intersection_update(but)

    def restarted(self) -> None:
        """1: a notice answered 2xx was durable before the reply."""
        life = self._life
        for version in self._noticed:
            assert version in life.store.versions or version in life.store.gone, f"1: {version} was forgotten"

    def served(self, server: SimServer) -> None:
        self._held.update(server.tensors)
        self._computes_whole(server)
        self._pairs_agree()

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        """10: what a rollback goes to is not given up, whatever came after it that nobody served."""
        if before is None or before.state is not VersionState.SEALED or after.state is not VersionState.RETIRED:
            return
        if after.run in self._life.store.runs.closed:
            return  # it has ended with its newest good version
        versions = [before if each.id == before.id else each for each in self._life.store.versions_of(before.run)]
        good = last_good(versions)
        back = None if good is None else last_good_before(versions, good)
        assert back is not before, f"10: a rollback goes to {before.id}"

    def attempt_changed(self, attempt: AttemptRecord) -> None:
        """What a load proves it proves of the process that carried it out: it may be gone before anybody looks here."""
        if attempt.outcome == Outcome.ACK.name and attempt.engine.removesuffix(":1") in self._world.servers:
            server = self._world.servers[attempt.engine.removesuffix(":1")]
            self._proofs[attempt.engine] = _Proof(attempt.version, server.loaded_in)

    def before_discard(self, path: str, folder: SimFolder) -> None:
        """6, 7, 8: what a sweep is about to take away."""
        life = self._life
        assert not folder.foreign, f"7: {path} is nobody's"
        listed = life.swept.listed
        assert isinstance(listed, Listing), f"8: {path} goes after a listing that failed"
        assert listed.found, f"8: {path} goes after a listing that had nothing"
        for server in self._world.servers.values():
            assert server.loading != path, f"6: {server.name} is reading {path}"
        record = next((v for v in life.store.versions.values() if v.path == path), None)
        assert record is not None, f"7: {path} is not in the journal"
        goals = life.targets.of_run(record.run)
        assert not record.pinned, f"6: {path} is pinned"
        for needed in (goals.last_good, goals.loadable):
            assert needed is None or needed.id != record.id, f"6: {path} is the target or the last good version"
        for engine in life.store.engines.values():
            if engine.serving == record.id and engine.trouble.unreachable_since is None:
                raise AssertionError(f"6: {engine.id} serves {path}")
        self._is_no_base(record)

    def _is_no_base(self, record: VersionRecord) -> None:
        """6: what a version that may be needed stands on."""
        store = self._life.store
        goals = self._life.targets.of_run(RUN)
        serving = [
            store.versions.get(e.serving or "") for e in store.engines.values() if e.trouble.unreachable_since is None
        ]
        for needed in (goals.wanted, goals.loadable, goals.last_good, *serving):
            link = needed
            while link is not None and link.state is VersionState.SEALED and link.base is not None:
                assert link.base != record.id, f"6: {record.id} is the base of {link.id}, which is needed"
                link = store.versions.get(link.base)

    def before_recycling(self, folder: SimFolder) -> None:
        """6: what is about to be written again. Not even a server that counts as dead may have it open."""
        for server in self._world.servers.values():
            assert server.reading is not folder, f"6: {server.name} is reading what is written again"
            self._is_not_beneath(server, folder)
        self.recycled += 1

    def _is_not_beneath(self, server: SimServer, folder: SimFolder) -> None:
        """6: what a plugin would put back, if the load failed that the service asks it for next."""
        record = self._life.store.engines.get(f"{server.name}:1")
        held = None if server.plugin is None else server.plugin.standing
        if record is None or held is None or not server.up or record.trouble.unreachable_since is not None:
            return
        if record.serving == held.version:
            assert held.base is not folder, f"6: {server.name} would put back what is written again"

    def before_copy_goes(self, copy: Copy) -> None:
        """6: a copy that a sweep is about to take away."""
        life = self._life
        for server in self._world.servers.values():
            assert server.loading != copy.path, f"6: {server.name} is reading {copy.path}"
        for engine in life.store.engines.values():
            if engine.trouble.unreachable_since is None and any(
                path.endswith(f"/{copy.path}") for path in engine.paths
            ):
                raise AssertionError(f"6: {engine.id} names {copy.path} as what it serves")

    def copy_is_given_up(self, copy: Copy) -> None:
        """6: no copy is given up while its version is needed. A version that is needed a moment later, before the copy
        is gone, gets another copy: nothing is loaded from this one any more.
        """
        life = self._life
        held = life.store.versions.get(copy.holds or "")
        goals = life.targets.of_run(copy.run)
        for needed in (goals.wanted, goals.loadable, goals.last_good):
            assert needed is None or needed is not held, f"6: {copy.path} is the target or the last good version"

    def copy_made(self) -> None:
        self.copied += 1

    # What holds at any time.

    def hold(self) -> None:
        self.hold_now()
        if self._world.life is None:
            return
        store = self._life.store
        for version in store.versions.values():
            if version.state is VersionState.SEALED:
                assert self._contents.get(version.path), f"2: {version.id} is SEALED and was never good"
        for version in self._taken:
            self._is_served_if_a_wait_says_so(version)
        goals = self._life.targets.of_run(RUN)
        if goals.target is not None:
            assert not goals.target.barred, f"10: {goals.target.id} is barred and the target"
        for needed in (goals.wanted, goals.loadable, goals.last_good):
            assert needed is None or not needed.in_memory, f"6: {needed.id} has no files, and engines are to load it"

    def _is_served_if_a_wait_says_so(self, version: str) -> None:
        """3: what a wait calls served was served: those weights, and not some that had the name before."""
        waited = self._world.ask(wait(version, self._life.service, AT_ONCE, "served", 0.0))
        if waited is not None and waited.outcome is WaitOutcome.SERVED:
            content = self._taken[version]
            assert content in self._held, f"3: {version} is called served, and no engine ever held {content}"

    def hold_now(self) -> None:
        for server in self._world.servers.values():
            if server.answers:
                self._computes_whole(server)
        self._pairs_agree()
        self._note_liars()
        if self._world.life is not None:
            self._engines_are_what_is_said()
            self._follow_events()

    def _computes_whole(self, server: SimServer) -> None:
        """2, 9, 15: no token from a mixture, from contents that are not good, or from an engine that nobody knows."""
        if server.paused or server.loading is not None:
            return
        contents = set(server.tensors)
        assert len(contents) == 1, f"15: {server.name} answers with a mixture {server.tensors}"
        good = {BASE}.union(self._others, *self._contents.values(), *self.lent_at.values())
        assert contents <= good, f"2: {server.name} answers with {server.tensors}, which is no good version"

    def has_lied(self, engine: EngineRecord) -> bool:
        return engine.id in self._lied

    def _note_liars(self) -> None:
        self._lied.update(f"{server.name}:1" for server in self._world.servers.values() if server.lies)

    def _pairs_agree(self) -> None:
        """16: no server decodes keys and values that another has computed with other weights.

        One that was restarted, or written by another, is found by the next probe.
        """
        for server in self._world.servers.values():
            other = server.partner
            if other is None or not (server.is_as_loaded and other.is_as_loaded):
                continue
            for one, that in ((server, other), (other, server)):
                assert not (one.loading and that.answers), f"16: {one.name} loads while {that.name} computes"
            both = server.answers and other.answers
            assert not both or server.tensors == other.tensors, f"16: {server.name} and {other.name} differ"

    @property
    def _engines(self) -> list[EngineRecord]:
        return [engine for engine in self._life.store.engines.values() if not self._world.leads(engine)]

    def _engines_are_what_is_said(self) -> None:
        for engine in self._engines:
            server = self._world.servers[engine.id.removesuffix(":1")]
            proof = self._proofs.get(engine.id)
            if proof is not None and proof.version != engine.serving:
                del self._proofs[engine.id]  # nobody says so any more: who says it again must prove it again
            if engine.state is EngineState.IN_SYNC and engine.serving is not None:
                if engine.run == RUN:  # one that is moved away in mid-load may end on the base of a delta
                    self._goes_forward(engine.serving, engine.id, server)
                self._is_proven(engine.serving, engine.id, server)
            if not engine.known and engine.id in self._reached:
                self._reached[engine.id] = self._reached[engine.id][0], LOST
            self._note_who_may_go_back(engine)
            if engine.state in {EngineState.TAINTED, EngineState.QUARANTINED}:
                assert not engine.known, f"4: {engine.id} is {engine.state} and counts as known"
                self._is_not_condemned(engine, server)

    def _is_not_condemned(self, engine: EngineRecord, server: SimServer) -> None:
        """3: an engine whose own words are true is not paused for those of one other."""
        reason, attempt = engine.reason or "", engine.trouble.last_attempt
        if attempt is None or engine.id in self._lied or not reason.endswith(OTHER_TENSORS):
            return
        path = self._paths[attempt.version]
        is_touched = path in self._rewritten | self._again or server.life != server.loaded_in
        holds = not is_touched and server.up and set(server.tensors) <= self._good(path)
        assert not holds, f"3: {engine.id} holds {attempt.version} and is {engine.state}: {reason}"

    def _is_proven(self, version: str, engine: str, server: SimServer) -> None:
        """What is called proven is true, for as long as the process lives that it was proven of."""
        # Without a load that came through it is called so unasked: it must hold it now.
        proof = self._proofs.setdefault(engine, _Proof(version, server.life))
        if proof.life != server.life:
            return  # a new process, or another writer: the next probe finds out
        if server.up and server.loading is None:
            self._holds(version, engine, server)

    def _holds(self, version: str, engine: str, server: SimServer) -> None:
        good = self._good(self._paths[version])
        assert set(server.tensors) <= good, f"3: {engine} is called in sync with {version} and holds {server.tensors}"

    def _goes_forward(self, version: str, engine: str, server: SimServer) -> None:
        """5: never back to an older version, but for a rollback.

        One that has lost its contents, by a restart or by a load that nobody knows the end of, cannot be brought to a
        delta again that leads there from nothing.
        """
        order = self.orders[self._paths[version]]
        before, life = self._reached.get(engine, (order, server.life))
        proof = self._proofs.get(engine)
        self._reached[engine] = order, server.life if proof is None else proof.life
        if before <= order:
            self._freed.discard(engine)
            return
        record = self._life.store.versions.get(version_id(RUN, before))
        gone = engine in self._freed or self._may_go_back(version_id(RUN, before))
        gone = gone or (life != server.life and record is not None and self._life.targets.carriage.is_refused(record))
        assert gone, f"5: {engine} went back from {before} to {order}"
        self._freed.discard(engine)

    def _note_who_may_go_back(self, engine: EngineRecord) -> None:
        """A load begins when its version is wanted. What the engine had may be good again before the load ends: a
        journal that has lost the version's record has it validated again.
        """
        before = self._reached.get(engine.id)
        if (
            before is not None
            and engine.state is not EngineState.IN_SYNC
            and self._may_go_back(version_id(RUN, before[0]))
        ):
            self._freed.add(engine.id)

    def _may_go_back(self, version: str) -> bool:
        record = self._life.store.versions.get(version)
        return record is None or record.barred or record.state is not VersionState.SEALED

    def _follow_events(self) -> None:
        for record in self._life.store.versions.values():
            if record.served_at is not None and record.id not in self._served:
                self._served.add(record.id)
                self.trace.append(f"{self._world.loop.time():.4f} {record.id} is served")
                held = self._good(record.path) & self._held
                assert held, f"{record.id} counts as served, and no engine ever held it"

    def _says_what_is_lost(self) -> None:
        """11: a run whose newest version has no files is in trouble, and says what is left for engines to load."""
        goals = self._life.targets.of_run(RUN)
        run = glance_at(self._life.store, self._life.targets, RUN)
        target, folders = goals.target, self._world.disk.folders
        if target is None or target.in_memory or target.path in folders or run.standing is Standing.UNFOLLOWED:
            return
        said = "; ".join(run.reasons)
        assert run.standing is Standing.TROUBLED, f"11: {target.id} has no files, and the run is {run.standing}"
        named = rf"tep {target.order.step:,}( of generation {target.order.generation})? is LOST"
        assert re.search(named, said), f"11: {target.id} has no files, and it is said: {said}"
        is_left = any(each.make.is_good for each in folders.values())
        assert is_left or "nothing left to load" in said, f"11: no version has files, and it is said: {said}"
        self.lost += 1

    # What holds in the end, when everything works again.

    def hold_in_the_end(self) -> None:
        """9, 11 and convergence: every engine computes, on the newest good version that there is."""
        store, targets = self._life.store, self._life.targets
        target = targets.of_run(RUN).target
        for engine in self._engines:
            server = self._world.servers[engine.id.removesuffix(":1")]
            state = f"{engine.id} is {engine.state} ({engine.reason}), target {target.id if target else None}"
            # A fleet with a canary repairs nobody with what no canary has tried.
            goals = targets.of_engine(engine)
            # Files that others put in place of its own, before the service read them, are not what engines have proved.
            tried = [each for each in (goals.loadable, goals.last_good) if each is not None and not engine.known]
            is_another = any(version.handed and version.path in self._rewritten for version in tried)
            nothing_to_repair_with = not engine.known and (repair_with(engine, goals) is None or is_another)
            assert not server.paused or nothing_to_repair_with, f"9: left paused: {state}"
            for each in (server, server.partner):
                if engine.state is EngineState.IN_SYNC and engine.serving is not None and each is not None:
                    self._holds(engine.serving, engine.id, each)  # probes have found out who is a new process
            if target is not None and target.in_memory:
                self._has_somewhere_to_be(engine, target, state)
            # What a rollback goes to may lose what it stands on, and there is nothing else then.
            is_possible = target is not None and not targets.carriage.is_refused(target)
            if target is not None and target.state is VersionState.SEALED and is_possible and not is_another:
                assert engine.serving == target.id, f"11: does not serve the target: {state}"
                assert not server.foreign, f"11: serves what another writer has loaded: {state}"
        self._newest_wins()
        self._says_what_is_lost()
        self._nothing_leaks()
        states = " ".join(f"{e.id} {e.state} {e.serving}" for e in store.engines.values())
        self.trace.append(f"{self._world.loop.time():.4f} {states}")

    def _has_somewhere_to_be(self, engine: EngineRecord, target: VersionRecord, state: str) -> None:
        """6: an engine that cannot have what others hold in memory is on the newest version with files. It may be there
        already where that is a delta, to which engines could not be brought now.
        """
        assert any(each.serving == target.id for each in self._engines), f"6: no engine holds it: {state}"
        goals = self._life.targets.of_engine(engine)
        there = {each.id for each in (target, goals.loadable, goals.wanted) if each is not None}
        assert goals.loadable is None or engine.serving in there, f"6: {state}"

    def is_seen(self, engine: EngineRecord) -> None:
        """11: an engine that is left to another writer is where somebody sees it."""
        run = glance_at(self._life.store, self._life.targets, RUN)
        assert run.standing is Standing.TROUBLED, f"11: {engine.id} is {engine.state}, and the run is {run.standing}"

    def hold_in_a_pause(self) -> None:
        """11: while updates are paused no engine is left behind the last good version, nor goes on to a newer one."""
        store = self._life.store
        good = self._life.targets.of_run(RUN).last_served
        assert good is not None, "nothing was served before the pause"
        for engine in store.engines.values():
            state = f"{engine.id} serves {engine.serving} ({engine.state}, {engine.reason}), the last good is {good.id}"
            assert engine.serving == good.id, f"11: in a pause {state}"

    def _newest_wins(self) -> None:
        """The target is the newest good version on the disk that is not barred."""
        store = self._life.store
        for path, folder in self._world.disk.folders.items():
            record = store.versions.get(version_id(RUN, self.orders[path]))
            was_deleted = path in self._restored and version_id(RUN, self.orders[path]) in store.gone  # it stays so
            is_known = record is not None or folder.foreign or path in self._again or was_deleted
            assert is_known, f"lost: {path} is on the disk and nobody knows it"
            if record is not None and path not in self._rewritten | self._again and folder.make.is_good:
                assert record.state is not VersionState.LOST, f"{record.id} counts as lost, and nobody has touched it"
            if record is None or not folder.make.is_good or record.barred or record.state is not VersionState.SEALED:
                continue
            target = self._life.targets.of_run(RUN).target
            if record.id in self._life.targets.carriage.refused:
                # What is older than the target is not tried again before engines need it: they go to newer ones only.
                if target is None or record.order > target.order:
                    self._is_hopeless(record)
                continue
            order = None if target is None else target.order
            assert order is not None, f"{record.id} is good, and there is no target"
            assert order >= record.order, f"{record.id} is newer than the target"

    def _is_hopeless(self, record: VersionRecord) -> None:
        """A delta is not given up while all that it stands on is there and leads to it."""
        store, disk = self._life.store, self._world.disk
        chain = chain_of(record, store.versions)
        if isinstance(chain, NoBase) or any(version.path in self._rewritten for version in chain):
            return
        content = disk.folders[chain[0].path].content
        for delta in chain[1:]:
            if content not in disk.folders[delta.path].onto:
                return
            content = disk.folders[delta.path].content
        raise AssertionError(f"{record.id} is given up without need: {self._life.targets.carriage.refused[record.id]}")

    def _nothing_leaks(self) -> None:
        plan = self._world.loop.run_until_complete(self._life.collector.sweeper.plan())
        doomed = [line.path for line in plan.items if not line.keep]
        assert not doomed, f"leaked: {doomed}"
        assert not self._world.disk.trash, "leaked: the trash is not empty"
        # Where the listing has nothing the root may be unmounted, and nothing is deleted.
        is_listed = bool(self._world.disk.folders)
        assert not (is_listed and self._world.disk.incoming), "leaked: what dead publishers left"

    @property
    def _life(self) -> "Life":
        assert self._world.life is not None
        return self._world.life
