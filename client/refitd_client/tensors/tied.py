"""Which names of tied weights are written: pure.

Two names of the same memory (`lm_head.weight` and `model.embed_tokens.weight`) are one tensor. A checkpoint with both
names has one tensor more than the engines' model may have, and is rejected for it; one with too few is rejected, too.
What the model expects decides, as far as anyone says: first the base model's own checkpoint, then the module's
declaration. Where nobody says, every name is written, with its own bytes.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

from refitd_client.tensors.source import TensorSource


def without_second_names(
    sources: Sequence[TensorSource],
    *,
    inventory: Callable[[], frozenset[str] | None],
    second: Sequence[str] = (),
) -> list[TensorSource]:
    """Leave out the names that the model does not expect beside another one for the same memory.

    `inventory` gives the names in the base model's checkpoint, None if there is none; it is asked only where names
    share memory. `second` are regular expressions for names that the module declares to be second names.
    """
    groups = [names for names in _by_memory(sources) if len(names) > 1]
    if not groups:
        return list(sources)
    expected = inventory()
    dropped = {name for names in groups for name in _dropped(names, expected, second)}
    return [source for source in sources if source.entry.name not in dropped]


def _dropped(names: Sequence[str], expected: frozenset[str] | None, second: Sequence[str]) -> Iterable[str]:
    if expected is not None:
        unwanted = [name for name in names if name not in expected]
    else:
        unwanted = [name for name in names if any(re.search(pattern, name) for pattern in second)]
    return unwanted if len(unwanted) < len(names) else ()


def _by_memory(sources: Iterable[TensorSource]) -> Iterable[list[str]]:
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for source in sources:
        if source.memory is not None:
            groups[source.memory].append(source.entry.name)
    return groups.values()
