"""One rank's part of an update: prepare, commit, restore.

Preparing reads and checks, and touches nothing; it may have been done before, by the channel's thread while the engine
served. Committing goes through SGLang's own function, with the tensors of the prepared version. What was served before
stays open until the new version is kept, so that it can be put back whatever became of its folder.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import assert_never

from refitd.catalog.inventory import Reference
from refitd.catalog.validate import Options
from refitd_sglang.answer import Answer
from refitd_sglang.contents import contents_of, digest
from refitd_sglang.feeding import Feed
from refitd_sglang.loading import Call, Loading, idle
from refitd_sglang.ranks import Ranks
from refitd_sglang.source import Source, SourceRefusedError, is_version, mapped, open_version, place_of
from refitd_sglang.startup import folder_of, reference_of, started_from
from refitd_sglang.transaction import Outcome, Report, State, Step, after_commit, after_prepare, after_restore
from refitd_sglang.versions import Runner

logger = logging.getLogger("refitd_sglang")


@dataclass(frozen=True, slots=True)
class Ready:
    """A version that was checked. `partial`: it may lack tensors, which then stay as they are."""

    source: Source
    options: Options

    @property
    def partial(self) -> bool:
        """Whether it may leave some of what was there before."""
        return self.options.allow_missing


@dataclass(slots=True)
class _Update:
    """What is known of the update that is going on."""

    call: Call
    ready: Ready
    model_path: str
    before: dict[str, str] = field(default_factory=dict[str, str])
    previous: Source | None = None
    how: str = ""
    after: str = ""


class Engine:
    """One rank. The channel's thread calls `prepare`; all else happens in SGLang's own thread."""

    def __init__(self, runner: Runner, loader: type, ranks: Ranks, *, root: Path | None, check_bytes: bool) -> None:
        self.runner = runner
        self.loading = Loading(runner, loader)
        self.touched = False  # whether an update that is going on may have written, here or on another rank
        self._ranks, self._root, self._check_bytes = ranks, root, check_bytes
        self._startup = str(runner.config.model_path)
        self._reference: Reference | None = None
        self._served: Source | None = None
        self._prepared: Ready | None = None
        self._lock = Lock()
        self._ms: dict[str, float] = {}

    def prepare(self, path: str, options: Options | None = None, *, check_bytes: bool | None = None) -> Ready:
        """Check a version and keep it for the update that will name it.

        Raises:
            SourceRefusedError: it is not one to load into this model. OSError: it cannot be read.
        """
        ready = self._look(path, options or Options(), self._check_bytes if check_bytes is None else check_bytes)
        with self._lock:
            self._prepared = ready
        return ready

    def forget(self) -> None:
        """Close what was prepared."""
        with self._lock:
            self._prepared = None

    @property
    def served(self) -> str:
        """The id of the version that is served, as far as it came by way of the plugin."""
        served = self._served
        return "" if served is None else served.label

    def update(self, call: Call) -> Answer:
        """Carry out one update. All ranks do at the same time."""
        self._ms, self.touched = {}, False
        self._ranks.begin()
        with self._timed("prepare"):
            ready = self._ready(call.path)
        if isinstance(ready, str):
            mine = Report(rank=self._ranks.rank, state=State.REFUSED, reason=ready)
        else:
            mine = Report(rank=self._ranks.rank, state=State.READY, version=ready.source.digest)
        self.touched = self._ranks.size > 1  # from here on another rank may go on without this one
        with self._timed("agree"):
            decision, _ = self._ranks.decide("prepare", mine, after_prepare)
        if decision.step is Step.COMMIT and isinstance(ready, Ready):
            return self._commit(call, ready)
        outcome = Outcome.UNKNOWN if decision.step is Step.ABANDON else Outcome.REFUSED
        return Answer(outcome=outcome, reason=decision.reason, ms=self._ms)

    def _commit(self, call: Call, ready: Ready) -> Answer:
        update = _Update(call, ready, str(self.runner.config.model_path))
        with self._timed("load"):
            mine = self._written(update)
        with self._timed("agree"):
            decision, _ = self._ranks.decide("commit", mine, after_commit)
        match decision.step:
            case Step.KEEP:
                return self._keep(update)
            case Step.REFUSE:
                outcome = Outcome.REFUSED
            case Step.RESTORE | Step.COMMIT | Step.ABANDON:
                with self._timed("restore"):
                    mine = self._restored(update, mine)
                outcome = self._ranks.outcome("restore", mine, after_restore)
            case _:
                assert_never(decision.step)
        self._settled(update, outcome)
        reason = f"{decision.reason}; {mine.reason}" if mine.reason not in {"", decision.reason} else decision.reason
        return Answer(outcome=outcome, reason=reason, how=update.how, version=ready.source.label, ms=self._ms)

    def _keep(self, update: _Update) -> Answer:
        self._served = None if update.ready.partial else update.ready.source
        label = update.ready.source.label
        return Answer(outcome=Outcome.SERVED, version=label, how=update.how, contents=update.after, ms=self._ms)

    def _settled(self, update: _Update, outcome: Outcome) -> None:
        self.loading.plan = None  # whatever failed, it may have been the plan
        if outcome is Outcome.UNKNOWN:
            self._served = None
        else:
            self.runner.config.model_path = update.model_path

    def _ready(self, path: str) -> Ready | str:
        """What was prepared for this path, if it is still what it was; otherwise look now. Why not, where not."""
        with self._lock:
            ready, self._prepared = self._prepared, None
        try:
            if ready is not None and str(ready.source.place.folder) == str(Path(path).absolute()):
                if ready.source.is_unchanged():
                    return ready
                return f"{path} is not what it was when it was prepared"
            return self._look(path, Options(), self._check_bytes)
        except (SourceRefusedError, OSError) as error:
            return str(error)

    def _look(self, path: str, options: Options, check_bytes: bool) -> Ready:
        source = open_version(place_of(path, self._root), self._known(), options, check_bytes=check_bytes)
        return Ready(source, options)

    def _known(self) -> Reference:
        """The model that the server was started with, by its files' headers."""
        if self._reference is None:
            self._reference = reference_of(self._startup, self.runner.config)
        return self._reference

    def _previous(self, path: str) -> Source | None:
        """What is served now, opened before anything is written, so that it can be put back."""
        if self._served is not None and str(self._served.place.folder) == str(Path(path).absolute()):
            return self._served
        try:
            if is_version(path):
                return mapped(place_of(path, self._root))
            return started_from(folder_of(path, self.runner.config))
        except (SourceRefusedError, OSError) as error:
            logger.warning("what is served now could not be put back if the update failed: %s", error)
            return None

    def _written(self, update: _Update) -> Report:
        """Load. Whatever happens ends in a report, so that no rank waits for this one."""
        began = False
        try:
            with self._timed("before"):
                idle(self.runner.model)
                update.before = contents_of(self.runner.model)
                update.previous = self._previous(update.model_path)
            began = self.touched = True
            return self._loaded(update)
        except Exception as error:
            logger.warning("refitd could not carry out a load", exc_info=True)
            return self._report(State.FAILED if began else State.UNTOUCHED, f"{type(error).__name__}: {error}")

    def _loaded(self, update: _Update) -> Report:
        feed, fault = self.loading.load(update.call, update.ready.source, partial=update.ready.partial)
        update.how = feed.how
        if fault is not None:
            return self._unwritten(update, feed, fault)
        update.after = digest(contents_of(self.runner.model))
        return self._report(State.WRITTEN)

    def _unwritten(self, update: _Update, feed: Feed, fault: str) -> Report:
        same = not feed.begun and contents_of(self.runner.model) == update.before
        return self._report(State.UNTOUCHED if same else State.FAILED, fault)

    def _restored(self, update: _Update, mine: Report) -> Report:
        """Put back what was there, through the loader, and hold it against the fingerprints of before."""
        try:
            return self._put_back(update, mine)
        except Exception as error:
            logger.warning("refitd could not put back what was there", exc_info=True)
            return self._report(State.LOST, f"{type(error).__name__}: {error}")

    def _put_back(self, update: _Update, mine: Report) -> Report:
        if mine.state is State.UNTOUCHED:
            return mine
        if update.previous is None:
            return self._report(State.LOST, "what was served before cannot be read any more")
        fault = self.loading.put_back(update.call, update.previous, update.model_path)
        if fault is None and contents_of(self.runner.model) != update.before:
            fault = "its fingerprints are not those of before"
        if fault is not None:
            return self._report(State.LOST, f"{update.model_path} could not be put back: {fault}")
        return self._report(State.RESTORED)

    def _report(self, state: State, reason: str = "") -> Report:
        return Report(rank=self._ranks.rank, state=state, reason=reason[:1000])

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._ms[stage] = round(self._ms.get(stage, 0.0) + (time.perf_counter() - began) * 1000, 2)
