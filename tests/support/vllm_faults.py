"""A plugin for vLLM in tests: loads that fail in their midst when a file says so, and layers that stay unpacked.

FAULT_FILE=PATH   where PATH.RANK exists the next load of that rank raises after so many tensors as it says,
                  and where PATH.RANK.refuse exists it refuses the next version
UNPACKED=1        linear layers on the CPU keep their weights as they were loaded, as on a GPU
FP8=1             fp8 in blocks is served without AMX: the kernel is torch's own arithmetic, on weights that are turned
                  after they were loaded, since vLLM's kernels too keep them in another form
"""

import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any


def register() -> None:
    """Called in every process of vLLM."""
    if "UNPACKED" in os.environ:
        utils: Any = import_module("vllm.model_executor.layers.utils")
        import torch

        def unpacked(layer: Any, remove_weight: bool) -> None:
            layer.cpu_linear = torch.nn.functional.linear

        utils.dispatch_cpu_unquantized_gemm = unpacked
    if "FP8" in os.environ:
        _serve_fp8_without_its_kernels()
    if "FAULT_FILE" in os.environ:
        for name in ("2", "3"):
            module: Any = import_module(f"vllm.model_executor.models.qwen{name}")
            _let_fail(getattr(module, f"Qwen{name}ForCausalLM"))
        loading: Any = import_module("refitd_plugin.update.loading")
        replay = loading.replay

        def failing(steps: Iterable[Any], rest: Any, load: Any) -> None:
            if (left := _left()) is None:
                return replay(steps, rest, load)
            return replay(_failing(steps, left), rest, load)

        loading.replay = failing
        engine: Any = import_module("refitd_plugin.update.rank_engine")
        fit = engine.RankEngine._fit

        def refusing(self: Any, call: Any) -> Any:
            if (fault := _fault(".refuse")).exists():
                fault.unlink()
                raise engine.SourceRefusedError("a fault of the test")
            return fit(self, call)

        engine.RankEngine._fit = refusing


def _serve_fp8_without_its_kernels() -> None:
    import torch

    from support.plugin_faults import dequantised

    linear: Any = import_module("vllm.model_executor.kernels.linear")
    replace: Any = import_module("vllm.model_executor.utils").replace_parameter

    class Turning(linear.CPUFp8BlockScaledMMKernel):
        @classmethod
        def is_supported(cls, compute_capability: Any = None) -> tuple[bool, None]:
            return True, None

        def process_weights_after_loading(self, layer: Any) -> None:
            replace(layer, "weight", layer.weight.data.t().contiguous())

        def apply_weights(self, layer: Any, x: Any, bias: Any = None, **_: Any) -> Any:
            weight = dequantised(layer.weight.t(), layer.weight_scale_inv)
            return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

    linear._POSSIBLE_FP8_BLOCK_KERNELS[linear.PlatformEnum.CPU] = [Turning]


def _let_fail(model: Any) -> None:
    load = model.load_weights
    model.load_weights = lambda self, weights: load(self, _failing(weights, _left()))


def _left() -> int | None:
    """After how many tensors this load fails; None where it does not."""
    fault = _fault("")
    left = int(fault.read_text()) if fault.exists() else None
    fault.unlink(missing_ok=True)
    return left


def _fault(which: str) -> Path:
    from torch import distributed

    rank = distributed.get_rank() if distributed.is_initialized() else 0
    return Path(f"{os.environ['FAULT_FILE']}.{rank}{which}")


def _failing(items: Iterable[Any], left: int | None) -> Iterator[Any]:
    for item in items:
        if left == 0:
            raise RuntimeError("a fault of the test")
        left = None if left is None else left - 1
        yield item
