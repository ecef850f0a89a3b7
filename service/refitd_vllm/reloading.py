"""How weights get into a vLLM model: straight into its parameters, or through vLLM's reload layer by layer.

vLLM's own reload (`model_executor/model_loader/reload` in 0.32.0) takes each layer apart, collects what is loaded into
it, and processes the layer when all of it is there: quantises, repacks, shuffles. It is needed wherever processing
changes what was loaded. Where it changes nothing, the model's `load_weights` writes into the live parameters, and what
it does can be learned and replayed.

A reload that raises leaves its layers apart, with what they have collected; the next reload would go on from there. So
`undone` puts every layer together again.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

_LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"
_USED = ("LOADING_LAYERS", "_place_kernel_tensors", "get_layerwise_info")
_UNCHANGED = {
    "UnquantizedLinearMethod",
    "UnquantizedEmbeddingMethod",
}  # methods whose processing changes nothing on a GPU
_PLAIN_ATTENTION = {"Attention", "EncoderOnlyAttention", "CrossAttention", "ChunkedLocalAttention"}


class UnknownReleaseError(Exception):
    """vLLM's reload does not look as in any release that is known. The message says what is missing."""


def layerwise() -> Any:
    """vLLM's module for reloads layer by layer.

    Raises:
        UnknownReleaseError: it is not as it is known.
    """
    try:
        module = import_module(_LAYERWISE)
    except ImportError as error:
        raise UnknownReleaseError(str(error)) from error
    if missing := [name for name in _USED if not hasattr(module, name)]:
        raise UnknownReleaseError(f"{_LAYERWISE} has no {missing[0]}")
    return module


def processed(model: torch.nn.Module) -> str | None:
    """Why weights cannot be written straight into a model's parameters; None where they can."""
    info_of = layerwise().get_layerwise_info
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and type(method).__name__ not in _UNCHANGED:
            return f"{name} is loaded by {type(method).__name__}, which changes weights after a load"
        derives = callable(getattr(layer, "process_weights_after_loading", None))
        if derives and type(layer).__name__ not in _PLAIN_ATTENTION:
            return f"{name} ({type(layer).__name__}) computes tensors of its own from what is loaded"
        if getattr(layer, "cpu_linear", torch.nn.functional.linear) is not torch.nn.functional.linear:
            return f"{name} is repacked for the CPU"
        parameters, _ = info_of(layer).restore_metadata
        for own, loaded in parameters.items():
            now = getattr(layer, own, None)
            if now is None or (now.shape, now.dtype) != (loaded.shape, loaded.dtype):
                return f"{name}.{own} has another form than what is loaded into it"
    return None


def packed_at_start(model: torch.nn.Module) -> str | None:
    """Why a reload would leave experts in another form than the one they are read in; None where it does not.

    vLLM 0.32.0 packs them for the CPU when it makes their kernel, which it makes once.
    """
    for name, layer in model.named_modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and any(each.device.type == "cpu" for each in layer.parameters()):
            return f"the experts in {name} are packed for the CPU when the server starts, and not after a reload"
    return None


def through_layers(model: torch.nn.Module, reload: Callable[[], None]) -> None:
    """Reload layer by layer; a reload that raises leaves no layer apart.

    Args:
        model: what is loaded into.
        reload: vLLM's function, with the weights.

    Raises:
        Exception: what `reload` raises. Layers that were complete have the new weights, the others those of before.
    """
    try:
        reload()
    except BaseException:
        undone(model)
        raise


def undone(model: torch.nn.Module) -> None:
    """Put together again what a reload has left apart, and drop what it has collected."""
    module = layerwise()
    for layer in model.modules():
        info = module.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            module._place_kernel_tensors(layer, info)  # noqa: SLF001 - what vLLM itself does at the end of a reload
        info.reset()
    module.LOADING_LAYERS.clear()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload  # noqa: SLF001
