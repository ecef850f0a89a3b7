"""From a trainer's names of tensors to those that engines know. Pure.

Wrappers leave their mark in names: `_fsdp_wrapped_module.` (FSDP), `_checkpoint_wrapped_module.` (activation
checkpointing), `_orig_mod.` (torch.compile), wherever they stand, and a `module.` before every name (DDP). No model of
a hub has such names, so the marks are taken off, and what the caller's own `rename` gets is the model's name. A
`module.` before some of the names only is the model's own.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from refitd_client.errors import InvalidWeightsError

Rename = Mapping[str, str | None] | Callable[[str], str | None]

_MARKS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_DDP = "module."


def published_names(names: Collection[str], rename: Rename | None = None) -> dict[str, str]:
    """The published name of each tensor, by the trainer's. What is renamed to None is left out.

    A mapping leaves the names that it does not hold as they are.

    Raises:
        InvalidWeightsError: two tensors would have one name, or a name is no text.
    """
    published: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name, plain in plain_names(names).items():
        new = _renamed(plain, rename)
        if new is None:
            continue
        if taken.setdefault(new, name) != name:
            raise InvalidWeightsError(f"tensors {taken[new]} and {name} would both be published as {new}", tensor=name)
        published[name] = new
    return published


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Names without the marks of wrappers, by the names with them."""
    plain = {name: without_marks(name) for name in names}
    if plain and all(name.startswith(_DDP) for name in plain.values()):
        return {name: new.removeprefix(_DDP) for name, new in plain.items()}
    return plain


def second_names(names: Mapping[str, str], patterns: Iterable[str]) -> set[str]:
    """The published names of those of the trainer's names that match a pattern; `names` are published by trainer's."""
    regular = [re.compile(without_marks(pattern)) for pattern in patterns]
    return {new for old, new in names.items() if any(each.search(without_marks(old)) for each in regular)}


def without_marks(name: str) -> str:
    """A name, or a pattern for names, without the marks that wrappers leave within."""
    for mark in _MARKS:
        name = name.replace(mark, "")
    return name


def _renamed(name: str, rename: Rename | None) -> str | None:
    if rename is None:
        return name
    new: Any = rename(name) if callable(rename) else rename.get(name, name)
    if new is not None and not (isinstance(new, str) and new):
        raise InvalidWeightsError(f"rename makes {new!r} of tensor {name}: give a name, or None to leave it out")
    return new
