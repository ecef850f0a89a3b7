"""One load through the engine's own function: by its model's loader, by the plan learned from that, or a delta.

`PlanTables` has what follows from a plan and is the same for every version: where elements go, which tensors are
fingerprinted, and the moves from files of one layout.

`TensorFeed` gives a version's tensors to one load of the engine in place of files. The engine goes on doing what it
does around a load (its refusals, what its quantisation prepares, its own records of what it serves). For the length of
one call only two things differ: the engine's loader iterates over tensors that are already checked and mapped, and, for
a replay, the model's `load_weights` makes the plan's copies, or applies a delta. A second load within the call, such as
SGLang's "rolling back", which would read the version that has just failed once more, is refused.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from refitd_client.checkpoint.inventory import Tensor
from refitd_plugin.delta.layout import PlacedTensor, Placements, Routes, routes_of
from refitd_plugin.memory import copy_schedule, driver
from refitd_plugin.memory.copy_schedule import CopySchedule, CopyWatch, MoveTable, table_of
from refitd_plugin.memory.driver import Registry
from refitd_plugin.memory.source import VersionSource
from refitd_plugin.port import EngineProcess, UpdateCall
from refitd_plugin.proof.contents import (
    Overlap,
    SeenContents,
    TensorFingerprints,
    contents_of,
    devices_of,
    holders_of,
    idle,
    named,
)
from refitd_plugin.proof.slices import ModelSlices
from refitd_plugin.update.plan import Loader, ReplayPlan, Tensors, addresses_of, learned, replay, tensors_of
from refitd_plugin.update.receiving import sizes_of
from refitd_plugin.update.recorder import Recorder


class NoRollbackError(Exception):
    """The engine loads a second time within one update. The plugin itself puts back what was there."""


class TensorFeed:
    """One load, by the loader or by `copy` in its place.

    `is_copied`: the load is copies into the model's tensors, and nothing is left to the loader. `asked`: the engine has
    begun to iterate over the tensors; `begun`: some may be written; `done`: all were given, or the loader takes them.
    `how` is `load`, or what `copy` is; `fault` is what went wrong, None where nothing did.
    """

    def __init__(
        self,
        tensors: Tensors,
        copy: Callable[[Loader], None] | None = None,
        how: str = "replay",
        *,
        is_copied: bool = False,
        fault: str | None = None,
    ) -> None:
        self._tensors = tensors
        self.fault = fault
        self.is_copied = is_copied
        self._copy = copy
        self.how = how if copy is not None else "load"
        self.before: dict[str, str] | None = None  # the model's contents, where `copy` has taken them beside its work
        self.after: dict[str, str] | None = None
        self.others: list[int] | None = None
        self.asked = False
        self.begun = False
        self.done = False

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """What the loader iterates over, once.

        Raises:
            NoRollbackError: it was iterated over before.
        """
        if self.asked:
            raise NoRollbackError("the load failed, and is not tried again from the same files")
        self.asked = True
        return self._given()

    def _given(self) -> Iterator[tuple[str, Any]]:
        for item in self._tensors.items():
            self.begun = True
            yield item
        self.done = True

    @contextmanager
    def replacing(self, model: Any) -> Iterator[None]:
        """While the context lasts, the model's `load_weights` is the copy, where there is one.

        Only for a model whose `load_weights` is its class's own: a plan is not made of others.
        """
        if self._copy is None:
            yield
            return
        load = model.load_weights
        model.load_weights = lambda *_, **__: self._replayed(load)
        try:
            yield
        finally:
            del model.load_weights

    def _replayed(self, load: Loader) -> None:
        """What the model's `load_weights` does in a replay."""
        self.begun = True
        if self._copy is not None:
            self._copy(partial(self._last, load))
        self.done = True

    def _last(self, load: Loader, weights: Iterator[tuple[str, Any]]) -> None:
        """What a copy leaves to the loader, which may compute something of all weights when it has them."""
        self.done = True
        load(weights)


logger = logging.getLogger("refitd_plugin")


