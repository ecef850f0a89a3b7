"""SGLang's passes over a model around a load, shortened where the load is copies and every tensor stays on its GPU.

Before and after a load SGLang calls a hook of each module that has a quantisation method, and around each call it looks
at every tensor of the module, to bring it to the GPU and back (`device_loading_context`). For 28 layers that takes 8 to
11 ms of each pause. Where all tensors are on the GPU there is nothing to bring; the hooks are called all the same.

A third pass asks whether the model keeps values that are computed from its weights and that no load renews. SGLang
decides that when a server starts, so what it said of the same model in an earlier load is its answer.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch

_LOADING_CONTEXT = "device_loading_context"
_QUESTION = "_unsupported_derived_weight_cache_error"
_loadable: WeakSet[torch.nn.Module] = WeakSet()


@contextmanager
def shortened(loader: type, updater: type, model: torch.nn.Module, *, is_copied: bool) -> Iterator[None]:
    """Shorten the passes of this thread's loads while the context lasts, where SGLang has them.

    Args:
        loader: SGLang's class that loads.
        updater: SGLang's class that has the update function.
        model: what is loaded into.
        is_copied: whether the load is copies into the model's tensors and nothing else.
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
