"""One rank's part of an update: prepare, commit, restore.

Preparing reads and checks, and touches nothing; most of it may have been done before, by the channel's thread while the
engine served. Committing goes through the engine's own function, with the tensors of the prepared version or the
changes of a prepared delta; it ends in a report, whatever happens. What was served before can be put back until the new
version is kept, whatever became of its folder.

A service leads the engine that took the lease, while its process lives and it renews the lease. While one leads, an
update from the root of another service is refused. Each rank keeps a lease of its own; where they differ, no rank
writes.

The services of a group have one name and take over from each other at once. One whose epoch is lower than another that
was seen of the group has been taken over from, and is refused for good.
"""

import logging
import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from typing import assert_never

import torch

from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.plugin import NEEDS_FULL, NEEDS_LEADER, Answer, Owner, UpdateOutcome
from refitd_client.files.plain_file import process_descriptor
from refitd_client.validation.contents import ReadingStoppedError
from refitd_client.validation.validate import Options
from refitd_plugin.memory.source import FullNeededError, SourceRefusedError
from refitd_plugin.port import EngineProcess, Stages, UpdateCall
from refitd_plugin.proof.contents import contents_of, digest, idle, released
from refitd_plugin.proof.proving import prover_of
from refitd_plugin.proof.slices import EngineSlices, SliceVerdict, encode_sums
from refitd_plugin.settings import PluginSettings
from refitd_plugin.update.loading import Loading, TensorFeed
from refitd_plugin.update.plan import TensorAddresses, addresses_of
from refitd_plugin.update.preparing import Preparing, RestorePoint
from refitd_plugin.update.ranks import (
    Decision,
    NextStep,
    RankReport,
    Ranks,
    RankState,
    Reports,
    after_commit,
    after_prepare,
    after_restore,
)
from refitd_plugin.update.update_source import ServedState, UpdateSource

LONGEST_SECONDS = 600.0


class LedError(Exception):
    """An update comes from another service than the one that leads. The message names the one that leads."""


