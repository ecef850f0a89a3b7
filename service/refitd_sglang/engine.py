"""One rank's part of an update: prepare, commit, restore.

Preparing reads and checks, and touches nothing; it may have been done before, by the channel's thread while the engine
served. Committing goes through SGLang's own function, with the tensors of the prepared version. What was served before stays
open until the new version is kept, so that it can be put back whatever became of its folder.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, assert_never

from refitd.catalog.inventory import Reference
from refitd.catalog.reference import ReferenceRefusedError, read_reference
from refitd.catalog.validate import Options
from refitd_sglang.answer import Answer
from refitd_sglang.contents import contents_of, digest
from refitd_sglang.feeding import Feed, NoRollbackError
from refitd_sglang.plan import Loader, Plan, anatomy, learned, replay, tensors_of
from refitd_sglang.ranks import Ranks
from refitd_sglang.recorder import Recorder
from refitd_sglang.source import Source, SourceRefusedError, is_version, mapped, open_version, place_of, started_from
from refitd_sglang.transaction import Outcome, Report, State, Step, after_commit, after_prepare, after_restore
from refitd_sglang.versions import Runner

logger = logging.getLogger("refitd_sglang")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of SGLang's function: `stock` is that function, to be called with a path and a load format."""

    path: str
    load_format: str
    recapture: bool
    stock: Callable[[str, str, bool], tuple[bool, str]]


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
    before: dict[str, str]
    model_path: str
    previous: Source | None
    how: str = ""
    after: str = ""


