"""The `gap` encoding of strictly increasing indices: 2 bytes an index instead of 4 or 8. Pure.

A token is an unsigned 16-bit number. Below 65535 it is the number of elements between the previous index (at first: -1)
and this one. 65535 skips that many elements, and the next token continues the distance.

    indices 0, 1, 5, 70000      gaps 0, 0, 3, 69994      tokens 0, 0, 3, 65535, 4459
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from refitd_client.delta.change import DeltaRefusedError, Indices

ESCAPE = 65535
_CHUNK = 2**20  # tokens; sums take 8 bytes each


def encode(indices: Indices) -> NDArray[np.uint16]:
    """Tokens for indices in strict order."""
    near = indices.copy()
    near[1:] -= indices[:-1]
    near[1:] -= 1
    if len(near) == 0 or int(near.max()) < ESCAPE:  # nearly always: a third of the time, in less memory
        return near.astype(np.uint16)
    gaps = np.diff(indices.astype(np.int64), prepend=-1) - 1
    escapes = gaps // ESCAPE
    if not escapes.any():
        return gaps.astype(np.uint16)
    tokens = np.full(len(gaps) + int(escapes.sum()), ESCAPE, np.uint16)
    tokens[np.arange(len(gaps)) + np.cumsum(escapes)] = (gaps % ESCAPE).astype(np.uint16)
    return tokens


def decode(tokens: NDArray[np.uint16], count: int, elements: int, kind: type[np.uint32] | type[np.uint64]) -> Indices:
    """The indices that tokens stand for. They are in strict order whatever the tokens are.

    Args:
        tokens: all tokens of a tensor.
        count: how many indices there have to be.
        elements: how many elements the tensor has.
        kind: the type of the result.

    Raises:
        DeltaRefusedError: there are more or fewer, the last lies outside the tensor, or it ends with a skip.
    """
    if len(tokens) == 0 or tokens[-1] == ESCAPE:
        raise DeltaRefusedError("ends with a skip that leads to no index")
    if int(np.count_nonzero(tokens != ESCAPE)) != count:
        raise DeltaRefusedError(f"has tokens for another number of indices than {count}")
    indices, filled = np.empty(count, kind), 0
    for found in decoded((tokens[begin : begin + _CHUNK] for begin in range(0, len(tokens), _CHUNK)), elements):
        indices[filled : filled + len(found)] = found
        filled += len(found)
    return indices


def decoded(parts: Iterable[NDArray[np.uint16]], elements: int) -> Iterator[NDArray[np.int64]]:
    """The indices that tokens stand for, part by part; `parts` are all tokens of a tensor with so many elements.

    Raises:
        DeltaRefusedError: an index lies outside the tensor.
    """
    reached = -1
    for part in parts:
        is_index = part != ESCAPE
        places = reached + np.cumsum(part.astype(np.int64) + is_index)
        reached = int(places[-1])
        if reached >= elements:
            raise DeltaRefusedError(f"has index {reached} or above, of {elements} elements")
        yield places[is_index]
