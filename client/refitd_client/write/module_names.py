"""A module's tensors by the names of its checkpoint, which are not always the module's own.

transformers 5 renames tensors as it loads many models (LLaVA, Qwen2.5-VL, Gemma 3), and fuses experts into one tensor;
`save_pretrained` reverts that. What a trainer publishes is reverted in the same way, by the same function: a rename
copies nothing, and where tensors have to be converted, the converted ones are new. transformers is not imported: a
caller with one of its models has imported it.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from refitd_client.errors import InvalidWeightsError
from refitd_client.write.plan import Rename, plain_names

_SAVED = "publish the folder that its save_pretrained writes"


class ModuleState(dict[str, Any]):
    """A module's state dict as a trainer has gathered it, where the module itself may hold parts alone."""

    def __init__(self, module: Any, tensors: Mapping[str, Any]) -> None:
        super().__init__(tensors)
        self.module = module


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is reverted of tensors with these names, shapes and dtypes. `renamed` is None if some are converted."""

    facts: list[tuple[Any, ...]]
    found: frozenset[str]
    renamed: dict[str, str] | None


_plans: WeakKeyDictionary[Any, _Plan] = WeakKeyDictionary()  # by models: making one takes longer than a small step


def checkpoint_names(
    module: Any, state: Mapping[str, Any], expected: Callable[[], frozenset[str] | None] = lambda: None
) -> dict[str, str] | None:
    """The checkpoint's names by the module's plain ones; None if tensors have to be converted as well (`convert`).

    Args:
        module: an `nn.Module`.
        state: its state dict.
        expected: returns the names in the base model's checkpoint, None if there is none: a module that has them
            already keeps them.

    Raises:
        InvalidWeightsError: transformers cannot say what the checkpoint has.
    """
    model = _pretrained(module)
    if model is None:
        return {}
    plain = plain_names(state)
    facts = [(plain[name], value.shape, value.dtype) for name, value in state.items()]
    if (plan := _plans.get(model)) is None or plan.facts != facts:
        plan = _plans[model] = _plan(model, facts)
    own = frozenset(plain.values())
    base = expected() if plan.found != own else None
    if base is not None and len(base & own) >= len(base & plan.found):
        return {}
    return plan.renamed


def convert(module: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """The module's tensors as its checkpoint has them.

    Raises:
        InvalidWeightsError: transformers cannot convert them.
    """
    plain = plain_names(state)
    return _reverted(_pretrained(module), {plain[name]: value for name, value in state.items()})


def _plan(model: Any, facts: list[tuple[Any, ...]]) -> _Plan:
    torch = sys.modules["torch"]
    empty: dict[str, Any] = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in facts}
    found = _reverted(model, dict(empty))
    old = {id(value): name for name, value in empty.items()}
    is_renamed = len(found) == len(empty) and all(id(value) in old for value in found.values())
    renamed = {old[id(value)]: name for name, value in found.items()} if is_renamed else None
    return _Plan(facts, frozenset(found), renamed)


def after(names: Mapping[str, str], rename: Rename | None) -> Rename | None:
    """The caller's `rename` of the checkpoint's names, for a module's."""
    if not names:
        return rename

    def both(plain: str) -> str | None:
        name = names.get(plain, plain)
        if rename is None:
            return name
        return rename(name) if callable(rename) else rename.get(name, name)

    return both


def _pretrained(module: Any) -> Any:
    """The transformers model that a module is or wraps; None if it is none, or one of a release before 5."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if modeling is None or "transformers.core_model_loading" not in sys.modules:
        return None
    while module is not None and not isinstance(module, modeling.PreTrainedModel):
        module = getattr(module, "_orig_mod", None) or getattr(module, "module", None)
    return module


def _reverted(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    core: Any = sys.modules["transformers.core_model_loading"]
    try:
        return core.revert_weight_conversion(model, state)
    except Exception as error:
        kind = type(model).__name__
        why = f"{type(error).__name__}: {error}"[:100]
        raise InvalidWeightsError(
            f"{kind} has other tensors than its checkpoint, and transformers cannot convert them back ({why}): {_SAVED}"
        ) from error
