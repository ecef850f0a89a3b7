"""What each release of SGLang looks like, as far as the plugin touches it.

    0.5.11 to 0.5.15    `ModelRunner.update_weights_from_disk`
    0.5.16 and later    `WeightUpdater.update_weights_from_disk`, which knows its runner

A layout is taken only where all of it is there: the function with the parameters that are known, and a loader whose
iterator it uses. Anything else is an unknown release, and the plugin stands aside.
"""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FUNCTION = "update_weights_from_disk"
_COMPONENT = "sglang.srt.model_executor.model_runner_components.weight_updater"
_RUNNER = "sglang.srt.model_executor.model_runner"
_TARGETS = ((_COMPONENT, "WeightUpdater"), (_RUNNER, "ModelRunner"))
_LOADER = ("sglang.srt.model_loader.loader", "DefaultModelLoader")
_NEEDED_ARGUMENTS = ("self", "model_path", "load_format")
_KNOWN = {*_NEEDED_ARGUMENTS, "weight_name_filter", "recapture_cuda_graph"}
_CALLED = ("_get_weights_iterator", "load_weights_and_postprocess")


@dataclass(frozen=True, slots=True)
class SglangLayout:
    """A release that is known. `owner` is the class whose function is wrapped, `loader` the class that reads files."""

    module: str
    owner: type
    loader: type
    signature: inspect.Signature

    @property
    def target(self) -> str:
        """The function to wrap, as SGLang's registry names it."""
        return f"{self.module}.{self.owner.__name__}.{FUNCTION}"

    def arguments(self, updater: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call of `updater`'s function, by name. Raises TypeError where they do not fit."""
        bound = self.signature.bind(updater, *args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)


@dataclass(frozen=True, slots=True)
class Aside:
    """Why the plugin does nothing."""

    reason: str


def find_layout() -> SglangLayout | Aside:
    """Look at the installed SGLang."""
    try:
        loader = getattr(importlib.import_module(_LOADER[0]), _LOADER[1])
        if missing := [name for name in _CALLED if not callable(getattr(loader, name, None))]:
            return Aside(f"{_LOADER[1]} has no {missing[0]}")
    except (ImportError, AttributeError) as error:
        return Aside(f"{error}")
    for module, name in _TARGETS:
        try:
            owner = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        if FUNCTION in vars(owner):
            return layout_of(module, owner, loader)
    return Aside(f"neither {_TARGETS[0][1]} nor {_TARGETS[1][1]} has a function {FUNCTION}")


def layout_of(module: str, owner: type, loader: type) -> SglangLayout | Aside:
    """Hold a class against the releases that are known.

    Args:
        module: the module that has it.
        owner: the class whose function is wrapped.
        loader: SGLang's class that reads files.
    """
    function = vars(owner)[FUNCTION]
    try:
        signature, text = inspect.signature(function), inspect.getsource(function)
    except (OSError, TypeError, ValueError) as error:
        return Aside(f"{FUNCTION} cannot be looked at: {error}")
    names = set(signature.parameters)
    if not names.issuperset(_NEEDED_ARGUMENTS) or names - _KNOWN:
        return Aside(f"{FUNCTION} takes other arguments than any release that is known: {', '.join(sorted(names))}")
    if absent := [name for name in _CALLED if name not in text]:
        return Aside(f"{FUNCTION} does not call {absent[0]}")
    return SglangLayout(module, owner, loader, signature)