class PlanTables:
    """What follows from one plan, computed when it is first needed. `source` is any version of its inventory."""

    def __init__(self, plan: ReplayPlan, model: torch.nn.Module, source: VersionSource) -> None:
        self.plan = plan
        self._model = model
        self._tensors: Mapping[str, Tensor] = source.structure.inventory.tensors
        self._bytes = sizes_of(source.structure)
        self._table: MoveTable | None = None
        self._watch: CopyWatch | None = None
        self._cut: object = None

    @cached_property
    def holders(self) -> dict[str, torch.Tensor]:
        return holders_of(self._model)

    @cached_property
    def routes(self) -> Routes:
        """Where the elements of the checkpoint's tensors go."""
        copies = self.plan.copies
        elements = {copy.name: self._bytes[copy.name] // copy.target.element_size() for copy in copies}
        return routes_of(copies, elements, list(self.holders.values()))

    @cached_property
    def placements(self) -> Placements:
        """The routes of all the checkpoint's tensors, by which a delta is laid out."""
        found: dict[str, PlacedTensor] = {}
        for name, tensor in self._tensors.items():
            others = () if name in self.plan.unused else "it goes through the loader, which computes"
            found[name] = PlacedTensor(tensor.dtype, tensor.shape, self.routes.get(name, others))
        return found

    @cached_property
    def fingerprints(self) -> TensorFingerprints:
        """The checkpoint's tensors that lie whole in the model."""
        seen: dict[str, int] = {}
        whole: list[tuple[str, torch.Tensor]] = []
        for copy in self.plan.copies:
            number = seen[copy.name] = seen.get(copy.name, -1) + 1
            routes = self.routes[copy.name]
            if not isinstance(routes, str) and routes[number].whole:
                whole.append((copy.name, copy.target))
        return TensorFingerprints(whole, self._model)

    @cached_property
    def slices(self) -> ModelSlices:
        """What else of the checkpoint's tensors is copied into the model."""
        return ModelSlices(self.plan, self.routes, self._tensors, self._bytes, list(self.holders.values()))

    def table_of(self, source: VersionSource) -> tuple[MoveTable, CopyWatch | None]:
        """The moves from a version's files, kept for equal headers; and what is watched beside, where copies are all
        that is done: what a loader computes comes after them.
        """
        headers = source.structure.headers
        if self._table is None or self._cut is not source.cut or self._table.headers != headers:
            self._table, self._cut = table_of(source.copies_of(self.plan.copies), headers), source.cut
        if self._watch is None and self.plan.proven and not self.plan.residual:
            self._watch = CopyWatch(Overlap([*self.holders.values(), *self.fingerprints.others]), list(self.holders))
        return self._table, self._watch


@dataclass(frozen=True, slots=True)
class Readied:
    """The copies of one version along one plan, to be begun in the pause."""

    plan: ReplayPlan
    schedule: CopySchedule


class Loading:
    def __init__(self, process: EngineProcess) -> None:
        self.plan: ReplayPlan | None = None
        self._process = process
        self.registry = Registry()  # of the files that the rank's GPU reads in place
        self._tables: PlanTables | None = None

    @property
    def model(self) -> torch.nn.Module:
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
    ) -> TensorFeed:
        """Load a version. `partial`: it has some of the model's tensors only, so no plan is learned from it or used for
        it. `readied`: its copies, where they were made ready before the pause.
        """
        if self.plan is not None and not partial and not self.plan.fits(source.inventory, self.model):
            self.plan = None  # it does not fit any more
        plan = self.plan if self.plan is not None and self.plan.replays and not partial else None
        if plan is not None and (readied is None or readied.plan is not plan):
            with call.stages.during("road"):  # a word of the answer: it stays
                readied = Readied(plan, self._schedule(plan, source))
        if plan is not None and readied is not None:
            return self._replay(call, source, readied)
        return self._load(call, source, partial=partial)

    def apply(self, call: UpdateCall, path: str, load_format: str, write: Callable[[], None]) -> TensorFeed:
        """Write something else in place of a load. `path`: the folder that the engine records as served. `load_format`:
        as the engine was given it.
        """

        def copy(_: Loader) -> None:
            with call.stages.during("copy"):
                write()

        return self._through(call, TensorFeed({}, copy, "delta", is_copied=True), path, load_format)

    def put_back(self, call: UpdateCall, tensors: Mapping[str, Any], path: str) -> TensorFeed:
        """Load what was served before, always by the loader, since the plan may be at fault. `path`: the folder that
        they were served from.
        """
        return self._through(call, TensorFeed(tensors), path, "auto")

    def plan_for_deltas(self, inventory: str, *, look: bool = True) -> ReplayPlan | str:
        """The plan that a delta can be translated through, or why there is none. Where the caller does not `look` at
        the model, the plan may be out of date.
        """
        plan = self.plan
        if plan is None or plan.inventory != inventory or (look and not plan.fits(inventory, self.model)):
            return "as no load has shown yet how it is loaded"
        if plan.loader_only is not None:
            return f"as {plan.loader_only}"
        return plan if plan.proven else "as its load plan is not proven yet"

    def tables(self, plan: ReplayPlan, source: VersionSource) -> PlanTables:
        """What follows from a plan, for a version of its inventory."""
        if self._tables is None or self._tables.plan is not plan:
            self._tables = PlanTables(plan, self.model, source)
        return self._tables

    def tables_of(self, source: VersionSource) -> PlanTables | None:
        """What follows from the plan for what is loaded of a version; None without a plan."""
        plan = self.plan
        return None if plan is None or not plan.replays else self.tables(plan, source)

    def _replay(self, call: UpdateCall, source: VersionSource, readied: Readied) -> TensorFeed:
        plan, ready, seen = readied.plan, readied.schedule, SeenContents()
        tensors = source.tensors() if plan.residual or not plan.proven else {}

        def copy(load: Loader) -> None:  # it does not know the feed, which knows it: files would stay open for a while
            with call.stages.during("copy"):
                if ready.watch is not None:  # nothing is left to the loader
                    ready.watch.overlap.begin(ready.steps, seen)
                else:
                    with ready.on_device():
                        replay(ready.steps, plan.rest(tensors), load)
                    idle(self.model)

        feed = TensorFeed(tensors, copy, is_copied=ready.watch is not None)
        self._through(call, feed, call.path, call.load_format)
        with call.stages.during("copy"):
            feed.fault = _waited(seen) or feed.fault
        if ready.watch is not None:  # fingerprints of the model's tensors by name, and behind them further ones
            names = ready.watch.names
            if seen.before is not None:
                feed.before = named(names, seen.before[: len(names)])
            if seen.after is not None:
                feed.after = named(names, seen.after[: len(names)])
                feed.others = seen.after[len(names) :]
        if feed.fault is None and not plan.proven:
            feed.fault = self._prove(call, plan, tensors)
        return feed

    def _load(self, call: UpdateCall, source: VersionSource, *, partial: bool) -> TensorFeed:
        tensors = source.tensors()
        recorder = None
        if call.observable and self.plan is None and not partial:
            recorder = Recorder(tensors, [tensor for _, tensor in tensors_of(self.model)])
        before = None if recorder is None else addresses_of(self.model)
        feed = self._through(call, TensorFeed(tensors), call.path, call.load_format, recorder)
        if feed.fault is None and recorder is not None and before is not None:
            self.plan = learned(source.inventory, self.model, before, tensors, recorder)
            _log_plan(self.plan)
        return feed

    def _schedule(self, plan: ReplayPlan, source: VersionSource) -> CopySchedule:
        devices = devices_of(self.model)
        if not devices:
            return copy_schedule.within_host(source.copies_of(plan.copies), source.pieces)
        self.registry.begin()
        (device, *others) = devices
        files = None if others else source.registered(self.registry, device.index or 0)
        if files is None:
            return copy_schedule.buffered(source.copies_of(plan.copies), source.pieces)
        order = driver.between_devices if source.is_on_device else driver.to_device
        table, watch = self.tables(plan, source).table_of(source)
        return copy_schedule.by_address(order, table, files, device, source.pieces, watch)

    def _through(
        self, call: UpdateCall, feed: TensorFeed, path: str, load_format: str, watching: Any = None
    ) -> TensorFeed:
        """One call of the engine's function. Notes in the feed what went wrong, and returns it."""
        model, dtype = self.model, torch.get_default_dtype()
        try:
            with self._process.feeding(feed), feed.replacing(model), watching or nullcontext():
                ok, message = call.original(path, load_format)
            if not ok:
                feed.fault = message
            elif not feed.done:
                feed.fault = "the engine did not load the tensors that it was given"
            elif self.model is not model:
                feed.fault = "the engine has replaced the model"
        except Exception as error:  # nothing that a loader raises may reach the scheduler
            cause = error.__context__ if isinstance(error, NoRollbackError) and error.__context__ is not None else error
            logger.warning("a load failed", exc_info=cause)
            feed.fault = f"{type(cause).__name__}: {cause}"
        finally:
            torch.set_default_dtype(dtype)  # SGLang before 0.5.19 leaves the model's behind when a load raises
        return feed

    def _prove(self, call: UpdateCall, plan: ReplayPlan, tensors: dict[str, Any]) -> str | None:
        """Hold a replay against a whole load of the same version."""
        replayed = contents_of(self.model)
        fault = self._through(call, TensorFeed(tensors), call.path, call.load_format).fault
        if fault is None and contents_of(self.model) != replayed:
            plan.loader_only = "a replay did not give what the loader gives"
            _log_plan(plan)
        plan.proven = fault is None
        return fault


def _waited(seen: SeenContents) -> str | None:
    """Wait for the copies that are under way; what went wrong, if anything did."""
    try:
        seen.wait()
    except Exception as error:  # as in `Loading._through`
        logger.warning("a load failed", exc_info=True)
        return f"{type(error).__name__}: {error}"
    return None


def _log_plan(plan: ReplayPlan) -> None:
    if plan.loader_only is None:
        logger.info("refitd learned a load plan: %d copies, %d for the loader", len(plan.copies), len(plan.residual))
    else:
        logger.info("refitd loads through the loader each time: %s", plan.loader_only)
