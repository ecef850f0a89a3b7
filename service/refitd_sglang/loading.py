"""One load through SGLang's own function: by the model's loader, or by the plan that was learned from it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from refitd_sglang.contents import contents_of
from refitd_sglang.feeding import Feed, NoRollbackError
from refitd_sglang.plan import Loader, Plan, anatomy, learned, replay, tensors_of
from refitd_sglang.recorder import Recorder
from refitd_sglang.source import Source
from refitd_sglang.versions import Runner

logger = logging.getLogger("refitd_sglang")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of SGLang's function: `stock` is that function, to be called with a path and a load format."""

    path: str
    load_format: str
    recapture: bool
    stock: Callable[[str, str, bool], tuple[bool, str]]


class Loading:
    """The loads of one rank, and its plan."""

    def __init__(self, runner: Runner, loader: type) -> None:
        self.plan: Plan | None = None
        self._runner, self._loader = runner, loader

    def load(self, call: Call, source: Source, *, partial: bool) -> tuple[Feed, str | None]:
        """Load a version: how far it came, and what went wrong, if anything did.

        A partial one says nothing of how whole ones are to be loaded.
        """
        tensors = source.tensors()
        plan = None if partial else self._plan(source.inventory)
        recorder = self._recorder(call, tensors) if self.plan is None and not partial else None
        before = anatomy(self._runner.model)
        feed = Feed(tensors, None if plan is None else _copies(plan, tensors))
        fault = self._through(call, feed, call.path, call.load_format, recorder)
        if fault is None and plan is not None and not plan.proven:
            fault = self._prove(call, plan, tensors)
        if fault is None and recorder is not None:
            self.plan = learned(source.inventory, self._runner.model, before, tensors, recorder)
            _tell(self.plan)
        return feed, fault

    def put_back(self, call: Call, source: Source, path: str) -> str | None:
        """Load what was served before, under the path that it had. Always by the loader: the plan may be at fault."""
        return self._through(call, Feed(source.tensors()), path, "auto")

    def _plan(self, inventory: str) -> Plan | None:
        """The plan to replay, if there is one. One that does not fit any more is thrown away."""
        if self.plan is not None and not self.plan.fits(inventory, self._runner.model):
            self.plan = None
        return self.plan if self.plan is not None and self.plan.replays else None

    def _recorder(self, call: Call, tensors: dict[str, Any]) -> Recorder | None:
        if call.recapture:  # graphs are captured within the same call, and nothing may look on
            return None
        return Recorder(tensors, [tensor for _, tensor in tensors_of(self._runner.model)])

    def _through(self, call: Call, feed: Feed, path: str, load_format: str, watching: Any = None) -> str | None:
        """One call of SGLang's function; what went wrong, if anything did."""
        model = self._runner.model
        try:
            with feed.through(self._loader, model, watching):
                ok, message = call.stock(path, load_format, call.recapture)
        except Exception as error:  # nothing that a loader raises may reach the scheduler
            cause = error.__context__ if isinstance(error, NoRollbackError) and error.__context__ is not None else error
            logger.warning("a load failed", exc_info=cause)
            return f"{type(cause).__name__}: {cause}"
        if not ok:
            return message
        if not feed.done:
            return "SGLang did not load the tensors that it was given"
        return "SGLang has replaced the model" if self._runner.model is not model else None

    def _prove(self, call: Call, plan: Plan, tensors: dict[str, Any]) -> str | None:
        """Hold a replay against a whole load of the same version."""
        replayed = contents_of(self._runner.model)
        fault = self._through(call, Feed(tensors), call.path, call.load_format)
        if fault is None and contents_of(self._runner.model) != replayed:
            plan.whole = "a replay did not give what the loader gives"
            _tell(plan)
        plan.proven = fault is None
        return fault


def idle(model: torch.nn.Module) -> None:
    """Wait until the device has nothing to do: a forward pass on another stream may still read the weights."""
    for device in {tensor.device for _, tensor in tensors_of(model)}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _copies(plan: Plan, tensors: dict[str, Any]) -> Callable[[Loader], None]:
    bound, rest = plan.bind(tensors), plan.rest(tensors)

    def copy(load: Loader) -> None:
        replay(bound, rest, load)

    return copy


def _tell(plan: Plan) -> None:
    if plan.whole is None:
        logger.info("refitd learned a load plan: %d copies, %d for the loader", len(plan.copies), len(plan.residual))
    else:
        logger.info("refitd loads through the loader each time: %s", plan.whole)
