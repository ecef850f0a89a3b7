"""Applying a delta in place to arrays in memory, for readers other than refitd's own (docs/delta-format.md).

Nothing is written before all of the delta is known to fit. Applying is idempotent. If it is stopped in the middle, the
tensors are neither the old version nor the new one until it is applied again: keep readers away meanwhile.
"""

from collections.abc import Mapping
from functools import partial
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.finite import any_nonfinite, count_nonfinite
from refitd_client.checkpoint.header import Entry
from refitd_client.delta.change import Change, Delta, DeltaRefusedError, together
from refitd_client.fingerprint import bits_of, fingerprint, to_text, updated, width_of
from refitd_client.lanes import in_lanes, lanes_for

_AT_A_TIME = 2**20  # values that one thread checks at a time

Targets = Mapping[str, tuple[Entry, NDArray[np.uint8]]]
"""Tensors to change: the header entry of each, and its bytes in row-major order, writable."""


def apply(delta: Delta, targets: Targets, fingerprints: Mapping[str, int] | None = None) -> dict[str, int]:
    """Bring tensors from the delta's base, or a version between it and the result, to the result.

    Args:
        delta: what `parse_delta` returned.
        targets: at least the tensors that the delta names.
        fingerprints: the tensors' present fingerprints, if they are known: then only the changed elements are read.
            Without them each changed tensor is read whole.

    Returns:
        The fingerprints of the changed tensors, which are those that the delta promises.

    Raises:
        DeltaRefusedError: it does not fit the targets (then nothing was written), or the result is not the promised
            one: the tensors were of another version, and now are of none.
    """
    entries = {name: entry for name, (entry, _) in targets.items()}
    check_fits({name: (change.dtype, change.shape) for name, change in delta.changes.items()}, entries)
    results: dict[str, int] = {}
    for name, change in delta.changes.items():
        bits = bits_of(targets[name][1], width_of(change.dtype))
        before = (fingerprints or {}).get(name)
        after = None if before is None else updated(before, change.indices, bits[change.indices], change.values)
        bits[change.indices] = change.values
        results[name] = fingerprint(bits) if after is None else after
    for name, found in results.items():
        expected = delta.changes[name].result
        if found != expected:
            raise DeltaRefusedError(
                f"tensor {name} has fingerprint {to_text(found)} with the delta to {delta.version}, and should have "
                f"{to_text(expected)}: it was neither that of {delta.base} nor of a version since; load a full version"
            )
    return results


def check_fits(changed: Mapping[str, tuple[str, tuple[int, ...]]], entries: Mapping[str, Entry]) -> None:
    """Check that a model has the tensors that a delta changes, with their dtypes and shapes.

    Raises:
        DeltaRefusedError: it does not.
    """
    for name, (dtype, shape) in changed.items():
        entry = entries.get(name)
        if entry is None:
            raise DeltaRefusedError(f"the delta changes tensor {name}, which is not there")
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise DeltaRefusedError(
                f"the delta changes tensor {name} as {dtype} of shape {list(shape)}, and it is "
                f"{entry.dtype} of shape {list(entry.shape)}"
            )


def nonfinite_in(changes: Mapping[str, Change]) -> dict[str, int]:
    """How many new values are NaN or infinite, by tensor; tensors without any are left out.

    Nearly every delta has none. So values that lie together in memory, as in a file, are first checked together, and
    not in some hundred steps.
    """
    by_dtype: dict[str, list[NDArray[Any]]] = {}
    for change in changes.values():
        by_dtype.setdefault(change.dtype, []).append(change.values)
    joined = {dtype: together(arrays) for dtype, arrays in by_dtype.items()}
    if all(values is not None and not _has_nonfinite(dtype, values) for dtype, values in joined.items()):
        return {}
    counted = {name: count_nonfinite(each.dtype, _bytes(each.values)) for name, each in changes.items()}
    return {name: count for name, count in counted.items() if count}


def _has_nonfinite(dtype: str, values: NDArray[Any]) -> bool:
    """Whether any value is NaN or infinite, checked on as many cores as that is worth."""
    begins = range(0, len(values), _AT_A_TIME)
    found = [False] * len(begins)

    def check(number: int, _: Event) -> None:
        found[number] = any_nonfinite(dtype, _bytes(values[begins[number] : begins[number] + _AT_A_TIME]))

    in_lanes([partial(check, number) for number in range(len(begins))], lanes=lanes_for(len(begins)))
    return any(found)


def _bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8)