class LeaderLease:
    """The lease of one rank. `clock` is monotonic, in seconds. For any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._owner: Owner | None = None
        self._process: int | None = None  # a descriptor of the owner's process, where this one can see it
        self._seconds = self._renewed = 0.0
        self._newest: Owner | None = None  # of the group that led last, with the highest epoch that it showed

    def take(self, owner: Owner, seconds: float, pid: int = 0) -> str | None:
        """Take the lease, or renew it. Returns a sentence that names another service that leads; None where none does.
        `seconds`: for how long, unless it is renewed. `pid`: the owner's process as this one sees it, 0 where it
        cannot.
        """
        with self._lock:
            other, newest = self._current(), self._newest
            if other is not None and other.service != owner.service:
                return self._sentence(other)
            if newest is not None and newest.service == owner.service and owner.epoch < newest.epoch:
                who = f"the refitd at {newest.host} (pid {newest.pid})"
                return f"the engine is led by {who}, with epoch {newest.epoch} after {owner.epoch}"
            self._end()
            self._owner = self._newest = owner
            self._process = _opened(pid)
            self._seconds, self._renewed = min(seconds, LONGEST_SECONDS), self._clock()
            return None

    def renew(self) -> None:
        """Renew the lease of the service that leads: it could not do so while it loaded a version."""
        with self._lock:
            if self._current() is not None:
                self._renewed = self._clock()

    def leader(self) -> str | None:
        """A sentence that names the service that leads the engine; None where none does."""
        with self._lock:
            owner = self._current()
            return None if owner is None else self._sentence(owner)

    def _current(self) -> Owner | None:
        if self._clock() - self._renewed >= self._seconds or _has_ended(self._process):
            self._end()
        return self._owner

    def _end(self) -> None:
        if self._process is not None:
            os.close(self._process)
        self._owner = self._process = None

    def _sentence(self, owner: Owner) -> str:
        who = f"the refitd of root {owner.root} at {owner.host} (pid {owner.pid})"
        return f"the engine is led by {who}, which said so {self._clock() - self._renewed:.0f} s ago"


def is_of_another_root(path: str, root: Path) -> bool:
    """Whether a folder lies in the root of another service than the one that has `root`."""
    with suppress(OSError):  # what cannot be looked at is not loaded either, and that says why
        nearest = next((above for above in Path(path).absolute().parents if (above / SERVICE_FOLDER).is_dir()), None)
        return nearest is not None and not nearest.samefile(root)
    return False


def _opened(pid: int) -> int | None:
    if pid <= 0:
        return None
    with suppress(OSError):  # it has ended just now, or a kernel without
        return process_descriptor(pid)
    return None


def _has_ended(process: int | None) -> bool:
    """Whether a process has ended: then its descriptor can be read."""
    if process is None:
        return False
    poll = select.poll()  # select() fails on descriptors from 1,024 on
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


logger = logging.getLogger("refitd_plugin")


@dataclass(slots=True, kw_only=True)
class Commit:
    """The writing of a version that fits, on one rank.

    `model_path` and `before` are what the engine named and the model held before (None where the update source watches
    that itself); `after` is what the model holds then. `previous` opens what is served now, so that it can be put back.
    """

    call: UpdateCall
    update_source: UpdateSource
    rank: int
    model: torch.nn.Module
    model_path: str
    before: dict[str, str] | None
    previous: Callable[[str], ServedState | None]
    stages: Stages
    how: str = ""
    after: dict[str, str] = field(default_factory=dict[str, str])
    _served: ServedState | None = None
    _places: TensorAddresses | None = None
    _written: TensorFeed | None = None

    def write(self) -> RankReport:
        """Load the version. Never raises: the other ranks wait for the report."""
        began = False
        try:
            self._served = self.previous(self.model_path)  # before anything is written
            self._places = addresses_of(self.model)
            began = True
            return self._load()
        except Exception as error:
            logger.warning("refitd could not carry out a load", exc_info=True)
            return self._report(RankState.FAILED if began else RankState.UNTOUCHED, f"{type(error).__name__}: {error}")

    def restore(self, mine: RankReport) -> RankReport:
        """Put back what was there, and hold it against the fingerprints of before. `mine` is what `write` reported."""
        if mine.state is RankState.UNTOUCHED:
            return mine
        try:
            return self._put_back()
        except Exception as error:
            logger.warning("refitd could not put back what was there", exc_info=True)
            return self._report(RankState.LOST, f"{type(error).__name__}: {error}")

    def _load(self) -> RankReport:
        with self.stages.during("write"):
            feed = self.update_source.write(self.call)
        self.how, self._written = feed.how, feed
        self.before = feed.before if self.before is None else self.before
        if (fault := feed.fault) is not None:
            same = self.before is None or contents_of(self.model) == self.before
            untouched = not feed.begun and same and self._in_place
            return self._report(RankState.UNTOUCHED if untouched else RankState.FAILED, fault)
        with self.stages.during("after"):
            self.after = contents_of(self.model) if feed.after is None else feed.after
            fault = self.update_source.check(self.after)
        return self._written_report() if fault is None else self._report(RankState.FAILED, fault)

    def _put_back(self) -> RankReport:
        feed = self.update_source.put_back(self.call, self._served, self.model_path)
        fault = feed.fault
        known = self.before
        if known is None and self._served is not None:  # `write` failed before it took them: those of the last load
            known = self._served.contents or None
        if contents_of(self.model) != known:
            return self._lost(fault or "its fingerprints are not those of before")
        if fault is None:
            return self._report(RankState.RESTORED)
        # After the last tensor SGLang repacks weights and models compute some more, also into what is neither parameter
        # nor buffer: no fingerprint shows whether that is half done. What reads weights by their addresses (a captured
        # graph) needs them in their places.
        if self._written is None or self._written.done or feed.done or not self._in_place:
            return self._lost(fault)
        return self._report(
            RankState.RESTORED, f"putting it back failed too ({fault}), but every weight is what it was"
        )

    @property
    def _in_place(self) -> bool:
        return addresses_of(self.model) == self._places

    def _lost(self, fault: str) -> RankReport:
        return self._report(RankState.LOST, f"{self.model_path} could not be put back: {fault}")

    def _written_report(self) -> RankReport:
        check = self.update_source.slice_check
        if check is None:
            return RankReport(rank=self.rank, state=RankState.WRITTEN)
        sums = encode_sums(check.found.sums)
        return RankReport(rank=self.rank, state=RankState.WRITTEN, slices=check.found.table, sums=sums)

    def _report(self, state: RankState, reason: str = "") -> RankReport:
        return RankReport(rank=self.rank, state=state, reason=reason[:1000])


class RankEngine:
    """One rank's part of updates. The channel's thread calls `prepare`; the engine's own thread calls all else."""

    def __init__(self, process: EngineProcess, ranks: Ranks, settings: PluginSettings) -> None:
        self.process = process
        self.loading = Loading(process)
        self.restore_point = RestorePoint(settings.root, process.revision)
        prover = prover_of(process, self.loading.registry, settings)
        self.preparing = Preparing(process, settings.root, self.loading, self.restore_point, prover)
        self.lease = LeaderLease()
        self.root = settings.root  # of the service that leads; None until its channel is open
        self.touched = False  # whether an update that is going on may have written, here or on another rank
        self._ranks = ranks
        self._slices = EngineSlices()
        self._prepared: UpdateSource | None = None
        self._lock = Lock()
        self._stages = Stages()

    def prepare(
        self,
        path: str,
        options: Options | None = None,
        *,
        check_bytes: bool = True,
        stages: Stages | None = None,
        stop: Event | None = None,
        offer: str | None = None,
        prove: bool = False,
    ) -> UpdateSource:
        """Check a version and keep it for the update that will name it. `offer`: the path of an offer's file beneath
        the root, where the version is in a trainer's memory. `prove`: whether this rank's share of a full version's
        tensors is held against the manifest.

        Raises:
            SourceRefusedError: it is not one to load into this model.
            ReadingStoppedError: `stop` was set. OSError: it cannot be read.
        """
        self._check_loads_again()
        stages, stop = stages or Stages(), stop or Event()
        with stages.during("check"):
            self.restore_point.fall_back_on_files()
            if offer is None:
                update_source = self.preparing.ahead(
                    path, options or Options(), check_bytes=check_bytes, stop=stop, stages=stages
                )
            else:
                update_source = self.preparing.offered(path, offer, stop)
        if stop.is_set():
            raise ReadingStoppedError
        if not self.process.may_release:  # released memory must not be read, and this thread does not hear of it
            with stages.during("ready"):
                self.preparing.make_ready(update_source)
        if prove and not stop.is_set():
            with stages.during("prove"):
                self.preparing.prove(update_source)
        with self._lock:
            if stop.is_set():  # before it is kept, since nothing would close it then
                raise ReadingStoppedError
            self._prepared = update_source
        return update_source

    def forget(self) -> None:
        with self._lock:
            self._prepared = None

    def lost_track(self) -> None:
        """Record that something else than the plugin writes weights."""
        self.restore_point.record(None)

    @property
    def served(self) -> str:
        """The id of the version that is served; empty where the plugin did not load it."""
        return self.restore_point.label

    @property
    def no_deltas(self) -> str:
        """Why no delta can be applied to what is served; empty where one can."""
        served_state = self.restore_point.served_state
        if served_state is None:
            return "nothing is known of the weights in memory"
        plan = self.loading.plan_for_deltas(served_state.source.inventory)
        return plan if isinstance(plan, str) else ""

    def update(self, call: UpdateCall) -> Answer:
        """Carry out one update. All ranks do at the same time."""
        self._stages, self.touched = call.stages, False
        self._ranks.begin()
        with self._stages.during("prepare"):
            ready = self._ready(call)
        if isinstance(ready, RankReport):
            mine = ready
        else:
            mine = RankReport(rank=self._ranks.rank, state=RankState.READY, version=ready.update_source.digest)
        self.touched = self._ranks.size > 1  # from here on another rank may go on without this one
        with self._stages.during("agree"):
            decision, reports = self._ranks.decide("prepare", mine, after_prepare)
        if decision.step is NextStep.COMMIT and isinstance(ready, Commit):
            return self._commit(ready)
        outcome = UpdateOutcome.UNKNOWN if decision.step is NextStep.ABANDON else UpdateOutcome.REFUSED
        needs = max((each.needs for each in reports if each is not None), default="")
        return Answer(outcome=outcome, reason=decision.reason, needs=needs, ms=self._stages.ms)

    def _commit(self, update: Commit) -> Answer:
        self.touched = True
        with self._stages.during("load"):
            mine = update.write()
        source, found = update.update_source, SliceVerdict()

        def decide(reports: Reports) -> Decision:
            nonlocal found
            found = self._slices.verdict(reports, source.slice_check)
            return after_commit(reports, found.fault)

        with self._stages.during("agree"):
            decision, _ = self._ranks.decide("commit", mine, decide)
        match decision.step:
            case NextStep.KEEP:
                self.restore_point.record(source.served_state(update.after))
                return Answer(
                    outcome=UpdateOutcome.SERVED,
                    version=source.label,
                    how=update.how,
                    contents=digest(update.after),
                    proved=len(source.proved | found.proved),
                    ms=self._stages.ms,
                )
            case NextStep.REFUSE:
                outcome = UpdateOutcome.REFUSED
            case NextStep.RESTORE | NextStep.COMMIT | NextStep.ABANDON:
                with self._stages.during("restore"):
                    mine = update.restore(mine)
                outcome = after_restore(self._ranks.exchange("restore", mine))
            case _:
                assert_never(decision.step)
        self.loading.plan = None  # whatever failed, it may have been the plan
        if outcome is UpdateOutcome.UNKNOWN:
            self.restore_point.record(None)
        else:
            self.process.set_model_path(update.model_path)
        reason = f"{decision.reason}; {mine.reason}" if mine.reason not in {"", decision.reason} else decision.reason
        return Answer(outcome=outcome, reason=reason, how=update.how, version=source.label, ms=self._stages.ms)

    def _ready(self, call: UpdateCall) -> Commit | RankReport:
        """The version that was prepared for this path, if it is still what it was; else one that is looked at now. A
        report where nothing is to be written on this rank.
        """
        needs = ""
        try:
            return self._fit(call)
        except FullNeededError as error:
            reason, needs = str(error), NEEDS_FULL
        except LedError as error:
            reason, needs = str(error), NEEDS_LEADER
        except (SourceRefusedError, OSError) as error:
            reason = str(error)
        except Exception as error:  # whatever it is, other ranks wait for this one's report
            logger.warning("refitd could not prepare a load", exc_info=True)
            reason = f"{type(error).__name__}: {error}"
        return RankReport(rank=self._ranks.rank, state=RankState.REFUSED, reason=reason[:1000], needs=needs)

    def _check_loads_again(self) -> None:
        if (reason := self.process.loaded_once()) is not None:
            raise SourceRefusedError(reason)

    def _fit(self, call: UpdateCall) -> Commit:
        with self._lock:
            update_source, self._prepared = self._prepared, None
        leader = self.lease.leader()
        if leader is not None and self.root is not None and is_of_another_root(call.path, self.root):
            raise LedError(leader)
        self.lease.renew()  # the service that leads cannot renew it while the engine loads
        self._check_loads_again()
        if self.process.may_release and (name := released(self.process.model)) is not None:
            raise SourceRefusedError(f"the memory of {name} is released: POST /resume_memory_occupation first")
        if update_source is None or str(update_source.folder) != str(Path(call.path).absolute()):
            update_source = self.preparing.here(call.path)
        elif not update_source.is_unchanged():
            raise SourceRefusedError(f"{call.path} is not what it was when it was prepared")
        with self._stages.during("before"):
            idle(self.process.model)
            before = None if update_source.watches else contents_of(self.process.model)
        update_source.fit(self.restore_point.served_state, before or {})
        return Commit(
            call=call,
            update_source=update_source,
            rank=self._ranks.rank,
            model=self.process.model,
            model_path=self.process.model_path,
            before=before,
            previous=self.restore_point.previous,
            stages=self._stages,
        )
