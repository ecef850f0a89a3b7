"""One rank of vLLM as the plugin sees it: its worker, its model, and how its loads are given tensors.

Weights get straight into a model's parameters, or through vLLM's reload layer by layer.

vLLM's own reload (`model_executor/model_loader/reload` in 0.32.0) takes each layer apart, collects what is loaded into
it, and processes the layer when all of it is there: quantises, repacks, shuffles. It is needed wherever processing
changes what was loaded. Where it changes nothing, the model's `load_weights` writes into the live parameters, and what
it does can be learned and replayed.

A reload that raises leaves its layers apart, with what they have collected; the next reload would go on from there. So
`undone` puts every layer together again.
"""

import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from refitd_plugin.update.loading import TensorFeed

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
    """Reload layer by layer; a reload that raises leaves no layer apart. `reload`: vLLM's function, with the weights.

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


class VllmProcess:
    def __init__(self, worker: Any) -> None:
        self._worker = worker
        # The number by which the server names itself. This is right at the load of the model: an engine core that holds
        # the worker itself draws another afterwards. A plugin that is made later is told it.
        self.instance = str(worker.vllm_config.instance_id)
        self._feed: TensorFeed | None = None

    @property
    def name(self) -> str:
        return "vllm"

    @property
    def release(self) -> str:
        try:
            return importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    @property
    def port(self) -> int | None:
        """No worker knows the port: 0."""
        return 0

    @property
    def seed(self) -> int | None:
        """VLLM's seed is 0 where none is given; its `instance_id` is another at each start."""
        return int(self.instance) if self.instance.isdecimal() else None

    @property
    def rank(self) -> int:
        return int(self._worker.rank)

    @property
    def size(self) -> int:
        return int(self._config.parallel_config.world_size)

    @property
    def dp_rank(self) -> int | None:
        parallel = self._config.parallel_config
        return int(parallel.data_parallel_index) if parallel.data_parallel_size > 1 else None

    @property
    def model(self) -> Any:
        return self._worker.model_runner.get_model()

    @property
    def model_path(self) -> str:
        return str(self._config.model_config.model)

    @property
    def revision(self) -> str | None:
        return self._config.model_config.revision

    @property
    def may_release(self) -> bool:
        """With `--enable-sleep-mode`."""
        return bool(self._config.model_config.enable_sleep_mode)

    def set_model_path(self, path: str) -> None:
        self._config.model_config.model = path

    def aside(self) -> str | None:
        config = self._config
        if config.parallel_config.pipeline_parallel_size > 1:
            return "pipeline parallelism: no stage holds the whole model, and what they hold together is not compared"
        if config.speculative_config is not None:
            return "speculative decoding: vLLM's reload leaves the draft model as it is"
        if config.parallel_config.enable_eplb:
            return "--enable-eplb: experts that have moved are not where a load writes them"
        if config.lora_config is not None:
            return "--enable-lora: the layers beneath adapters have other names than the checkpoint's"
        try:
            layerwise()
        except UnknownReleaseError as error:
            return f"vLLM {self.release} is not one that it knows: {error}"
        return packed_at_start(self.model)

    def loaded_once(self) -> str | None:
        """VLLM restores the form that a layer was loaded in."""
        return None

    @contextmanager
    def feeding(self, feed: TensorFeed) -> Iterator[None]:
        self._feed = feed
        try:
            yield
        finally:
            self._feed = None

    @property
    def writes_in_place(self) -> bool:
        """Whether a load writes into the live parameters, so that what it does can be learned."""
        return processed(self.model) is None

    def load(self, path: str, _: str, *, in_place: bool) -> tuple[bool, str]:
        """Load what is fed, under the name of a path. Raises what a loader raises. `in_place`: `writes_in_place`."""
        feed, runner, model = self._feed, self._worker.model_runner, self.model
        if feed is None:
            raise RuntimeError("nothing is fed to the load")
        with import_module("vllm.config").set_current_vllm_config(self._config):
            if in_place:
                model.load_weights(feed.tensors())
            elif feed.how == "load":
                through_layers(model, lambda: runner.reload_weights(weights_iterator=feed.tensors()))
            else:
                return False, f"it cannot be written into the live parameters: {processed(model)}"
        self.set_model_path(path)
        return True, ""

    @property
    def _config(self) -> Any:
        return self._worker.vllm_config
