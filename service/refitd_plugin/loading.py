"""One load through the engine's own function: by its model's loader, by the plan learned from that, or a delta."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from refitd_plugin import copy_schedule
from refitd_plugin.contents import contents_of, named
from refitd_plugin.copy_schedule import CopySchedule
from refitd_plugin.derived import Derived
from refitd_plugin.devices import devices_of, idle
from refitd_plugin.overlap import SeenContents
from refitd_plugin.plan import Loader, ReplayPlan, anatomy, learned, replay, tensors_of
from refitd_plugin.port import EngineProcess, UpdateCall
from refitd_plugin.recorder import Recorder
from refitd_plugin.registered import Registry
from refitd_plugin.source import VersionSource
from refitd_plugin.tensor_feed import NoRollbackError, TensorFeed

logger = logging.getLogger("refitd_plugin")


@dataclass(frozen=True, slots=True)
class Readied:
    """The copies of one version along one plan, to be begun in the pause."""

    plan: ReplayPlan
    schedule: CopySchedule


class Loading:
    """The loads of one rank, and its plan."""

    def __init__(self, process: EngineProcess) -> None:
        self.plan: ReplayPlan | None = None
        self._process = process
        self._registry = Registry()
        self._derived: Derived | None = None

    @property
    def model(self) -> torch.nn.Module:
        """The model that is loaded into."""
        return self._process.model

    def has(self, plan: ReplayPlan) -> bool:
        """Whether this is still the plan, and the model is where it says."""
        return self.plan is plan and plan.fits(plan.inventory, self.model)

    def make_ready(self, source: VersionSource) -> Readied | None:
        """Do all that can be done before the pause. The engine may serve meanwhile."""
        plan = self.plan  # another thread may throw it away meanwhile
        if plan is None or not plan.replays or plan.inventory != source.inventory:
            return None
        return Readied(plan, self._schedule(plan, source))

    def load(
        self, call: UpdateCall, source: VersionSource, *, partial: bool, readied: Readied | None = None
    ) -> tuple[TensorFeed, str | None]:
        """Load a version: how far it came, and what went wrong, if anything did.

        A partial one says nothing of how whole ones are to be loaded.
        """
        plan = None if partial else self._plan(source.inventory)
        if plan is not None and (readied is None or readied.plan is not plan):
            with call.stages.during("road"):  # a word of the answer: it stays
                readied = Readied(plan, self._schedule(plan, source))
        if plan is not None and readied is not None:
            return self._replay(call, source, readied)
        return self._load(call, source, partial=partial)

    def apply(
        self, call: UpdateCall, path: str, load_format: str, write: Callable[[], None]
    ) -> tuple[TensorFeed, str | None]:
        """Have something else written in place of a load, under a path."""

        def copy(_: Loader) -> None:
            with call.stages.during("copy"):
                write()

        feed = TensorFeed({}, copy, "delta")
        return feed, self._through(call, feed, path, load_format)

    def put_back(self, call: UpdateCall, tensors: Mapping[str, Any], path: str) -> tuple[TensorFeed, str | None]:
        """Load what was served before, under the path that it had. Always by the loader: the plan may be at fault."""
        feed = TensorFeed(tensors)
        return feed, self._through(call, feed, path, "auto")

    def plan_for_deltas(self, inventory: str, *, look: bool = True) -> ReplayPlan | str:
        """The plan that a delta can be translated through, or why there is none. Without a look at the model it may be
        out of date.
        """
        plan = self.plan
        if plan is None or plan.inventory != inventory or (look and not plan.fits(inventory, self.model)):
            return "as nobody has seen yet how it is loaded"
        if plan.whole is not None:
            return f"as {plan.whole}"
        return plan if plan.proven else "as its load plan is not proven yet"

    def derived(self, plan: ReplayPlan, source: VersionSource) -> Derived:
        """What follows from a plan, for a version of its inventory."""
        if self._derived is None or self._derived.plan is not plan:
            self._derived = Derived(plan, self.model, source)
        return self._derived

    def prints(
        self, source: VersionSource, contents: dict[str, str], others: Sequence[int] | None = None
    ) -> list[tuple[str, int]]:
        """The fingerprints of the checkpoint's tensors that lie whole in the model, by the plan; none without one.

        `others` are those that are not in `contents`, where they were taken already.
        """
        plan = self.plan
        if plan is None or not plan.replays:
            return []
        return self.derived(plan, source).prints.take(contents, others)

    def _replay(self, call: UpdateCall, source: VersionSource, readied: Readied) -> tuple[TensorFeed, str | None]:
        plan, ready, seen = readied.plan, readied.schedule, SeenContents()
        tensors = source.tensors() if plan.residual or not plan.proven else {}

        def copy(load: Loader) -> None:  # it does not know the feed, which knows it: files would stay open for a while
            with call.stages.during("copy"):
                if ready.watch is not None:
                    ready.watch.overlap.run(ready.steps, seen)
                else:
                    replay(ready.steps, plan.rest(tensors), load)
                    idle(self.model)

        feed = TensorFeed(tensors, copy)
        fault = self._through(call, feed, call.path, call.load_format)
        if ready.watch is not None:
            _tell_seen(feed, seen, ready.watch.names)
        if fault is None and not plan.proven:
            fault = self._prove(call, plan, tensors)
        return feed, fault

    def _load(self, call: UpdateCall, source: VersionSource, *, partial: bool) -> tuple[TensorFeed, str | None]:
        tensors = source.tensors()
        recorder = self._recorder(call, tensors) if self.plan is None and not partial else None
        before = None if recorder is None else anatomy(self.model)
        feed = TensorFeed(tensors)
        fault = self._through(call, feed, call.path, call.load_format, recorder)
        if fault is None and recorder is not None and before is not None:
            self.plan = learned(source.inventory, self.model, before, tensors, recorder)
            _tell(self.plan)
        return feed, fault

    def _plan(self, inventory: str) -> ReplayPlan | None:
        """The plan to replay, if there is one. One that does not fit any more is thrown away."""
        if self.plan is not None and not self.plan.fits(inventory, self.model):
            self.plan = None
        return self.plan if self.plan is not None and self.plan.replays else None

    def _schedule(self, plan: ReplayPlan, source: VersionSource) -> CopySchedule:
        devices = devices_of(self.model)
        if not devices:
            return copy_schedule.plain(plan.bind(source.tensors()))
        self._registry.begin()
        (device, *others) = devices
        files = None if others else source.registered(self._registry, device.index or 0)
        if files is None:
            return copy_schedule.buffered(lambda: plan.bind(source.tensors()))
        table, watch = self.derived(plan, source).table_of(source.structure.headers)
        return copy_schedule.registered(table, files, device, source.tensors, watch, source.order)

    def _recorder(self, call: UpdateCall, tensors: dict[str, Any]) -> Recorder | None:
        if not call.observable:
            return None
        return Recorder(tensors, [tensor for _, tensor in tensors_of(self.model)])

    def _through(
        self, call: UpdateCall, feed: TensorFeed, path: str, load_format: str, watching: Any = None
    ) -> str | None:
        """One call of the engine's function; what went wrong, if anything did."""
        model = self.model
        try:
            with self._process.feeding(feed), feed.replacing(model), watching or nullcontext():
                ok, message = call.original(path, load_format)
        except Exception as error:  # nothing that a loader raises may reach the scheduler
            cause = error.__context__ if isinstance(error, NoRollbackError) and error.__context__ is not None else error
            logger.warning("a load failed", exc_info=cause)
            return f"{type(cause).__name__}: {cause}"
        if not ok:
            return message
        if not feed.done:
            return "the engine did not load the tensors that it was given"
        return "the engine has replaced the model" if self.model is not model else None

    def _prove(self, call: UpdateCall, plan: ReplayPlan, tensors: dict[str, Any]) -> str | None:
        """Hold a replay against a whole load of the same version."""
        replayed = contents_of(self.model)
        fault = self._through(call, TensorFeed(tensors), call.path, call.load_format)
        if fault is None and contents_of(self.model) != replayed:
            plan.whole = "a replay did not give what the loader gives"
            _tell(plan)
        plan.proven = fault is None
        return fault


def _tell_seen(feed: TensorFeed, seen: SeenContents, names: Sequence[str]) -> None:
    """What was watched beside the copies: the model's tensors by name, and behind them others."""
    if seen.before is not None:
        feed.before = named(names, seen.before[: len(names)])
    if seen.after is not None:
        feed.after = named(names, seen.after[: len(names)])
        feed.others = seen.after[len(names) :]


def _tell(plan: ReplayPlan) -> None:
    if plan.whole is None:
        logger.info("refitd learned a load plan: %d copies, %d for the loader", len(plan.copies), len(plan.residual))
    else:
        logger.info("refitd loads through the loader each time: %s", plan.whole)
