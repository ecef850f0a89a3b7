"""What SGLang does around a load of copies: its hooks are called, and what they would be told anew is not."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from refitd_sglang import process
from refitd_sglang.process import shortened

REFUSAL = "this model keeps values that no load renews"


class Stand(ModuleType):
    """A module of SGLang with both functions, which counts how often each is called."""

    staged = 0
    asked = 0
    answer: str | None = None

    @contextmanager
    def device_loading_context(self, module: torch.nn.Module, device: torch.device) -> Iterator[torch.nn.Module]:
        self.staged += 1
        yield module

    def _unsupported_derived_weight_cache_error(self, model: torch.nn.Module | None = None) -> str | None:
        self.asked += 1
        return self.answer

    def load(self, model: torch.nn.Module) -> str | None:
        """As SGLang's update does: the question, and a hook of each module within its staging."""
        refusal = self._unsupported_derived_weight_cache_error(model)
        for module in model.modules():
            with self.device_loading_context(module, torch.device("cuda")) as staged:
                assert staged is module
        return refusal


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    found = Stand("stand_in_for_sglang")
    monkeypatch.setitem(sys.modules, found.__name__, found)
    return found


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU where units are tested; on one, `tests/gpu/test_plugin_gpu.py` loads so."""
    monkeypatch.setattr(process, "_is_resident", lambda _: True)


def owner(of: Stand) -> Any:
    return type("Owner", (), {"__module__": of.__name__})


@pytest.mark.usefixtures("on_gpu")
def test_copies_into_a_model_on_its_gpu_stage_no_module_and_whole_loads_stage_all(stand: Stand) -> None:
    model, cls = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), owner(stand)
    with shortened(cls, cls, model, is_copied=True):
        stand.load(model)
    assert stand.staged == 0
    with shortened(cls, cls, model, is_copied=False):
        stand.load(model)
    stand.load(model)
    assert stand.staged == 6


def test_a_model_that_is_not_on_the_gpu_is_staged(stand: Stand) -> None:
    model, cls = torch.nn.Linear(2, 2), owner(stand)
    with shortened(cls, cls, model, is_copied=True):
        stand.load(model)
    assert stand.staged == 1


def test_copies_are_not_asked_of_a_model_that_a_whole_load_was_told_can_be_loaded(stand: Stand) -> None:
    model, other, cls = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), owner(stand)
    with shortened(cls, cls, model, is_copied=False):
        assert stand.load(model) is None
    with shortened(cls, cls, model, is_copied=True):
        stand.load(model)
    assert stand.asked == 1
    with shortened(cls, cls, other, is_copied=True):  # another model is asked for itself
        stand.load(other)
    assert stand.asked == 2


def test_what_sglang_refuses_stays_refused(stand: Stand) -> None:
    model, cls = torch.nn.Linear(2, 2), owner(stand)
    stand.answer = REFUSAL
    for is_copied in (False, True, True):
        with shortened(cls, cls, model, is_copied=is_copied):
            assert stand.load(model) == REFUSAL
    assert stand.asked == 3


@pytest.mark.usefixtures("on_gpu")
def test_another_thread_stages_meanwhile(stand: Stand) -> None:
    model, cls = torch.nn.Linear(2, 2), owner(stand)
    with shortened(cls, cls, model, is_copied=True):
        thread = threading.Thread(target=stand.load, args=(model,))
        thread.start()
        thread.join()
    assert stand.staged == 1


@pytest.mark.usefixtures("on_gpu")
def test_a_load_that_raises_leaves_sglang_as_it_was(stand: Stand) -> None:
    model, cls = torch.nn.Linear(2, 2), owner(stand)
    with pytest.raises(RuntimeError, match="half-way"), shortened(cls, cls, model, is_copied=True):
        raise RuntimeError("half-way")
    stand.load(model)
    assert (stand.staged, stand.asked) == (1, 1)


def test_a_release_without_these_functions_is_loaded_as_before() -> None:
    model = torch.nn.Linear(2, 2)
    with shortened(torch.nn.Module, torch.nn.Module, model, is_copied=True):
        pass
