"""Several hosts whose hub may lose its disk: it is restored from a backup, or begins with nothing, and hosts go on."""

import asyncio
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from refitd.api.operations import rollback
from refitd.policy.strategy import StrategyName
from refitd.problem import ProblemError
from refitd.state.journal.database import JOURNAL_NAME
from refitd.state.journal.journal import JournalError
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import SERVICE_FOLDER, parse_version_folder, parse_version_id
from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import Rollback
from refitd_client.publish.run_folder import decide

from .disk import Make, SimFolder
from .hosts import HUB, Hosts, HubPromises
from .place import Place
from .server import SimServer
from .world import RUN

_ANOTHER = "of the same name"
_SAID = ("has led with epoch", "does not know", _ANOTHER)  # what hosts say that wait for the operator of their hub


@dataclass(frozen=True, slots=True)
class Backup:
    """What an operator has copied of a hub: its journal, what it keeps of its own in the root, and the runs there."""

    folder: Path
    folders: dict[str, SimFolder]
    epoch: int
    service: str
    notices: frozenset[str]


class ForgettingHosts(Hosts):
    """A world in which the hub may lose its disk. `service` and `epoch` are those by which hosts know it: the name is
    another one where it has lost its own.
    """

    promises: "ForgettingHubPromises"
    service = HUB
    epoch = 0
    backup: Backup | None = None

    def __init__(
        self, seed: int, *, strategy: StrategyName = StrategyName.ALL, vllm: str = "", followers: int = 2
    ) -> None:
        super().__init__(seed, strategy=strategy, vllm=vllm, followers=followers)
        self.waits = True
        self._left_paused: set[str] = set()  # engines of the hub that it was loading when its disk went

    def _promises(self) -> "ForgettingHubPromises":
        return ForgettingHubPromises(self)

    def back_up(self) -> None:
        """An operator copies the hub's journal, as it is at a moment, and then its root."""
        folder = self.state / f"backup-{self.counts['backups']}"
        self.counts["backups"] += 1
        shutil.copytree(self.own_root, folder / "root")
        journal, copy = (closing(sqlite3.connect(at / JOURNAL_NAME)) for at in (self.state, folder))
        with journal as one, copy as other:
            one.backup(other)
        self.backup = Backup(folder, self.disk.copied(), self.epoch, self.service, self.promises.notices)

    def lose_disk(self, *, emptied: bool, begins: bool) -> None:
        """The hub's disk is gone. It comes back from the newest backup; it is empty, and the service has another name,
        where there is none, or where it is `emptied`. The trainer goes on, or `begins` again before the service does.
        """
        self.take_back(announce=False)
        self.kill()
        self._left_paused.update(name for name, server in self.servers.items() if server.paused)
        for path in self.state.glob(f"{JOURNAL_NAME}*"):
            path.unlink()
        shutil.rmtree(self.own_root)
        before = None if emptied else self.backup
        if before is None:
            self.disk.clear(whole=True)
            (self.own_root / SERVICE_FOLDER).mkdir(parents=True)
            self.counts["emptied"] += 1
            self.service, self.epoch = f"{HUB} {self.counts['emptied']}", 0
        else:
            self.disk.put_back(before.folders)
            shutil.copytree(before.folder / "root", self.own_root)
            shutil.copyfile(before.folder / JOURNAL_NAME, self.state / JOURNAL_NAME)
            self.counts["restored"] += 1
            self.service, self.epoch = before.service, before.epoch
        self.promises.is_another(frozenset() if before is None else before.notices)
        self.trained.clear()  # what a delta would stand on is gone
        if begins:
            self.begin_training_again()
        self.start()

    def begin_training_again(self) -> None:
        """The trainer starts again at an earlier step. Its publisher looks into the run's folder, and asks the service,
        if it runs, for what it knows and hosts have: as `publisher._placed` does.
        """
        self.kill_trainer()
        found = [parse_version_folder(path.rpartition("/")[2]) for path in self.disk.folders]
        if self.life is not None:
            on_hosts = parse_version_id(self.life.hosts.newest_unknown(RUN) or "")
            found += [self.life.store.index.newest_of(RUN), None if on_hosts is None else on_hosts[1]]
            gone = [parse_version_id(version) for version in self.life.store.gone]
            found += [each[1] for each in gone if each is not None]
        order = decide(self.step // 2, found=max((each for each in found if each is not None), default=None), own=None)
        assert order is not None
        self.generation, self.step = order.generation, order.step - 1
        self.trained.clear()

    def roll_back(self, to: str | None = None) -> None:
        """See `World`. At an operator's word hosts go back from all that was published until then."""
        if self.life is None:
            return
        try:
            order = rollback(Rollback(run=RUN, to=to), self.life.service)
            goal = self.loop.run_until_complete(asyncio.wait_for(order, 1.0))
        except ProblemError:
            return
        except (JournalError, TimeoutError):  # it may have been taken
            goal = None
        self.promises.rolled_back(None if goal is None else goal.id)

    def _tend(self, place: Place, tended: set[str]) -> bool:
        """See `World`. The operator of the hub also does what hosts say that wait for him, each thing once.

        He restarts the hub's own engines that it has left paused in the middle of a load, as docs/many-hosts.md says:
        with the disk went what the hub knew of them. Nobody can know what they hold, and a load repairs them only when
        something is published.
        """
        cut_off = [self.servers[name] for name in sorted(self._left_paused) if self.servers[name].paused]
        if place is self and cut_off:
            self._left_paused.clear()
            self.counts["restarted after a loss"] += len(cut_off)
            self._restart(cut_off)
            return True
        found = super()._tend(place, tended)
        if place is not self or self.life is None:
            return found
        told = [host.following() for host in self.hosts if host.life is not None]
        said = [f"{each.refused} {each.order_reason}" for each in told]
        refusing = [each for each in self.life.store.engines.values() if each.state is EngineState.NACKED]
        said += [each.reason or "" for each in refusing if self.leads(each)]  # then it was ordered back
        target = self.life.targets.of_run(RUN).target
        for why in _SAID:
            if any(why in each for each in said) and target is not None and why not in tended:
                tended.add(why)
                self.counts[f"operator: {why}"] += 1
                if why == _ANOTHER:
                    self.begin_training_again()
                    self.publish(Make.GOOD, announce=True)
                    self.disk.incoming = dict.fromkeys(self.disk.incoming, False)  # and that trainer ends
                else:
                    self.roll_back(target.id)
                return True
        return found


class ForgettingHubPromises(HubPromises):
    """What holds at such a hub: what counts as served are the bytes that it has now under the name."""

    _world: ForgettingHosts

    def holds(self, server: SimServer) -> None:
        self._held.update(server.tensors)

    @property
    def notices(self) -> frozenset[str]:
        return frozenset(self._noticed)

    def is_another(self, notices: frozenset[str]) -> None:
        """The hub's disk was lost: it knows what its backup has, and its own engines may go back with it. Its hosts
        may not: what was promised of them stays.
        """
        self._noticed = set(notices)
        self._served &= notices
        self._restored.update(self._world.disk.folders)
        for known in (self._taken, self._proofs, self._reached, self._freed):
            known.clear()

    def rolled_back(self, goal: str | None) -> None:
        """An operator has said where to go back to: from all that was ever published after it, known here or not."""
        to = None if goal is None else self.orders[self._paths[goal]]
        self._world.was_left.update(id_ for id_, path in self._paths.items() if to is None or self.orders[path] > to)

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        """3: what counts as served was held by an engine: these bytes, and none that had the name before."""
        super().version_changed(before, after)
        folder, was_served = self._world.disk.folders.get(after.path), before is not None and before.served_at
        if after.served_at is not None and not was_served and folder is not None:
            assert folder.content in self._held, f"3: {after.id} is called served, and no engine held {folder.content}"