class Engine:
    """One rank. The channel's thread calls `prepare`; all else happens in SGLang's own thread."""

    def __init__(self, runner: Runner, loader: type, ranks: Ranks, *, root: Path | None, check_bytes: bool) -> None:
        self.runner = runner
        self.plan: Plan | None = None
        self.touched = False  # whether an update that is going on may have written
        self._loader, self._ranks, self._root, self._check_bytes = loader, ranks, root, check_bytes
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
        with self._timed("before"):
            path = str(self.runner.config.model_path)
            update = _Update(call, ready, contents_of(self.runner.model), path, self._previous(path))
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
        reason = f"{decision.reason}; {mine.reason}" if mine.reason not in {"", decision.reason} else decision.reason
        self._settled(update, outcome)
        return Answer(outcome=outcome, reason=reason, how=update.how, version=ready.source.label, ms=self._ms)

    def _keep(self, update: _Update) -> Answer:
        self._served = None if update.ready.partial else update.ready.source
        label = update.ready.source.label
        return Answer(outcome=Outcome.SERVED, version=label, how=update.how, contents=update.after, ms=self._ms)

    def _settled(self, update: _Update, outcome: Outcome) -> None:
        self.plan = None  # whatever failed, it may have been the plan
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
                raise SourceRefusedError(f"{path} is not what it was when it was prepared")
            return self._look(path, Options(), self._check_bytes)
        except (SourceRefusedError, OSError) as error:
            return str(error)

    def _look(self, path: str, options: Options, check_bytes: bool) -> Ready:
        source = open_version(place_of(path, self._root), self._known(), options, check_bytes=check_bytes)
        return Ready(source, options)

    def _known(self) -> Reference:
        """The model that the server was started with, by its files' headers."""
        if self._reference is None:
            try:
                self._reference = read_reference(_local(self._startup, getattr(self.runner.config, "revision", None)))
            except (ReferenceRefusedError, OSError) as error:
                raise SourceRefusedError(
                    f"there is nothing to hold a version against: {error}. Start SGLang on a local folder of safetensors"
                ) from error
        return self._reference

    def _previous(self, path: str) -> Source | None:
        """What is served now, opened before anything is written, so that it can be put back."""
        if self._served is not None and str(self._served.place.folder) == str(Path(path).absolute()):
            return self._served
        try:
            if is_version(path):
                return mapped(place_of(path, self._root))
            return started_from(_local(path, getattr(self.runner.config, "revision", None)))
        except (SourceRefusedError, OSError) as error:
            logger.warning("what is served now could not be put back if the update failed: %s", error)
            return None

    def _written(self, update: _Update) -> Report:
        """Load. Whatever happens ends in a report."""
        try:
            return self._loaded(update)
        except Exception as error:
            logger.warning("refitd could not carry out a load", exc_info=True)
            return self._report(State.FAILED, f"{type(error).__name__}: {error}")

    def _loaded(self, update: _Update) -> Report:
        tensors = update.ready.source.tensors()
        plan = self._plan(update.ready)
        feed = self._feed(plan, tensors)
        update.how = "load" if plan is None else "replay"
        recorder = self._recorder(update, tensors) if self.plan is None and not update.ready.partial else None
        found = anatomy(self.runner.model)
        fault = self._load(update.call, feed, recorder)
        if fault is None and plan is not None and not plan.proven:
            fault = self._prove(update.call, plan, tensors)
        if fault is not None:
            return self._unwritten(update, feed, fault)
        if recorder is not None:
            self.plan = learned(update.ready.source.inventory, self.runner.model, found, tensors, recorder)
            _tell(self.plan)
        update.after = digest(contents_of(self.runner.model))
        return self._report(State.WRITTEN)

    def _plan(self, ready: Ready) -> Plan | None:
        """The plan to replay, if there is one. One that does not fit any more is thrown away."""
        if self.plan is not None and not self.plan.fits(ready.source.inventory, self.runner.model):
            self.plan = None
        return self.plan if self.plan is not None and self.plan.replays and not ready.partial else None

    def _feed(self, plan: Plan | None, tensors: dict[str, Any]) -> Feed:
        if plan is None:
            return Feed(tensors)
        bound, rest = plan.bind(tensors), plan.rest(tensors)

        def copy(load: Loader) -> None:
            replay(bound, rest, load)

        return Feed(tensors, copy)

    def _recorder(self, update: _Update, tensors: dict[str, Any]) -> Recorder | None:
        if update.call.recapture:  # graphs are captured within the same call, and nothing may look on
            return None
        return Recorder(tensors, [tensor for _, tensor in tensors_of(self.runner.model)])

    def _load(self, call: Call, feed: Feed, watching: Any = None, path: str | None = None) -> str | None:
        """One call of SGLang's function; what went wrong, if anything did."""
        model = self.runner.model
        load_format = call.load_format if path is None else "auto"
        try:
            with feed.through(self._loader, model, watching):
                self.touched = True
                ok, message = call.stock(path or call.path, load_format, call.recapture)
        except Exception as error:  # nothing that a loader raises may reach the scheduler
            cause = error.__context__ if isinstance(error, NoRollbackError) and error.__context__ is not None else error
            logger.warning("a load failed", exc_info=cause)
            return f"{type(cause).__name__}: {cause}"
        if not ok:
            return message
        if not feed.done:
            return "SGLang did not load the tensors that it was given"
        return "SGLang has replaced the model" if self.runner.model is not model else None

    def _prove(self, call: Call, plan: Plan, tensors: dict[str, Any]) -> str | None:
        """Hold a replay against a whole load of the same version."""
        replayed = contents_of(self.runner.model)
        fault = self._load(call, Feed(tensors))
        if fault is None and contents_of(self.runner.model) != replayed:
            plan.whole = "a replay did not give what the loader gives"
            logger.warning("%s: every load goes through the loader", plan.whole)
        plan.proven = True
        return fault

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
        tensors = update.previous.tensors()
        fault = self._load(update.call, Feed(tensors), path=update.model_path)
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


def _local(path: str, revision: str | None) -> Path:
    """The folder of a model, also of one that the server was given by its name on the hub."""
    if Path(path).is_dir():
        return Path(path)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    except Exception as error:  # the hub's library raises many kinds; all mean that it is not here
        raise SourceRefusedError(f"{path} is not a folder on this machine ({type(error).__name__})") from error


def _tell(plan: Plan) -> None:
    if plan.whole is None:
        logger.info("refitd learned a load plan: %d copies, %d for the loader", len(plan.copies), len(plan.residual))
    else:
        logger.info("refitd loads through the loader each time: %s", plan.whole)
