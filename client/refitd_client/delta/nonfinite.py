"""New values of a delta that are NaN or infinite."""

from collections.abc import Mapping
from functools import partial
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.finite import any_nonfinite, count_nonfinite
from refitd_client.delta.adjacent import together
from refitd_client.delta.change import Change
from refitd_client.lanes import in_lanes, lanes_for

_AT_A_TIME = 2**20  # values


def nonfinite_in(changes: Mapping[str, Change]) -> dict[str, int]:
    """How many there are, by the names of the tensors that get any.

    Nearly every delta has none: its values are looked at together, where they lie together as in its file, and not in
    some hundred steps.
    """
    kinds: dict[str, list[NDArray[Any]]] = {}
    for change in changes.values():
        kinds.setdefault(change.dtype, []).append(change.values)
    if all((values := together(arrays)) is not None and not _any(dtype, values) for dtype, arrays in kinds.items()):
        return {}
    counted = {name: count_nonfinite(each.dtype, _bytes(each.values)) for name, each in changes.items()}
    return {name: count for name, count in counted.items() if count}


def _any(dtype: str, values: NDArray[Any]) -> bool:
    """On as many cores as that is worth."""
    begins = range(0, len(values), _AT_A_TIME)
    found = [False] * len(begins)

    def look(number: int, _: Event) -> None:
        found[number] = any_nonfinite(dtype, _bytes(values[begins[number] : begins[number] + _AT_A_TIME]))

    in_lanes([partial(look, number) for number in range(len(begins))], lanes=lanes_for(len(begins)))
    return any(found)


def _bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8)
