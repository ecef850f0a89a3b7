"""One rank of SGLang as the plugin sees it: its model, its server's arguments, and how its loads are given tensors.

SGLang's own update function gets a version's tensors in place of files: its loader's iterator yields them.

Some models can be loaded only once. SGLang has quantisation methods that transpose and pack what was loaded, and leave
parameters behind that no loader knows (`process_weights_after_loading`). To load such a model again fails in its midst,
and stock SGLang ends with it: seen of fp8 on a GPU (0.5.12.post1), and of awq and blockwise_int8 on a CPU (0.5.23).
A checkpoint in fp8 blocks stays as it was loaded on Ada and Hopper GPUs. On Blackwell DeepGEMM gets other scales.

SGLang's passes over a model around a load are shortened where the load is copies and every tensor stays on its GPU.
Before and after a load SGLang calls a hook of each module that has a quantisation method, and around each call it looks
at every tensor of the module, to bring it to the GPU and back (`device_loading_context`). For 28 layers that takes 8 to
11 ms of each pause. Where all tensors are on the GPU there is nothing to bring; the hooks are called all the same.

A third pass asks whether the model keeps values that are computed from its weights and that no load renews. SGLang
decides that when a server starts, so what it said of the same model in an earlier load is its answer.
"""

import importlib.metadata
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from weakref import WeakSet

import torch

from refitd_plugin.update.loading import TensorFeed

_LOADING_CONTEXT = "device_loading_context"
_QUESTION = "_unsupported_derived_weight_cache_error"
_loadable: WeakSet[torch.nn.Module] = WeakSet()


@contextmanager
def shortened(loader: type, updater: type, model: torch.nn.Module, *, is_copied: bool) -> Iterator[None]:
    """Shorten the passes of this thread's loads while the context lasts, where SGLang has them. `updater`: SGLang's
    class that has the update function. `is_copied`: whether the load is copies into the model's tensors and nothing
    else.
    """
    replaced: list[tuple[Any, str, Any]] = []
    place, asker = sys.modules.get(loader.__module__), sys.modules.get(updater.__module__)
    if (question := getattr(asker, _QUESTION, None)) is not None:
        replaced.append((asker, _QUESTION, question))
    if is_copied and (staging := getattr(place, _LOADING_CONTEXT, None)) is not None and _is_resident(model):
        replaced.append((place, _LOADING_CONTEXT, staging))
    shorter = {_LOADING_CONTEXT: _unstaged, _QUESTION: _asked_once}
    for module, name, original in replaced:
        setattr(module, name, _in_this_thread(shorter[name](original, is_copied), original))
    try:
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


def _unstaged(_: Any, __: bool) -> Callable[..., Any]:
    return lambda module, *_, **__: nullcontext(module)


