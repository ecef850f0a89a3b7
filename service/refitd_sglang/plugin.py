"""SGLang's entry point (`sglang.srt.plugins`, SGLang 0.5.12 and later): `refitd = refitd_sglang.plugin:register`.

One function is wrapped, `update_weights_from_disk` of whatever object has it, and the end of `ModelRunner.__init__` is
waited for, to open the channel before the first update. A folder that no service has sealed, an update that names
some tensors only, and engines that the plugin does not handle go straight through to SGLang's own function.

SGLang updates the model, and then a draft model from the same folder. A draft model that has a checkpoint of its own is
left as it was started: for it the answer to the model's update is given once more.

Releases of SGLang differ, as far as the plugin touches them:

    0.5.12 to 0.5.15    `ModelRunner.update_weights_from_disk`
    0.5.16 and later    `WeightUpdater.update_weights_from_disk`, which knows its runner

A layout is taken only where all of it is there: the function with the parameters that are known, and a loader whose
iterator it uses. Anything else is an unknown release, and the plugin stands aside.
"""

import inspect
import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

from refitd_client.contract.plugin import UpdateOutcome
from refitd_plugin.settings import PluginSettings, read_settings

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


def find_layout() -> SglangLayout | str:
    """The layout of the SGLang that is installed, or why it is none that is known."""
    try:
        loader = getattr(import_module(_LOADER[0]), _LOADER[1])
    except (ImportError, AttributeError) as error:
        return f"{error}"
    if missing := [name for name in _CALLED if not callable(getattr(loader, name, None))]:
        return f"{_LOADER[1]} has no {missing[0]}"
    for module, name in _TARGETS:
        with suppress(ImportError, AttributeError):
            owner = getattr(import_module(module), name)
            if FUNCTION in vars(owner):
                return layout_of(module, owner, loader)
    return f"neither {_TARGETS[0][1]} nor {_TARGETS[1][1]} has a function {FUNCTION}"


def layout_of(module: str, owner: type, loader: type) -> SglangLayout | str:
    """Hold the class in a module whose function is to be wrapped against the releases that are known."""
    function = vars(owner)[FUNCTION]
    try:
        signature, text = inspect.signature(function), inspect.getsource(function)
    except (OSError, TypeError, ValueError) as error:
        return f"{FUNCTION} cannot be looked at: {error}"
    names = set(signature.parameters)
    if not names.issuperset(_NEEDED_ARGUMENTS) or names - _KNOWN:
        return f"{FUNCTION} takes other arguments than any release that is known: {', '.join(sorted(names))}"
    if absent := [name for name in _CALLED if name not in text]:
        return f"{FUNCTION} does not call {absent[0]}"
    return SglangLayout(module, owner, loader, signature)


logger = logging.getLogger("refitd_sglang")
_SGLANG_SETTINGS = "REFITD_SGLANG"  # and what begins with it
_SCHEDULER = "sglang.srt.managers.scheduler"  # the processes that hold weights have it
_RUNNER_INIT = "sglang.srt.model_executor.model_runner.ModelRunner.__init__"


def register() -> None:
    """Wrap SGLang's function, or say once why not. Never raises."""
    try:
        settings = read_settings(_SGLANG_SETTINGS)
        if settings.on and _SCHEDULER in sys.modules:
            _register(settings)
    except Exception:
        logger.warning("refitd stands aside: it could not be set up", exc_info=True)


def _register(settings: PluginSettings) -> None:
    hooks: Any = import_module("sglang.srt.plugins.hook_registry")
    from refitd_sglang.process import sglang_version

    layout = find_layout()
    if isinstance(layout, str):
        logger.warning("refitd stands aside: SGLang %s is not one that it knows: %s", sglang_version(), layout)
        return
    plugin = Plugin(layout, settings)
    hooks.HookRegistry.register(layout.target, plugin.update, hooks.HookType.AROUND)
    hooks.HookRegistry.register(_RUNNER_INIT, plugin.started, hooks.HookType.AFTER)


class Plugin:
    """The two hooks, and the ranks of this process (one, but for tests)."""

    def __init__(self, layout: Any, settings: PluginSettings) -> None:
        self._layout = layout
        self._settings = settings
        self._ranks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._draft_is_apart: bool | None = None  # as started: SGLang before 0.5.18 changes the arguments in an update
        self._answered: tuple[bool, str] = (True, "Succeeded to update model weights.")  # by the model's last update
        self._told: set[str] = set()

    def started(self, _: None, runner: Any, *args: Any, **kwargs: Any) -> None:
        """After `ModelRunner.__init__`. Never raises."""
        from refitd_sglang.process import is_draft

        try:
            updater = getattr(runner, "weight_updater", runner)
            if not self._is_left(updater) and not is_draft(updater):
                self.rank_of(updater)
        except Exception:
            logger.warning("refitd could not look at the model", exc_info=True)

    def update(self, stock: Any, updater: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Around `update_weights_from_disk`. Raises only what stock SGLang raises where the plugin is inert."""
        from refitd_sglang.process import is_draft

        rank = call = None
        try:
            if self._is_left(updater):
                return self._answered
            if not is_draft(updater):
                rank, call = self.rank_of(updater), self._call(stock, updater, args, kwargs)
        except Exception:
            self._warn("refitd stands aside: a call could not be understood", exc_info=True)
            rank = call = None
        engine = None if rank is None else rank.engine
        if engine is not None and call is None:
            engine.lost_track()
        if rank is None or engine is None or call is None:
            self._answered = stock(updater, *args, **kwargs)
        else:
            answer = rank.update(engine, call)  # SGLang writes what failed into its log
            self._answered = answer.outcome is UpdateOutcome.SERVED, answer.message
        return self._answered

    def _is_left(self, updater: Any) -> bool:
        """Whether this is a draft model's with a checkpoint of its own, which is left as it was started."""
        from refitd_sglang.process import draft_is_apart, is_draft, runner_of

        if not is_draft(updater):
            return False
        if self._draft_is_apart is None:
            self._draft_is_apart = draft_is_apart(runner_of(updater).server_args)
        return self._draft_is_apart

    def rank_of(self, updater: Any) -> Any:
        """The `RankPlugin` of SGLang's object that has the wrapped function, made when it is first seen."""
        from refitd_plugin.rank_plugin import RankPlugin
        from refitd_sglang.process import SglangProcess, runner_of

        key = runner_of(updater)
        if key not in self._ranks:
            self._ranks[key] = rank = RankPlugin(SglangProcess(updater, self._layout.loader), self._settings)
            if rank.aside is not None:
                self._warn(f"refitd stands aside, updates are SGLang's own: {rank.aside}")
        return self._ranks[key]

    def _call(self, stock: Any, updater: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as the plugin takes it; None where the update is SGLang's own."""
        from refitd_plugin.memory.offered import is_ours
        from refitd_plugin.port import UpdateCall

        said = self._layout.arguments(updater, args, kwargs)
        path = said["model_path"]
        if said.get("weight_name_filter") is not None or not is_ours(path, self._settings.root):
            return None
        recapture = bool(said.get("recapture_cuda_graph"))
        extra = {"recapture_cuda_graph": recapture} if "recapture_cuda_graph" in said else {}

        def again(path: str, load_format: str) -> tuple[bool, str]:
            return stock(updater, path, load_format, **extra)

        return UpdateCall(path, said["load_format"], again, observable=not recapture)

    def _warn(self, text: str, *, exc_info: bool = False) -> None:
        """Warn once of each thing: an engine is updated every few seconds."""
        if text not in self._told:
            self._told.add(text)
            logger.warning(text, exc_info=exc_info)
