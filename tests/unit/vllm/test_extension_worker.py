"""What vLLM's worker class gets, without vLLM: methods that return, and layers that are put together again."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from refitd_client.contract.plugin import setting_fault
from refitd_plugin import rank_plugin
from refitd_vllm import plugin
from refitd_vllm.plugin import Worker
from refitd_vllm.process import UnknownReleaseError, VllmProcess, packed_at_start, processed, through_layers, undone
from support.sockets import ask

LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"
METHODS = ("refitd_open", "refitd_update")


class Info:
    """vLLM's record of one layer that is reloaded."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.restore_metadata = (dict(layer.named_parameters(recurse=False)), {})
        self.kernel_tensors: Any = None
        self.apart = False
        self.collected: list[str] = []

    def can_load(self) -> bool:
        return self.apart

    def reset(self) -> None:
        self.apart, self.kernel_tensors, self.collected = False, None, []


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy starts a thread late."""
    monkeypatch.setattr(rank_plugin, "_OPENING_SECONDS", 30.0)


@pytest.fixture
def infos(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Info]:
    """Stands for vLLM's module for reloads."""
    infos: dict[Any, Info] = {}
    module: Any = ModuleType(LAYERWISE)
    module.LOADING_LAYERS = set()
    module.get_layerwise_info = lambda layer: infos.setdefault(layer, Info(layer))

    def place(layer: torch.nn.Module, info: Info) -> None:
        for name, parameter in info.kernel_tensors[0].items():
            setattr(layer, name, parameter)

    module._place_kernel_tensors = place
    parts = LAYERWISE.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    monkeypatch.setitem(sys.modules, LAYERWISE, module)
    return infos


def linear(method: str = "UnquantizedLinearMethod", **attributes: Any) -> torch.nn.Module:
    layer: Any = torch.nn.Linear(2, 2)
    layer.quant_method = type(method, (), {})()
    for name, value in attributes.items():
        setattr(layer, name, value)
    return torch.nn.Sequential(layer)


def test_plain_layers_are_written_in_place(infos: dict[Any, Info]) -> None:
    assert processed(linear()) is None
    assert processed(linear(cpu_linear=torch.nn.functional.linear)) is None


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (linear("Fp8LinearMethod"), "Fp8LinearMethod"),
        (linear(cpu_linear=print), "repacked for the CPU"),
        (linear(process_weights_after_loading=print), "computes tensors of its own"),
    ],
)
def test_layers_that_are_processed_after_a_load_are_not(
    model: torch.nn.Module, reason: str, infos: dict[Any, Info]
) -> None:
    assert reason in (processed(model) or "")


def test_a_layer_that_holds_another_form_than_what_is_loaded_is_not(infos: dict[Any, Info]) -> None:
    model = linear()
    assert processed(model) is None
    model[0].weight = torch.nn.Parameter(torch.empty(0))  # type: ignore[index,operator]
    assert "another form" in (processed(model) or "")


def test_a_reload_that_raises_leaves_no_layer_apart(infos: dict[Any, Info]) -> None:
    model: Any = linear()
    layer, held = model[0], model[0].weight
    processed(model)  # the layers are on record

    def reload() -> None:
        infos[layer].apart = True
        infos[layer].kernel_tensors = ({"weight": held}, {})
        infos[layer].collected = ["half of it"]
        layer.weight = torch.nn.Parameter(torch.empty(2, 2, device="meta"))
        raise RuntimeError("no such tensor")

    with pytest.raises(RuntimeError, match="no such tensor"):
        through_layers(model, reload)
    assert layer.weight is held
    assert (infos[layer].apart, infos[layer].collected) == (False, [])
    undone(model)  # and nothing is left to do
    assert layer.weight is held


@pytest.mark.parametrize(("kernel", "packed"), [("modular", True), (None, False)])
def test_experts_that_are_packed_for_the_cpu_at_the_start_alone_are_named(kernel: str | None, *, packed: bool) -> None:
    """A reload of vLLM 0.32.0 writes them unpacked to where packed ones are read."""
    model: Any = linear("UnquantizedFusedMoEMethod")
    model[0].quant_method.moe_kernel = kernel
    assert (packed_at_start(model) is not None) is packed
    assert not packed or "experts" in (packed_at_start(model) or "")


def test_a_release_whose_reload_looks_otherwise_is_named(infos: dict[Any, Info]) -> None:
    delattr(sys.modules[LAYERWISE], "_place_kernel_tensors")
    with pytest.raises(UnknownReleaseError, match="_place_kernel_tensors"):
        processed(linear())


def test_methods_of_the_extension_return_whatever_happens() -> None:
    """An exception in one of several workers shifts the answers of the others."""
    for name in METHODS:
        reply = vars(Worker)[name](SimpleNamespace(), *(["/nowhere"] if name == "refitd_update" else []))
        assert reply["ok"] is False
        assert reply["reason"]


def test_a_worker_class_is_extended_once_and_the_flag_for_the_same_class_meets_no_name_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Extended:
        """vLLM's worker class."""

        def __init__(self) -> None:
            self.loaded = 0

        def load_model(self) -> None:
            self.loaded += 1

    mine = type("Worker", (), {name: vars(Worker)[name] for name in METHODS})
    monkeypatch.setattr(plugin, "Worker", mine)
    plugin.extend(Extended)
    plugin.extend(Extended)
    worker: Any = Extended()
    worker.load_model()
    assert worker.loaded == 1  # that the plugin cannot look at this model does not matter
    assert worker.refitd_update("/nowhere")["ok"] is False
    assert not any(name.startswith("refitd_") for name in dir(mine))