def _asked_once(original: Callable[..., Any], is_copied: bool) -> Callable[..., Any]:
    """SGLang's question; copies are not asked of a model of which a whole load was told that it can be loaded."""

    def ask(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if is_copied and model in _loadable:
            return None
        found = original(model, *args, **kwargs)
        if model is not None and found is None:
            _loadable.add(model)
        return found

    return ask


def _in_this_thread(shorter: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    mine = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (shorter if threading.get_ident() == mine else original)(*args, **kwargs)

    return call


def _is_resident(model: torch.nn.Module) -> bool:
    """Whether all tensors of a model are on the GPU that this thread computes on. Asked in each pause: without torch's
    own iterators, which take longer than what is saved.
    """
    if not torch.cuda.is_available():
        return False
    device = torch.device("cuda", torch.cuda.current_device())
    waiting = [model]
    while waiting:
        module = waiting.pop()
        for named in (module._parameters, module._buffers):  # noqa: SLF001 - what torch's iterators look at
            if any(tensor is not None and tensor.device != device for tensor in named.values()):
                return False
        waiting += [each for each in module._modules.values() if each is not None]  # noqa: SLF001
    return True


_ITERATOR = "_get_weights_iterator"
_NO_DRAFT_MODEL = {None, "", "NGRAM", "UNO"}  # speculation without a model of its own


@dataclass(frozen=True, slots=True)
class SglangProcess:
    """`EngineProcess` of one rank, whichever object of SGLang has the function that is wrapped.

    `updater` is that object; `loader` is SGLang's class that reads files.
    """

    updater: Any
    loader: type

    @property
    def name(self) -> str:
        return "sglang"

    @property
    def release(self) -> str:
        return sglang_version()

    @property
    def port(self) -> int | None:
        return getattr(self._args, "port", None)

    @property
    def seed(self) -> int | None:
        """SGLang draws a seed at each start where none is given."""
        found = _decided(self._args, "random_seed")
        return found if isinstance(found, int) else None

    @property
    def rank(self) -> int:
        return int(self.updater.tp_rank)

    @property
    def size(self) -> int:
        return int(getattr(self._args, "tp_size", 1) or 1)

    @property
    def dp_rank(self) -> int | None:
        """The newest releases keep the number in the process, and not in the runner."""
        runner = runner_of(self.updater)
        if hasattr(runner, "dp_rank"):
            return runner.dp_rank
        try:
            context: Any = import_module("sglang.srt.runtime_context")
            place = context.get_parallel()
        except ImportError:
            return None
        return place.dp_rank if place.dp_rank is not None or place.attn_dp_size == 1 else place.attn_dp_rank

    @property
    def model(self) -> Any:
        return runner_of(self.updater).model

    @property
    def model_path(self) -> str:
        return str(self.updater.model_config.model_path)

    @property
    def revision(self) -> str | None:
        return getattr(self.updater.model_config, "revision", None)

    @property
    def may_release(self) -> bool:
        """With `--enable-memory-saver`."""
        return bool(getattr(self._args, "enable_memory_saver", False))

    def set_model_path(self, path: str) -> None:
        self.updater.model_config.model_path = path

    def aside(self) -> str | None:
        if (getattr(self._args, "pp_size", 1) or 1) > 1:
            return "pipeline parallelism: SGLang updates one stage after the other, and no stage can wait for the next"
        if getattr(self._args, "enable_eplb", False):
            return "--enable-eplb: experts that have moved are not where a load writes them"
        if has_draft(self._args) and not draft_is_apart(self._args):
            algorithm = _decided(self._args, "speculative_algorithm")
            return f"speculative decoding ({algorithm}): model and draft layers are updated one after the other"
        return None

    def loaded_once(self) -> str | None:
        return loaded_once(self.model, self.updater.model_config)

    @contextmanager
    def feeding(self, feed: TensorFeed) -> Iterator[None]:
        passes = shortened(self.loader, type(self.updater), self.model, is_copied=feed.is_copied)
        with feeding(self.loader, feed), passes:
            yield

    @property
    def _args(self) -> Any:
        return runner_of(self.updater).server_args


def _decided(args: Any, name: str) -> Any:
    """A server's argument. 0.5.23 and newer keep what was decided beside what was given."""
    decided = getattr(args, "resolved_dict", None)
    return getattr(args, name, None) if decided is None else decided().get(name)


def has_draft(args: Any) -> bool:
    """Whether a server with these arguments has a draft model, or draft layers."""
    return _decided(args, "speculative_algorithm") not in _NO_DRAFT_MODEL


def draft_is_apart(args: Any) -> bool:
    """Whether the draft model has a checkpoint of its own, so that a version of the model holds nothing for it."""
    draft, model = _decided(args, "speculative_draft_model_path"), _decided(args, "model_path")
    return has_draft(args) and draft not in {None, "", model}


def is_draft(updater: Any) -> bool:
    """Whether SGLang's object that has the wrapped function is the one of the draft model."""
    return bool(getattr(runner_of(updater), "is_draft_worker", False))


def loaded_once(model: Any, config: Any) -> str | None:
    """Why no weights can be loaded into a model again; None where they can, as far as can be seen.

    `config` is SGLang's of the model. What a method computes beside the weights (scales, say) never had a loader.
    """
    method = getattr(config, "quantization", None)
    if method is None:
        return None
    for name, module in model.named_modules():
        if getattr(module, "quant_method", None) is None:
            continue
        for own, parameter in module.named_parameters(recurse=False):
            if own.endswith("weight_scale_inv") and parameter.dtype is torch.int32:
                return (
                    f"{name}.{own} holds scales that SGLang has rounded and packed for DeepGEMM, and into that no "
                    "weights can be loaded. Start it with SGLANG_ENABLE_JIT_DEEPGEMM=0"
                )
            if own.endswith("weight") and getattr(parameter, "weight_loader", None) is None:
                return (
                    f"{name}.{own} is not what SGLang's loader left there: quantisation {method} has put another in "
                    "its place, and into that no weights can be loaded. Serve the model without it"
                )
    return None


@contextmanager
def feeding(loader: type, feed: TensorFeed) -> Iterator[None]:
    """Have the iterator of SGLang's loader yield a feed's tensors while the context lasts, in this thread."""
    original, mine = getattr(loader, _ITERATOR), threading.get_ident()

    def iterator(self: Any, *args: Any, **kwargs: Any) -> Any:
        return feed.tensors() if threading.get_ident() == mine else original(self, *args, **kwargs)

    setattr(loader, _ITERATOR, iterator)
    try:
        yield
    finally:
        setattr(loader, _ITERATOR, original)


def runner_of(updater: Any) -> Any:
    """SGLang's ModelRunner of the object that has the wrapped function. One for each model."""
    found = getattr(updater, "get_model_runner", None)
    return updater if found is None else found()


def sglang_version() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
