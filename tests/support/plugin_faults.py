"""A plugin for SGLang that lets the writing of weights fail, as the file FAULT_FILE says.

copy 3      the next replay raises in place of its fourth copy, or after its last one where there are fewer
delta 3     the fourth piece of the next delta is not written
loader 3    the loader raises when it has been given three tensors
rank 1 …    only on that rank
again …     once more when the old weights are put back

It also lets SGLang compute its checksums on a CPU, and stage weights around a load as it does on a GPU: STAGED=itself
copies each tensor onto itself, STAGED=back moves it to other memory and back, as SGLang does with offloaded weights.
FP8=1 serves fp8 in blocks, which SGLang's build for the CPU does on processors with AMX alone: loads are those of a GPU
before Blackwell, and the kernel is torch's own arithmetic. On a GPU it changes nothing.
"""

import os
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any


class InjectedError(RuntimeError):
    """A fault that a test asked for."""


def register() -> None:
    """The entry point."""
    import sys

    if "FAULT_FILE" not in os.environ or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    if "STAGED" in os.environ:
        _stage_as_on_a_gpu(os.environ["STAGED"])
    if "FP8" in os.environ:
        _serve_fp8_without_its_kernels()
    from refitd_plugin.delta import in_place
    from refitd_plugin.update import loading

    original_schedule, original_given, original_write = (
        loading.Loading._schedule,
        loading.TensorFeed._given,
        in_place.HostPatch.write,
    )

    def schedule(self: Any, plan: Any, source: Any) -> Any:
        found = original_schedule(self, plan, source)
        return replace(found, steps=_failing_steps(found.steps))

    def given(self: Any) -> Any:
        return _failing("loader", original_given(self))

    def write(self: Any) -> None:
        pieces, self._pieces = self._pieces, _failing("delta", self._pieces)
        try:
            original_write(self)
        finally:
            self._pieces = pieces

    loading.Loading._schedule, loading.TensorFeed._given, in_place.HostPatch.write = schedule, given, write


def _stage_as_on_a_gpu(how: str) -> None:
    """SGLang's own staging, which it leaves out where the device is the CPU.

    It takes a tensor on "cuda:0" for one on another device than "cuda", and `to` gives the tensor itself.
    """
    import torch

    loader: Any = import_module("sglang.srt.model_loader.loader")
    post_load: Any = import_module("sglang.srt.model_loader.post_load")
    indexed = torch.device("cpu", 0)
    made = post_load._TensorState

    def state(tensor: Any, data: Any, _: Any) -> Any:
        return made(tensor, data, indexed)

    if how == "itself":
        post_load._TensorState = state
    process_device = torch.device("cpu") if how == "itself" else indexed
    loader.device_loading_context = lambda module, _: post_load.stage_module_for_post_load(module, process_device)


def _serve_fp8_without_its_kernels() -> None:
    import torch

    if torch.cuda.is_available():
        return
    fp8: Any = import_module("sglang.srt.layers.quantization.fp8")
    fp8._is_cpu = False

    def apply(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        return torch.nn.functional.linear(x, dequantised(layer.weight, layer.weight_scale_inv).to(x.dtype), bias)

    fp8.Fp8LinearMethod.apply = apply


def dequantised(weight: Any, scales: Any) -> Any:
    """A matrix in fp8 blocks as float32."""
    rows, columns = weight.shape
    each = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return weight.float() * each


def _failing_steps(steps: Any) -> list[Any]:
    """Copies, on a GPU by the driver: they are made in the pause, and may have been made ready long before."""
    asked: list[int | None] = []
    made: list[int] = []

    def failing(step: Any) -> None:
        if not asked:
            asked.append(_asked("copy"))
        if len(made) == asked[0]:
            raise InjectedError(f"copy {asked[0]}")
        step()
        made.append(len(made))
        if asked[0] is not None and len(made) == len(steps):
            raise InjectedError(f"copy {asked[0]}")

    return [partial(failing, step) for step in steps]


def _failing(what: str, items: Any) -> Any:
    after = _asked(what)
    for number, item in enumerate(items):
        if number == after:
            raise InjectedError(f"{what} {number}")
        yield item


def _asked(what: str) -> int | None:
    """After how many, and strike the request out."""
    path = Path(os.environ["FAULT_FILE"]).with_suffix(f".{_rank()}")
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return None
    for line in lines:
        asked, number = line.split()
        if asked == what:
            path.write_text("\n".join(each for each in lines if each is not line))
            return int(number)
    return None


def _rank() -> int:
    import torch

    return torch.distributed.get_rank()
