"""Several hosts that their hub leads: it sees each of them as an engine, and orders what it serves."""

import asyncio
import random
import shutil
import sqlite3
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from refitd.api.follow import newest_elsewhere
from refitd.api.operations import rollback
from refitd.engine.plugin.leading import Leads
from refitd.policy.strategy import StrategyName
from refitd.problem import ProblemError
from refitd.state.journal.journal import JournalError
from refitd.state.journal.sqlite_file import JOURNAL_NAME
from refitd.state.records import EngineRecord
from refitd.update.hosts import ReportedHosts
from refitd_client.contract.follow import HostReply
from refitd_client.contract.naming import SERVICE_FOLDER, parse_version_folder, parse_version_id
from refitd_client.contract.plugin import Owner
from refitd_client.contract.wire import Rollback
from refitd_client.publish.run_folder import decide

from .disk import Make, SimFolder
from .hosts import HUB, Host, Hosts
from .led_promises import LedHostPromises, LedHubPromises
from .life import Life
from .links import Damage
from .orders import OrderBook, Stage
from .place import Place
from .world import RUN

GROUPED = 0.5  # of the hubs
ALONE = 0.5  # of the hubs have no engines of their own
_ANOTHER = "of the same name"
_SAID = ("has led with epoch", "does not know", _ANOTHER)  # what hosts say that wait for the operator of their hub
ORDER_SECONDS = 5.0  # in which an order comes that is waited for


@dataclass(frozen=True, slots=True)
class Backup:
    """What an operator has copied of a hub: its journal, what it keeps of its own in the root, and the runs there."""

    folder: Path
    folders: dict[str, SimFolder]
    epoch: int
    service: str
    notices: frozenset[str]


class LedHost(Host):
    """A host that its hub leads."""

    world: "LedHosts"
    is_free = False

    def _promises(self) -> LedHostPromises:
        return LedHostPromises(self)


class LedHosts(Hosts):
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
        self.service = HUB  # the name by which hosts know it: another one where it has lost its own
        self.backup: Backup | None = None
        self.book = OrderBook()
        super().__init__(seed, strategy=strategy, vllm=vllm, followers=followers)
        self.waits = True

    @property
    def urls(self) -> list[str]:
        """See `Place`."""
        return [] if self._is_alone else super().urls

    def leading(self, life: Life) -> ReportedHosts:
        """See `Place`."""
        return ReportedHosts(
            life.store,
            self.clock,
            Leads(owner=Owner(service=self.service, root="/root", host=HUB, pid=1, epoch=self.epoch)),
        )

    def heard_report(self, name: str, reply: HostReply) -> bool:
        """See `Place`."""
        self.book.reported(name)
        if not self.book.replied(name, reply):
            return False
        for version in reply.serve.values():
            self.promises.ordered(name, version)
        return True

    def heard_reply(self, name: str, reply: HostReply, *, is_new: bool) -> None:
        """See `Place`."""
        self.book.heard(name, reply, is_new=is_new)

    def start(self) -> None:
        """See `Place`."""
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
        """See `Place`. What is wrong on a host is mended there first."""
        if not super().wants_operator(engine, tended):
            return False
        lives = [(host, host.life) for host in self.hosts if self.leads(engine) and host.life is not None]
        return not any(
            host.wants_operator(each, tended) for host, life in lives for each in life.store.engines.values()
        )

    # What may happen beside.

    def cut_orders(self, index: int, *, cut: bool) -> None:
        """A host hears its hub no more, and other hosts as before."""
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

    # What may become of the hub's disk.

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
            on_hosts = parse_version_id(newest_elsewhere(RUN, self.life.service) or "")
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
        """See `World`. The operator of the hub also does what hosts say that wait for him, each thing once."""
        found = super()._tend(place, tended)
        if place is not self or self.life is None:
            return found
        said = [host.following().refused or "" for host in self.hosts if host.life is not None]
        target = self.life.targets.of_run(RUN).target
        for why in _SAID:
            if any(why in each for each in said) and target is not None and why not in tended:
                tended.add(why)
                self.counts[f"operator: {why}"] += 1
                if why == _ANOTHER:
                    self.begin_training_again()
                    self.publish(Make.GOOD, announce=True)
                else:
                    self.roll_back(target.id)
                return True
        return found
