"""The load plan: learned from one load, replayed as plain copies by all that follow.

    learn    the loader does its work under the recorder, then each copy that it made is held against what it copied
    replay   the copies again, from another version's tensors; what the loader computes goes through it once more

A plan belongs to one model object at fixed addresses and to one inventory of tensors. It is thrown away when either
changes. Where the loader does not account for every byte by copies, the first replay is followed by a whole load and
held against it; a plan that fails once is not tried again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch

from refitd_plugin.delta.layout import overlap
from refitd_plugin.memory.spans import Covered, TooManyStretchesError
from refitd_plugin.update.recorder import PlanCopy, Recorder, spans_of, unaccounted

_COMPARED_AT_ONCE = 2**23  # elements: what a comparison takes beside the weights is a few times 8 M
Tensors = Mapping[str, torch.Tensor]
Loader = Callable[[Iterator[tuple[str, torch.Tensor]]], object]


@dataclass(slots=True, kw_only=True)
class ReplayPlan:
    """`loader_only` says why every load goes through the loader; None where `copies` load all but `residual`.

    `unused`: what the loader did not touch. `proven`: a replay gives what a whole load gives. It is known where every
    byte is a copy.
    """

    inventory: str
    addresses: "TensorAddresses"
    copies: tuple[PlanCopy, ...] = ()
    residual: tuple[str, ...] = ()
    unused: frozenset[str] = frozenset()
    loader_only: str | None = None
    proven: bool = False

    @property
    def replays(self) -> bool:
        """Whether a replay does anything that a load does not."""
        return self.loader_only is None

    def fits(self, inventory: str, model: torch.nn.Module) -> bool:
        """Whether the plan was learned from tensors of the same names, shapes and dtypes, and for this model as it is
        now.
        """
        return self.inventory == inventory and self.addresses == addresses_of(model)

    def rest(self, tensors: Tensors) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensors[name]) for name in self.residual]


@dataclass(frozen=True, slots=True)
class TensorAddresses:
    """Where a model's tensors are. Equal as long as the model is the same and none of them was replaced."""

    model: int
    tensors: tuple[tuple[object, ...], ...] = field(repr=False)


def addresses_of(model: torch.nn.Module) -> TensorAddresses:
    """Look at a model. This is done in each pause, several times, so it is done without torch's own iterators, which
    take three times as long to make up names. A module has its tensors and modules by name, and in order.
    """
    found: list[tuple[object, ...]] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        for named in (module._parameters, module._buffers):  # noqa: SLF001 - what torch's iterators look at
            for name, tensor in named.items():
                if tensor is not None:
                    found.append((name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype))
        waiting += [each for each in module._modules.values() if each is not None]  # noqa: SLF001
    return TensorAddresses(id(model), tuple(found))


def tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, under each of their names."""
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def learned(
    inventory: str, model: torch.nn.Module, before: TensorAddresses, tensors: Tensors, recorder: Recorder
) -> ReplayPlan:
    """Make a plan of what the recorder saw of a load that went well. `inventory`: the digest of the checkpoint's names,
    shapes and dtypes. `before`: where the model's tensors were before the load.
    """
    plan = ReplayPlan(inventory=inventory, addresses=addresses_of(model))
    if "load_weights" in vars(model):
        recorder.give_up("another extension has replaced the model's load_weights")
    if plan.addresses != before:
        recorder.give_up("the load replaced tensors of the model")
    if recorder.loader_only is None:
        _judge(plan, model, tensors, recorder)
    plan.loader_only = recorder.loader_only
    return plan


def _judge(plan: ReplayPlan, model: torch.nn.Module, tensors: Tensors, recorder: Recorder) -> None:
    plan.copies = tuple(copy for copy in recorder.copies if copy.name not in recorder.computing)
    copied = {copy.name for copy in plan.copies}
    try:
        missed = unaccounted([*spans_of(recorder.copies), *recorder.written], _persistent(model))
    except TooManyStretchesError:
        recorder.give_up("a tensor lies in too many pieces")
        missed = 0
    computed = set(tensors) - copied if missed else recorder.computing
    plan.residual = tuple(name for name in tensors if name in computed)  # in the checkpoint's order
    plan.unused = frozenset(tensors) - copied - computed
    plan.proven = not plan.residual and not missed
    if len({copy.target.device.type for copy in plan.copies}) > 1:
        recorder.give_up("some of the weights lie in host memory, and some on the GPU")
    elif _is_written_otherwise(recorder, plan.copies) or overlap(plan.copies):
        recorder.give_up("the loader writes twice to the same place")
    elif not all(same_bits(copy.target, copy.source(tensors)) for copy in plan.copies):
        recorder.give_up("something changes the weights after the loader has copied them")


def _is_written_otherwise(recorder: Recorder, copies: Iterable[PlanCopy]) -> bool:
    """Whether anything but these copies writes where they do: then their order would matter."""
    others = [copy for copy in recorder.copies if copy.name in recorder.computing]
    computed = Covered([*recorder.written, *spans_of(others)])
    return any(computed.touches(*span) for span in spans_of(copies))


def _persistent(model: torch.nn.Module) -> Iterable[torch.Tensor]:
    """What a checkpoint may hold: all parameters, and the buffers that are part of the model's state."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name in module._non_persistent_buffers_set:  # noqa: SLF001 - torch has no other name for it
            buffers.pop(f"{module_name}.{name}" if module_name else name, None)
    return [*(parameter for _, parameter in model.named_parameters(remove_duplicate=False)), *buffers.values()]


def same_bits(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, wherever they are. NaN equals itself, and 0 is not -0."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[target.element_size()]
    some, other = target.detach(), source
    if some.dim() == 0:
        some, other = some.reshape(1), other.reshape(1)
    rows = max(1, _COMPARED_AT_ONCE // max(1, some[:1].numel()))
    return all(
        torch.equal(some[at : at + rows].view(bits), other[at : at + rows].to(some.device).view(bits))
        for at in range(0, some.shape[0], rows)
    )


def replay(
    steps: Iterable[Callable[[], object]],
    rest: Iterable[tuple[str, torch.Tensor]],
    load: Loader,
) -> None:
    """Make the copies, and let the loader do what it has to compute. A device may still copy when this returns. `rest`:
    the tensors that the loader has to load, by name.

    Raises:
        Exception: whatever a copy or the loader raises; then the model holds a mixture.
    """
    with torch.no_grad():
        for step in steps:
            step()
    if waiting := list(rest):
        load(iter(waiting))
