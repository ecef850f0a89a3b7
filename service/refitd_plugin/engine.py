"""One rank's part of an update: prepare, commit, restore.

Preparing reads and checks, and touches nothing; most of it may have been done before, by the channel's thread while the
engine served. Committing goes through the engine's own function, with the tensors of the prepared version or the
changes of a prepared delta. What was served before can be put back until the new version is kept, whatever became of
its folder.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import assert_never

from refitd_client.contract.answer import NEEDS_FULL, NEEDS_LEADER, Answer, UpdateOutcome
from refitd_client.validation.contents import ReadingStoppedError
from refitd_client.validation.validate import Options
from refitd_plugin.commit import Commit
from refitd_plugin.contents import contents_of, digest
from refitd_plugin.devices import idle, released
from refitd_plugin.lease import LeaderLease, LedError, is_of_another_root
from refitd_plugin.loading import Loading
from refitd_plugin.port import EngineProcess, UpdateCall
from refitd_plugin.preparing import Preparing
from refitd_plugin.ranks import Ranks
from refitd_plugin.restore_point import RestorePoint
from refitd_plugin.source import FullNeededError, SourceRefusedError
from refitd_plugin.stages import Stages
from refitd_plugin.transaction import NextStep, RankReport, RankState, after_commit, after_prepare, after_restore
from refitd_plugin.update_source import UpdateSource

logger = logging.getLogger("refitd_plugin")


@dataclass(frozen=True, slots=True)
class _Refused:
    """Why nothing is written on this rank. `needs` as in `RankReport`."""

    reason: str
    needs: str = ""


class RankEngine:
    """One rank. The channel's thread calls `prepare`; all else happens in the engine's own thread."""

    def __init__(self, process: EngineProcess, ranks: Ranks, *, root: Path | None, check_bytes: bool) -> None:
        self.process = process
        self.loading = Loading(process)
        self.restore_point = RestorePoint(root, process.revision)
        self.preparing = Preparing(process, root, self.loading, self.restore_point)
        self.lease = LeaderLease()
        self.root = root  # of the service that leads; None until its channel is open
        self.touched = False  # whether an update that is going on may have written, here or on another rank
        self._ranks, self._check_bytes = ranks, check_bytes
        self._prepared: UpdateSource | None = None
        self._lock = Lock()
        self._stages = Stages()

    def prepare(
        self,
        path: str,
        options: Options | None = None,
        *,
        check_bytes: bool | None = None,
        stages: Stages | None = None,
        stop: Event | None = None,
        offer: str | None = None,
    ) -> UpdateSource:
        """Check a version and keep it for the update that will name it. `stop` ends it early. With `offer`, the path of
        its file beneath the root, the version is in a trainer's memory.

        Raises:
            SourceRefusedError: it is not one to load into this model. OSError: it cannot be read.
            ReadingStoppedError: `stop` was set.
        """
        self._refuse_what_is_loaded_once()
        stages, stop = stages or Stages(), stop or Event()
        check = self._check_bytes if check_bytes is None else check_bytes
        with stages.during("check"):
            self.restore_point.fall_back_on_files()
            if offer is None:
                update_source = self.preparing.ahead(
                    path, options or Options(), check_bytes=check, stop=stop, stages=stages
                )
            else:
                update_source = self.preparing.offered(path, offer)
        if stop.is_set():
            raise ReadingStoppedError
        if not self.process.may_release:  # what is not there must not be read, and nobody tells this thread
            with stages.during("ready"):
                self.preparing.make_ready(update_source)
        with self._lock:
            if stop.is_set():  # before it is kept: nobody would close it
                raise ReadingStoppedError
            self._prepared = update_source
        return update_source

    def forget(self) -> None:
        """Close what was prepared."""
        with self._lock:
            self._prepared = None

    def lost_track(self) -> None:
        """Something else than the plugin writes weights."""
        self.restore_point.record(None)

    @property
    def served(self) -> str:
        """The id of the version that is served, as far as it came by way of the plugin."""
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
        if isinstance(ready, _Refused):
            mine = RankReport(
                rank=self._ranks.rank, state=RankState.REFUSED, reason=ready.reason[:1000], needs=ready.needs
            )
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
        with self._stages.during("agree"):
            decision, _ = self._ranks.decide("commit", mine, after_commit)
        match decision.step:
            case NextStep.KEEP:
                return self._keep(update)
            case NextStep.REFUSE:
                outcome = UpdateOutcome.REFUSED
            case NextStep.RESTORE | NextStep.COMMIT | NextStep.ABANDON:
                with self._stages.during("restore"):
                    mine = update.restore(mine)
                outcome = self._ranks.outcome("restore", mine, after_restore)
            case _:
                assert_never(decision.step)
        self._settled(update, outcome)
        reason = f"{decision.reason}; {mine.reason}" if mine.reason not in {"", decision.reason} else decision.reason
        return Answer(
            outcome=outcome, reason=reason, how=update.how, version=update.update_source.label, ms=self._stages.ms
        )

    def _keep(self, update: Commit) -> Answer:
        update_source = update.update_source
        self.restore_point.record(update_source.served_state(update.after))
        return Answer(
            outcome=UpdateOutcome.SERVED,
            version=update_source.label,
            how=update.how,
            contents=digest(update.after),
            proved=update_source.proved,
            ms=self._stages.ms,
        )

    def _settled(self, update: Commit, outcome: UpdateOutcome) -> None:
        self.loading.plan = None  # whatever failed, it may have been the plan
        if outcome is UpdateOutcome.UNKNOWN:
            self.restore_point.record(None)
        else:
            self.process.set_model_path(update.model_path)

    def _ready(self, call: UpdateCall) -> Commit | _Refused:
        """What was prepared for this path, if it is still what it was; otherwise look now. Why not, where not."""
        try:
            return self._fitting(call)
        except FullNeededError as error:
            return _Refused(str(error), NEEDS_FULL)
        except LedError as error:
            return _Refused(str(error), NEEDS_LEADER)
        except (SourceRefusedError, OSError) as error:
            return _Refused(str(error))
        except Exception as error:  # whatever it is, other ranks wait for this one's report
            logger.warning("refitd could not prepare a load", exc_info=True)
            return _Refused(f"{type(error).__name__}: {error}")

    def _refuse_what_is_loaded_once(self) -> None:
        if (reason := self.process.loaded_once()) is not None:
            raise SourceRefusedError(reason)

    def _refuse_what_is_another_s(self, path: str) -> None:
        leader = self.lease.leader()
        if leader is not None and self.root is not None and is_of_another_root(path, self.root):
            raise LedError(leader)
        self.lease.renew()  # while it loads it has no time to

    def _fitting(self, call: UpdateCall) -> Commit:
        with self._lock:
            update_source, self._prepared = self._prepared, None
        self._refuse_what_is_another_s(call.path)
        self._refuse_what_is_loaded_once()
        if self.process.may_release and (name := released(self.process.model)) is not None:
            raise SourceRefusedError(f"the memory of {name} is released: POST /resume_memory_occupation first")
        if update_source is None or str(update_source.folder) != str(Path(call.path).absolute()):
            update_source = self.preparing.here(call.path, check_bytes=self._check_bytes)
        elif not update_source.is_unchanged():
            raise SourceRefusedError(f"{call.path} is not what it was when it was prepared")
        with self._stages.during("before"):
            idle(self.process.model)
            before = None if update_source.watches else contents_of(self.process.model)
        if before is not None:
            update_source.fit(self.restore_point.served_state, before)
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
