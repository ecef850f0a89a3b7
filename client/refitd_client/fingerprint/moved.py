"""Elements changed in host memory, and by how much that moves the fingerprints of their tensors.

The changes of many tensors are computed with together, and in memory that is kept. Each call of numpy waits for
Python's lock at its end, and most tensors have few changes: several threads that computed for each tensor by itself
would mostly wait. To allocate the memory anew each time takes longer than to compute.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.fingerprint.definition import MASK, ROW
from refitd_client.fingerprint.host import Bits, column_keys, keys_of_rows, mix, row_keys

AT_ONCE = 2**18  # changes; they take 11 MiB for 16-bit elements


class Moved:
    """Belongs to one thread."""

    def __init__(self) -> None:
        """Nothing has changed yet."""
        self._by: dict[str, int] = {}
        self._names: list[str] = []
        self._begins: list[int] = []
        self._count = 0
        self._at, self._near = np.empty(AT_ONCE, np.intp), np.empty(AT_ONCE, np.intp)
        self._wide, self._keys = np.empty(AT_ONCE, np.uint64), np.empty(AT_ONCE, np.uint64)
        self._narrow = _narrow(np.dtype(np.uint16))

    def change(self, name: str, bits: Bits, first: int, indices: NDArray[Any], values: Bits) -> None:
        """Give elements of a tensor new values.

        Args:
            name: the tensor's.
            bits: some of its elements, which are written to.
            first: the flat index of the first of them.
            indices: the flat indices of those that change, each named once; at most `AT_ONCE`.
            values: their new bits.
        """
        if self._narrow.dtype != bits.dtype:
            self._settle()
            self._narrow = _narrow(bits.dtype)
        elif self._count + len(indices) > AT_ONCE:
            self._settle()
        here = slice(self._count, self._count + len(indices))
        old, new = self._narrow[0, :, here]
        self._at[here] = indices
        near = np.subtract(self._at[here], first, out=self._near[: len(indices)])
        bits.take(near, out=old, mode="wrap")  # all are in range: the other modes make a copy
        new[:] = values
        bits[near] = new
        self._names.append(name)
        self._begins.append(self._count)
        self._count = here.stop

    def take_all(self) -> dict[str, int]:
        """What is to be added to the fingerprint of each tensor, by name, since this was asked for last."""
        self._settle()
        by, self._by = self._by, {}
        return by

    def _settle(self) -> None:
        if not self._count:
            return
        old, new = mix(*self._narrow[:, :, : self._count])
        at, wide, keys = self._at[: self._count], self._wide[: self._count], self._keys[: self._count]
        wide[:] = new
        wide -= old
        rows = np.floor_divide(at, ROW, out=self._near[: self._count])
        wide *= _keys_of(rows, keys)
        at -= np.multiply(rows, ROW, out=rows)
        wide *= column_keys().take(at, out=keys, mode="wrap")
        for name, total in zip(self._names, np.add.reduceat(wide, self._begins).tolist(), strict=True):
            self._by[name] = (self._by.get(name, 0) + total) & MASK
        self._names, self._begins, self._count = [], [], 0


def _narrow(dtype: np.dtype[Any]) -> NDArray[Any]:
    """Memory for the elements before and after, for what `mix` makes of both, and for `mix` itself."""
    return np.empty((3, 2, AT_ONCE), dtype)


def _keys_of(rows: NDArray[np.intp], out: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Q, for rows. Where there are fewer rows than changes each one's is computed once."""
    count = int(rows.max()) + 1
    if count > len(rows):
        return keys_of_rows(rows.view(np.uint64))
    return row_keys(0, count).take(rows, out=out, mode="wrap")
