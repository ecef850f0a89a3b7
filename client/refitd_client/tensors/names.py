"""From a trainer's names of tensors to those that engines know, and which names of tied weights are written. Pure.

Wrappers leave their mark in names: `_fsdp_wrapped_module.` (FSDP), `_checkpoint_wrapped_module.` (activation
checkpointing), `_orig_mod.` (torch.compile), wherever they stand, and a `module.` before every name (DDP). No model of
a hub has such names, so the marks are removed, and the caller's own `rename` gets the model's name. A `module.` before
some of the names only is the model's own.

Two names of the same memory (`lm_head.weight` and `model.embed_tokens.weight`) are one tensor. A checkpoint with both
names has one tensor more than the engines' model may have, and is rejected for it; one with too few is rejected, too.
The base model's own checkpoint decides what the model expects, without one the module's declaration. Without either,
every name is written, with its own bytes.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from refitd_client.errors import InvalidWeightsError
from refitd_client.tensors.source import TensorSource

Rename = Mapping[str, str | None] | Callable[[str], str | None]

_MARKS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_DDP = "module."


def published_names(names: Collection[str], rename: Rename | None = None) -> dict[str, str]:
    """The published name of each tensor, by the trainer's. Names that are renamed to None are left out.

    A mapping leaves the names that it does not hold as they are.

    Raises:
        InvalidWeightsError: two tensors would have one name, or a name is no text.
    """
    published: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name, plain in plain_names(names).items():
        new: Any = plain
        if rename is not None:
            new = rename(plain) if callable(rename) else rename.get(plain, plain)
        if new is None:
            continue
        if not (isinstance(new, str) and new):
            raise InvalidWeightsError(f"rename makes {new!r} of tensor {plain}: give a name, or None to leave it out")
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


def without_second_names(
    sources: Sequence[TensorSource],
    *,
    inventory: Callable[[], frozenset[str] | None],
    second: Sequence[str] = (),
) -> list[TensorSource]:
    """Leave out the names that the model does not expect beside another name for the same memory.

    Args:
        sources: all tensors.
        inventory: returns the names in the base model's checkpoint, None if there is none. It is called only where
            names share memory.
        second: regular expressions for names that the module declares to be second names.
    """
    by_memory: dict[Hashable, list[str]] = defaultdict(list)
    for source in sources:
        if source.memory is not None:
            by_memory[source.memory].append(source.entry.name)
    groups = [names for names in by_memory.values() if len(names) > 1]
    if not groups:
        return list(sources)
    expected = inventory()
    dropped: set[str] = set()
    for names in groups:
        if expected is not None:
            unwanted = [name for name in names if name not in expected]
        else:
            unwanted = [name for name in names if any(re.search(pattern, name) for pattern in second)]
        if len(unwanted) < len(names):
            dropped.update(unwanted)
    return [source for source in sources if source.entry.name not in dropped]
