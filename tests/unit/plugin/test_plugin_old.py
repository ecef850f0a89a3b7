"""What a load does with the contents that the model held before: which copies of them leave a load plan possible.

SGLang copies weights around a load: onto themselves on a GPU, and there and back where they are offloaded.
"""

from collections.abc import Callable

import pytest
import torch

from refitd_plugin.memory.copy_schedule import within_host
from refitd_plugin.update.plan import ReplayPlan, addresses_of, learned, replay, tensors_of
from refitd_plugin.update.recorder import Recorder
from support.mini_sglang import TinyModel, Weights, tiny_weights, values

READS_OLD = "the loader reads weights that it has not loaded"
CPU = torch.device("cpu", 0)  # another device than "cpu" to torch: `to` gives a copy


class Plain(TinyModel):
    """Its loader only copies. `spare` is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Parameter(torch.ones(6, 4, dtype=torch.bfloat16), requires_grad=False)

    def _load_norm(self, tensor: torch.Tensor) -> None:
        self.norm.data.copy_(tensor)


Hook = Callable[[Plain], object]


def nothing(_: Plain) -> None:
    """No staging."""


def onto_itself(model: Plain) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data)


def there_and_back(model: Plain) -> None:
    for parameter in model.parameters():
        home, twin = parameter.data, parameter.data.to(CPU)
        assert twin.data_ptr() != home.data_ptr()
        parameter.data = twin
        home.copy_(parameter.data)
        parameter.data = home


def load(model: Plain, weights: dict[str, torch.Tensor], before: Hook, after: Hook) -> None:
    before(model)
    model.load_weights(weights.items())
    after(model)


def learn(before: Hook = nothing, after: Hook = nothing, model: Plain | None = None) -> ReplayPlan:
    """The plan of one load. A plan that can be replayed has to give what a whole load of other weights gives."""
    model, weights = model or Plain(), [tiny_weights(1), tiny_weights(2)]
    place, recorder = addresses_of(model), Recorder(weights[0], [tensor for _, tensor in tensors_of(model)])
    with recorder:
        load(model, weights[0], before, after)
    plan = learned("inventory", model, place, weights[0], recorder)
    if plan.replays:
        whole = type(model)()
        load(whole, weights[0], before, after)
        load(whole, weights[1], before, after)
        before(model)
        replay(within_host(plan.copies, lambda: weights[1]).steps, plan.rest(weights[1]), model.load_weights)
        after(model)
        assert values(model) == values(whole)
    return plan


def told(plan: ReplayPlan) -> tuple[str | None, int, int]:
    return plan.loader_only, len(plan.copies), len(plan.residual)


@pytest.mark.parametrize("before", [nothing, onto_itself])
@pytest.mark.parametrize("after", [nothing, onto_itself])
def test_weights_that_are_copied_onto_themselves_are_copied_by_the_plan(before: Hook, after: Hook) -> None:
    assert told(learn(before, after)) == (None, 7, 0)


def test_what_was_moved_and_is_moved_back_before_a_load_changes_nothing() -> None:
    assert told(learn(there_and_back)) == (None, 7, 0)


def test_what_is_moved_after_it_was_loaded_goes_through_the_loader() -> None:
    assert told(learn(there_and_back, there_and_back)) == (None, 0, 7)


@pytest.mark.parametrize("moved", [False, True])
def test_old_contents_in_a_place_that_the_checkpoint_overwrites_later_make_no_difference(moved: bool) -> None:
    def shift(model: Plain) -> None:
        source = model.spare.data.to(CPU) if moved else model.spare.data
        model.turned.data.copy_(source)

    assert told(learn(shift)) == (None, 7, 0)


@pytest.mark.parametrize("moved", [False, True])
def test_old_contents_that_stay_where_they_were_copied_to_are_never_replayed(moved: bool) -> None:
    def shift(model: Plain) -> None:
        source = model.turned.data.to(CPU) if moved else model.turned.data
        model.spare.data.copy_(source)

    assert learn(shift).loader_only == READS_OLD


def test_old_contents_in_a_place_of_which_the_checkpoint_overwrites_a_part_are_never_replayed() -> None:
    """The padding of the vocabulary is filled with zeros, and is no copy."""

    def shift(model: Plain) -> None:
        model.embed.data[-6:].copy_(model.turned.data)

    assert learn(shift).loader_only == READS_OLD


def test_parts_of_one_tensor_that_are_copied_over_each_other_are_no_copy_onto_itself() -> None:
    def shift(model: Plain) -> None:
        model.spare.data[1:].copy_(model.spare.data[:-1].clone())
        model.spare.data[:3].copy_(model.spare.data[3:])

    assert learn(shift).loader_only == READS_OLD


def test_the_same_bytes_read_as_another_type_are_no_copy_onto_themselves() -> None:
    def convert(model: Plain) -> None:
        model.spare.data.copy_(model.spare.data.view(torch.int16))

    assert learn(convert).loader_only == READS_OLD


def test_old_contents_that_are_copied_over_loaded_ones_are_never_replayed() -> None:
    def back(model: Plain) -> None:
        model.turned.data.copy_(model.spare.data)

    assert learn(after=back).loader_only == READS_OLD


def test_old_contents_that_are_moved_back_over_loaded_ones_are_never_replayed() -> None:
    class Restoring(Plain):
        def load_weights(self, weights: Weights) -> None:
            twin = self.turned.data.to(CPU)
            super().load_weights(weights)
            self.turned.data.copy_(twin)

    assert learn(model=Restoring()).loader_only == READS_OLD


def test_old_contents_that_are_read_before_the_checkpoint_overwrites_them_are_never_replayed() -> None:
    def derive(model: Plain) -> None:
        model.turned.data.copy_(model.spare.data)
        model.get_buffer("norm_plus_one").copy_(model.turned.data[0]).add_(1.0)

    assert learn(derive).loader_only == READS_OLD


@pytest.mark.parametrize("used", ["add_", "mul", "neg_"])
def test_old_contents_that_are_moved_and_used_are_never_replayed(used: str) -> None:
    def use(model: Plain) -> None:
        twin = model.turned.data.to(CPU)
        getattr(twin, used)(*([] if used == "neg_" else [2]))
        model.turned.data.copy_(twin)

    assert learn(use).loader_only == READS_OLD


def test_a_checkpoint_that_is_loaded_into_a_twin_is_never_replayed() -> None:
    class Staged(Plain):
        def _load_turned(self, tensor: torch.Tensor) -> None:
            twin = self.turned.data.to(CPU)
            twin.copy_(tensor.t())
            self.turned.data.copy_(twin)

    assert learn(model=Staged()).loader_only == READS_OLD


class Scaled(Plain):
    """With a scale of the attention's cache, as SGLang gives it to Qwen2 in fp8; no checkpoint has it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_scale_that_is_read_and_is_the_same_after_each_load_leaves_a_plan_possible(is_moved: bool) -> None:
    """What SGLang's hook does: it reads the scale, on the GPU by way of the host, and writes what it read."""

    def hook(model: Plain) -> None:
        scale = model.get_parameter("scale")
        if scale > 0.0:
            scale.data.copy_((scale.data.to(CPU) if is_moved else scale).item())

    assert told(learn(after=hook, model=Scaled())) == (None, 7, 0)


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_scale_that_is_another_after_each_load_is_never_replayed(is_moved: bool) -> None:
    def hook(model: Plain) -> None:
        scale = model.get_parameter("scale")
        scale.data.copy_((scale.data.to(CPU) if is_moved else scale).item() + 1.0)

    assert learn(after=hook, model=Scaled()).loader_only == READS_OLD


def test_a_scale_that_is_counted_up_where_it_lies_is_never_replayed() -> None:
    assert learn(lambda model: model.get_parameter("scale").data.add_(0.0), model=Scaled()).loader_only == READS_OLD


def test_few_bytes_that_the_checkpoint_loads_after_they_were_read_are_never_replayed() -> None:
    model = Plain()
    model.load_weights(tiny_weights(1).items())  # what is loaded again: the same bytes
    assert learn(lambda model: model.norm.data[:2].sum().item(), model=model).loader_only == READS_OLD


def test_many_old_bytes_are_not_taken_for_a_scale() -> None:
    assert learn(lambda model: model.spare.data.sum().item()).loader_only == READS_OLD