def test_the_entry_point_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    plugin.register()  # no vLLM is installed here
    assert "refitd stands aside" in caplog.text
    caplog.clear()
    monkeypatch.setenv("REFITD_VLLM", "off")
    plugin.register()
    assert not caplog.text


@pytest.mark.parametrize(
    ("part", "values", "named"),
    [
        ("parallel_config", {"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ("parallel_config", {"enable_eplb": True}, "--enable-eplb"),
        ("speculative_config", {"method": "eagle3"}, "speculative decoding"),
        ("lora_config", {"max_loras": 1}, "--enable-lora"),
        (None, {}, None),
    ],
)
def test_what_the_extension_cannot_do_right_it_leaves_to_vllm_by_name(
    infos: dict[Any, Info], part: str | None, values: dict[str, Any], named: str | None
) -> None:
    parallel = SimpleNamespace(pipeline_parallel_size=1, enable_eplb=False)
    config = SimpleNamespace(parallel_config=parallel, speculative_config=None, lora_config=None, instance_id="17")
    if part == "parallel_config":
        vars(parallel).update(values)
    elif part is not None:
        setattr(config, part, SimpleNamespace(**values))
    runner = SimpleNamespace(get_model=torch.nn.Module)
    aside = VllmProcess(SimpleNamespace(vllm_config=config, model_runner=runner)).aside()
    assert (aside is None) if named is None else (named in (aside or ""))


class Extensible:
    """A worker, as vLLM holds it."""

    def __init__(self, instance: str) -> None:
        parallel = SimpleNamespace(pipeline_parallel_size=1, enable_eplb=False, world_size=1, data_parallel_size=1)
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel, speculative_config=None, lora_config=None, instance_id=instance,
            model_config=SimpleNamespace(model="/base", revision=None, enable_sleep_mode=False),
        )  # fmt: skip
        self.model_runner = SimpleNamespace(get_model=torch.nn.Module)
        self.rank = 0


def opened(worker: Extensible, **arguments: str) -> dict[str, Any]:
    return vars(Worker)["refitd_open"](worker, **arguments)


def test_a_channel_that_is_opened_late_is_that_of_the_server_and_in_the_root_that_the_call_names(
    infos: dict[Any, Info], tmp_path: Path
) -> None:
    """In an engine core that holds the worker itself, another number was drawn by then."""
    worker = Extensible("18")
    missing = opened(worker, instance="17", root=str(tmp_path))
    assert missing["ok"] is False
    assert f"no root of refitd at {tmp_path}" in missing["reason"]
    (tmp_path / ".refitd").mkdir()
    assert opened(worker, instance="17", root=str(tmp_path)) == {"ok": True, "reason": ""}
    assert opened(worker, instance="17", root=str(tmp_path)) == {"ok": True, "reason": ""}
    (name,) = os.listdir(tmp_path / ".refitd/engines")
    assert ask(tmp_path / ".refitd/engines" / name, do="hello")["seed"] == 17


@pytest.mark.parametrize("named", [None, "/nowhere"])
def test_the_class_opens_its_channel_in_the_root_that_the_service_names_where_no_variable_names_one(
    infos: dict[Any, Info], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    """Also beside the entry point, which the installed package always has, and where the variable names no root."""
    worker = type("Extended", (Extensible,), {"load_model": lambda _: None})("17")
    mine = type("Worker", (), {name: vars(Worker)[name] for name in METHODS})
    monkeypatch.setattr(plugin, "Worker", mine)
    plugin.extend(type(worker))
    if named is not None:
        monkeypatch.setenv("REFITD_VLLM_ROOT", named)
    worker.load_model()
    missing = worker.refitd_open(instance="17", root=str(tmp_path))
    assert missing["ok"] is False
    assert (setting_fault(f"rank 0 says: {missing['reason']}") is not None) == (named is not None)
    assert named is None or missing["reason"].startswith("REFITD_VLLM_ROOT is '/nowhere', and")
    (tmp_path / ".refitd").mkdir()
    assert worker.refitd_open(instance="17", root=str(tmp_path)) == {"ok": True, "reason": ""}
    (name,) = os.listdir(tmp_path / ".refitd/engines")
    assert ask(tmp_path / ".refitd/engines" / name, do="hello")["state"] == "on"


def test_a_rank_that_stands_aside_or_is_switched_off_says_so_when_it_is_asked_for_a_channel(
    infos: dict[Any, Info], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".refitd").mkdir()
    aside = Extensible("17")
    aside.vllm_config.parallel_config.enable_eplb = True
    assert "--enable-eplb" in opened(aside, root=str(tmp_path))["reason"]
    monkeypatch.setenv("REFITD_VLLM", "off")
    off = opened(Extensible("17"), root=str(tmp_path))
    assert off == {"ok": False, "reason": "it is switched off (REFITD_VLLM=off)"}


def test_a_rank_is_known_by_the_number_that_its_server_names_also_where_vllm_draws_another_after_the_start() -> None:
    config = SimpleNamespace(instance_id="17")
    process = VllmProcess(SimpleNamespace(vllm_config=config))
    config.instance_id = "18"  # as an engine core does that holds the worker itself, on one GPU
    assert process.seed == 17
