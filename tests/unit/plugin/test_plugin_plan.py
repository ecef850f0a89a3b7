"""The recorded load plan: what a loader does is seen, repeated where it is copies, and done again where it is not."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from refitd_plugin.memory.copy_schedule import MoveTable, within_host
from refitd_plugin.memory.source import VersionSource
from refitd_plugin.update import loading
from refitd_plugin.update.loading import PlanTables
from refitd_plugin.update.plan import ReplayPlan, addresses_of, learned, replay, same_bits, tensors_of
from refitd_plugin.update.recorder import Recorder
from support.mini_sglang import TinyModel, Weights, expected, tiny_weights, values


def learn(model: TinyModel, weights: dict[str, torch.Tensor]) -> ReplayPlan:
    """Load once, looking on."""
    before = addresses_of(model)
    recorder = Recorder(weights, [tensor for _, tensor in tensors_of(model)])
    with recorder:
        model.load_weights(weights.items())
    return learned("inventory", model, before, weights, recorder)


def again(plan: ReplayPlan, model: TinyModel, weights: dict[str, torch.Tensor]) -> None:
    replay(within_host(plan.copies, lambda: weights).steps, plan.rest(weights), model.load_weights)


def test_a_plan_of_copies_alone_is_proven_and_one_with_a_rest_is_not() -> None:
    class Plain(TinyModel):
        def _load_norm(self, tensor: torch.Tensor) -> None:
            self.norm.data.copy_(tensor)

    assert learn(Plain(), tiny_weights(1)).proven
    assert not learn(TinyModel(), tiny_weights(1)).proven


def test_what_a_loader_computes_goes_through_it_and_the_rest_is_copied() -> None:
    class Computing(TinyModel):
        def _load_q(self, tensor: torch.Tensor) -> None:
            super()._load_q(torch.nn.functional.normalize(tensor.float()).bfloat16())

        def _load_embed(self, tensor: torch.Tensor) -> None:
            self.embed.data.fill_(tensor[0, 0].item())

    model = Computing()
    plan = learn(model, tiny_weights(1))
    assert plan.residual == ("q.weight", "embed.weight", "norm.weight")
    again(plan, model, tiny_weights(2))
    fresh = Computing()
    fresh.load_weights(tiny_weights(2).items())
    assert values(model) == values(fresh)


def test_a_cast_is_not_a_copy() -> None:
    weights = tiny_weights(1) | {"down.weight": torch.randn(4, 6)}
    plan = learn(TinyModel(), weights)
    assert (plan.loader_only, plan.residual) == (None, ("down.weight", "norm.weight"))


def test_tensors_that_wait_for_each_other_go_through_the_loader_together() -> None:
    class Fusing(TinyModel):
        def load_weights(self, weights: Weights) -> None:
            waiting: dict[str, torch.Tensor] = {}
            for name, tensor in weights:
                if name[0] not in "kv" or name.startswith("norm"):
                    super().load_weights([(name, tensor)])
                    continue
                waiting[name] = tensor
                if len(waiting) == 2:
                    both = torch.cat([waiting["k.weight"], waiting["v.weight"]])
                    self.qkv.data[4:].copy_(both)

    model = Fusing()
    plan = learn(model, tiny_weights(1))
    assert plan.residual == ("k.weight", "v.weight", "norm.weight")
    again(plan, model, tiny_weights(2))
    assert values(model) == expected(tiny_weights(2))


def test_a_loader_that_works_in_threads_is_never_replayed() -> None:
    class Threaded(TinyModel):
        def load_weights(self, weights: Weights) -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(super().load_weights, list(weights)).result()

    assert learn(Threaded(), tiny_weights(1)).loader_only == "the loader works in threads"
    assert threading.Thread.start.__name__ == "start"


def test_a_loader_that_starts_from_what_it_held_is_never_replayed() -> None:
    class Averaging(TinyModel):
        def _load_norm(self, tensor: torch.Tensor) -> None:
            self.norm.data.mul_(0.5).add_(tensor)

    assert learn(Averaging(), tiny_weights(1)).loader_only == "the loader reads weights that it has not loaded"


def test_a_loader_that_replaces_a_parameter_is_never_replayed() -> None:
    class Replacing(TinyModel):
        def _load_norm(self, tensor: torch.Tensor) -> None:
            self.norm = torch.nn.Parameter(tensor.clone(), requires_grad=False)

    assert learn(Replacing(), tiny_weights(1)).loader_only == "the load replaced tensors of the model"


def test_weights_that_change_behind_the_dispatcher_are_noticed() -> None:
    class Sly(TinyModel):
        def _load_down(self, tensor: torch.Tensor) -> None:
            super()._load_down(tensor)
            self.down.data.view(torch.int16).numpy()[0, 0] += 1

    assert learn(Sly(), tiny_weights(1)).loader_only == "something changes the weights after the loader has copied them"


def test_a_tensor_that_no_copy_was_seen_of_goes_through_the_loader_while_bytes_are_missing() -> None:
    class Sly(TinyModel):
        def _load_down(self, tensor: torch.Tensor) -> None:
            self.down.data.view(torch.int16).numpy()[:] = tensor.view(torch.int16).numpy()

    model = Sly()
    plan = learn(model, tiny_weights(1))
    assert "down.weight" in plan.residual
    again(plan, model, tiny_weights(2))
    assert values(model) == expected(tiny_weights(2))


def test_a_plan_fits_one_model_at_its_place_and_one_inventory() -> None:
    model = TinyModel()
    plan = learn(model, tiny_weights(1))
    assert plan.fits("inventory", model)
    assert not plan.fits("another", model)
    assert not plan.fits("inventory", TinyModel())
    model.norm.data = model.norm.data.clone()
    assert not plan.fits("inventory", model)


def test_a_moved_tensor_is_the_same_tensor() -> None:
    class Moving(TinyModel):
        def _load_down(self, tensor: torch.Tensor) -> None:
            super()._load_down(tensor.clone())

    model = Moving()
    plan = learn(model, tiny_weights(1))
    assert plan.residual == ("norm.weight",)
    again(plan, model, tiny_weights(2))
    assert values(model) == expected(tiny_weights(2))


def test_bits_are_compared_and_not_numbers() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, torch.tensor([float("nan"), -0.0]))
    assert same_bits(torch.tensor(1.0), torch.tensor(1.0))
    assert not same_bits(torch.ones(4, 6)[:, :3], torch.zeros(4, 3))


def test_the_moves_of_a_layout_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time anew takes 70 ms of each version."""
    model = TinyModel()
    plan = learn(model, tiny_weights(1))

    def version(headers: dict[str, Any]) -> VersionSource:
        structure = SimpleNamespace(inventory=SimpleNamespace(tensors={}), headers=headers)
        source = SimpleNamespace(structure=structure, cut=None, copies_of=lambda copies: copies)
        return cast("VersionSource", source)

    monkeypatch.setattr(loading, "sizes_of", lambda _: {})
    monkeypatch.setattr(loading, "table_of", lambda _, headers: MoveTable(headers, {}, ()))
    tables = PlanTables(plan, model, version({}))
    first, again = (tables.table_of(version({}))[0] for _ in range(2))
    assert first is again
    assert tables.table_of(version({"other": SimpleNamespace(tensors={})}))[0] is not first
