"""One rank's part of an update: prepare, commit, restore.

Preparing reads and checks, and touches nothing; most of it may have been done before, by the channel's thread while the
engine served. Committing goes through SGLang's own function, with the tensors of the prepared version or the changes of
a prepared delta. What was served before can be put back until the new version is kept, whatever became of its folder.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import assert_never

from refitd.catalog.contents import ReadingStoppedError
from refitd.catalog.validate import Options
from refitd_sglang.answer import Answer
from refitd_sglang.call import Call
from refitd_sglang.commit import Commit
from refitd_sglang.contents import contents_of, digest
from refitd_sglang.devices import idle
from refitd_sglang.footing import Footing
from refitd_sglang.lease import LED, Lease, LedError, is_of_another_root
from refitd_sglang.loading import Loading
from refitd_sglang.memory import released
from refitd_sglang.preparing import Preparing
from refitd_sglang.quantised import loaded_once
from refitd_sglang.ranks import Ranks
from refitd_sglang.source import FullNeededError, SourceRefusedError
from refitd_sglang.stages import Stages
from refitd_sglang.transaction import Outcome, Report, State, Step, after_commit, after_prepare, after_restore
from refitd_sglang.versions import Runner
from refitd_sglang.way import Way

logger = logging.getLogger("refitd_sglang")


@dataclass(frozen=True, slots=True)
class _Refused:
    """Why nothing is written on this rank. `needs` as in `Report`."""

    reason: str
    needs: str = ""


class Engine:
    """One rank. The channel's thread calls `prepare`; all else happens in SGLang's own thread."""

    def __init__(self, runner: Runner, loader: type, ranks: Ranks, *, root: Path | None, check_bytes: bool) -> None:
        self.runner = runner
        self.loading = Loading(runner, loader)
        self.footing = Footing(root, runner.config)
        self.preparing = Preparing(runner, root, self.loading, self.footing)
        self.lease = Lease()
        self.root = root  # of the service that leads; None until its channel is open
        self.touched = False  # whether an update that is going on may have written, here or on another rank
        self._ranks, self._check_bytes = ranks, check_bytes
        self._prepared: Way | None = None
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
    ) -> Way:
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
            self.footing.fall_back_on_files()
            if offer is None:
                way = self.preparing.ahead(path, options or Options(), check_bytes=check, stop=stop, stages=stages)
            else:
                way = self.preparing.offered(path, offer)
        if stop.is_set():
            raise ReadingStoppedError
        if not self.runner.may_release:  # what is not there must not be read, and nobody tells this thread
            with stages.during("ready"):
                self.preparing.make_ready(way)
        with self._lock:
            if stop.is_set():  # before it is kept: nobody would close it
                raise ReadingStoppedError
            self._prepared = way
        return way

    def forget(self) -> None:
        """Close what was prepared."""
        with self._lock:
            self._prepared = None

    def lost_track(self) -> None:
        """Something else than the plugin writes weights."""
        self.footing.stand_on(None)

    @property
    def served(self) -> str:
        """The id of the version that is served, as far as it came by way of the plugin."""
        return self.footing.label

    @property
    def no_deltas(self) -> str:
        """Why no delta can be applied to what is served; empty where one can."""
        standing = self.footing.standing
        if standing is None:
            return "nothing is known of the weights in memory"
        plan = self.loading.plan_for_deltas(standing.source.inventory)
        return plan if isinstance(plan, str) else ""

    def update(self, call: Call) -> Answer:
        """Carry out one update. All ranks do at the same time."""
        self._stages, self.touched = call.stages, False
        self._ranks.begin()
        with self._stages.during("prepare"):
            ready = self._ready(call)
        if isinstance(ready, _Refused):
            mine = Report(rank=self._ranks.rank, state=State.REFUSED, reason=ready.reason[:1000], needs=ready.needs)
        else:
            mine = Report(rank=self._ranks.rank, state=State.READY, version=ready.way.digest)
        self.touched = self._ranks.size > 1  # from here on another rank may go on without this one
        with self._stages.during("agree"):
            decision, reports = self._ranks.decide("prepare", mine, after_prepare)
        if decision.step is Step.COMMIT and isinstance(ready, Commit):
            return self._commit(ready)
        outcome = Outcome.UNKNOWN if decision.step is Step.ABANDON else Outcome.REFUSED
        needs = max((each.needs for each in reports if each is not None), default="")
        return Answer(outcome=outcome, reason=decision.reason, needs=needs, ms=self._stages.ms)

    def _commit(self, update: Commit) -> Answer:
        self.touched = True
        with self._stages.during("load"):
            mine = update.write()
        with self._stages.during("agree"):
            decision, _ = self._ranks.decide("commit", mine, after_commit)
        match decision.step:
            case Step.KEEP:
                return self._keep(update)
            case Step.REFUSE:
                outcome = Outcome.REFUSED
            case Step.RESTORE | Step.COMMIT | Step.ABANDON:
                with self._stages.during("restore"):
                    mine = update.restore(mine)
                outcome = self._ranks.outcome("restore", mine, after_restore)
            case _:
                assert_never(decision.step)
        self._settled(update, outcome)
        reason = f"{decision.reason}; {mine.reason}" if mine.reason not in {"", decision.reason} else decision.reason
        return Answer(outcome=outcome, reason=reason, how=update.how, version=update.way.label, ms=self._stages.ms)

    def _keep(self, update: Commit) -> Answer:
        way = update.way
        self.footing.stand_on(way.standing(update.after))
        return Answer(
            outcome=Outcome.SERVED,
            version=way.label,
            how=update.how,
            contents=digest(update.after),
            proved=way.proved,
            ms=self._stages.ms,
        )

    def _settled(self, update: Commit, outcome: Outcome) -> None:
        self.loading.plan = None  # whatever failed, it may have been the plan
        if outcome is Outcome.UNKNOWN:
            self.footing.stand_on(None)
        else:
            self.runner.config.model_path = update.model_path

    def _ready(self, call: Call) -> Commit | _Refused:
        """What was prepared for this path, if it is still what it was; otherwise look now. Why not, where not."""
        try:
            return self._fitting(call)
        except FullNeededError as error:
            return _Refused(str(error), "full")
        except LedError as error:
            return _Refused(str(error), LED)
        except (SourceRefusedError, OSError) as error:
            return _Refused(str(error))
        except Exception as error:  # whatever it is, other ranks wait for this one's report
            logger.warning("refitd could not prepare a load", exc_info=True)
            return _Refused(f"{type(error).__name__}: {error}")

    def _refuse_what_is_loaded_once(self) -> None:
        if (reason := loaded_once(self.runner.model, self.runner.config)) is not None:
            raise SourceRefusedError(reason)

    def _refuse_what_is_another_s(self, path: str) -> None:
        leader = self.lease.leader()
        if leader is not None and self.root is not None and is_of_another_root(path, self.root):
            raise LedError(leader)
        self.lease.renew()  # while it loads it has no time to

    def _fitting(self, call: Call) -> Commit:
        with self._lock:
            way, self._prepared = self._prepared, None
        self._refuse_what_is_another_s(call.path)
        self._refuse_what_is_loaded_once()
        if self.runner.may_release and (name := released(self.runner.model)) is not None:
            raise SourceRefusedError(f"the memory of {name} is released: POST /resume_memory_occupation first")
        if way is None or str(way.folder) != str(Path(call.path).absolute()):
            way = self.preparing.here(call.path, check_bytes=self._check_bytes)
        elif not way.is_unchanged():
            raise SourceRefusedError(f"{call.path} is not what it was when it was prepared")
        with self._stages.during("before"):
            idle(self.runner.model)
            before = None if way.watches else contents_of(self.runner.model)
        if before is not None:
            way.fit(self.footing.standing, before)
        return Commit(
            call=call,
            way=way,
            rank=self._ranks.rank,
            model=self.runner.model,
            model_path=str(self.runner.config.model_path),
            before=before,
            previous=self.footing.previous,
            stages=self._stages,
        )
