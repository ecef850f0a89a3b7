"""What each release of SGLang looks like, as far as the plugin touches it.

    0.5.11 to 0.5.15    `ModelRunner.update_weights_from_disk`
    0.5.16 and later    `WeightUpdater.update_weights_from_disk`, which knows its runner

A layout is taken only where all of it is there: the function with the parameters that are known, and a loader whose
iterator it uses. Anything else is a release that nobody has looked at, and the plugin stands aside.
"""

import importlib
import importlib.metadata
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FUNCTION = "update_weights_from_disk"
_COMPONENT = "sglang.srt.model_executor.model_runner_components.weight_updater"
_RUNNER = "sglang.srt.model_executor.model_runner"
_TARGETS = ((_COMPONENT, "WeightUpdater"), (_RUNNER, "ModelRunner"))
_LOADER = ("sglang.srt.model_loader.loader", "DefaultModelLoader")
_NEEDED = ("self", "model_path", "load_format")
_KNOWN = {*_NEEDED, "weight_name_filter", "recapture_cuda_graph"}
_CALLED = ("_get_weights_iterator", "load_weights_and_postprocess")
_NO_DRAFT = {None, "", "NGRAM"}  # speculation without a model of its own


@dataclass(frozen=True, slots=True)
class Layout:
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
        """The arguments of a call by name. Raises TypeError where they do not fit."""
        bound = self.signature.bind(updater, *args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)


@dataclass(frozen=True, slots=True)
class Aside:
    """Why the plugin does nothing."""

    reason: str


@dataclass(frozen=True, slots=True)
class Runner:
    """One rank's model and what is known of it, whichever object of SGLang has it."""

    updater: Any

    @property
    def itself(self) -> Any:
        """SGLang's ModelRunner."""
        found = getattr(self.updater, "get_model_runner", None)
        return self.updater if found is None else found()

    @property
    def model(self) -> Any:
        """The torch module."""
        return self.itself.model

    @property
    def config(self) -> Any:
        """The model's config, whose `model_path` an update changes before it loads."""
        return self.updater.model_config

    @property
    def args(self) -> Any:
        """The server's arguments."""
        return self.itself.server_args

    @property
    def seed(self) -> int | None:
        """The server's random seed, drawn anew at each start where none is given: its HTTP side tells it too.

        0.5.23 and newer keep what was decided beside what was given.
        """
        decided = getattr(self.args, "resolved_dict", None)
        found = getattr(self.args, "random_seed", None) if decided is None else decided().get("random_seed")
        return found if isinstance(found, int) else None

    @property
    def rank(self) -> int:
        """Which of the tensor-parallel ranks it is."""
        return int(self.updater.tp_rank)

    @property
    def size(self) -> int:
        """How many tensor-parallel ranks there are."""
        return int(getattr(self.args, "tp_size", 1) or 1)

    @property
    def may_release(self) -> bool:
        """Whether the weights' memory may be taken away between updates (`--enable-memory-saver`)."""
        return bool(getattr(self.args, "enable_memory_saver", False))

    def aside(self) -> str | None:
        """Why an update of this engine is left to stock SGLang; None where the plugin does it."""
        if (getattr(self.args, "pp_size", 1) or 1) > 1:
            return "pipeline parallelism: SGLang updates one stage after the other, and no stage can wait for the next"
        algorithm = getattr(self.args, "speculative_algorithm", None)
        if algorithm not in _NO_DRAFT or getattr(self.itself, "is_draft_worker", False):
            return f"speculative decoding ({algorithm}): target and draft model are updated one after the other"
        return None


def sglang_version() -> str:
    """The installed release."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def find_layout() -> Layout | Aside:
    """Look at the installed SGLang."""
    try:
        loader = getattr(importlib.import_module(_LOADER[0]), _LOADER[1])
        if missing := [name for name in _CALLED if not callable(getattr(loader, name, None))]:
            return Aside(f"{_LOADER[1]} has no {missing[0]}")
        return _find(loader)
    except (ImportError, AttributeError) as error:
        return Aside(f"{error}")


def _find(loader: type) -> Layout | Aside:
    for module, name in _TARGETS:
        try:
            owner = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        if FUNCTION in vars(owner):
            return layout_of(module, owner, loader)
    return Aside(f"neither {_TARGETS[0][1]} nor {_TARGETS[1][1]} has a function {FUNCTION}")


def layout_of(module: str, owner: type, loader: type) -> Layout | Aside:
    """Hold a class against what is known."""
    function = vars(owner)[FUNCTION]
    try:
        signature, text = inspect.signature(function), inspect.getsource(function)
    except (OSError, TypeError, ValueError) as error:
        return Aside(f"{FUNCTION} cannot be looked at: {error}")
    names = set(signature.parameters)
    if not names.issuperset(_NEEDED) or names - _KNOWN:
        return Aside(f"{FUNCTION} takes other arguments than any release that is known: {', '.join(sorted(names))}")
    if absent := [name for name in _CALLED if name not in text]:
        return Aside(f"{FUNCTION} does not call {absent[0]}")
    return Layout(module, owner, loader, signature)
