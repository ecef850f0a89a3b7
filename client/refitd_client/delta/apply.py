"""Applying a delta in place, to arrays in memory: for readers other than refitd's own (docs/delta-format.md).

Nothing is written before all of it is known to fit. Applying is idempotent; if it is stopped in the middle, the tensors
are neither the old version nor the new one until it is applied again, so whoever applies keeps readers away meanwhile.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.header import Entry
from refitd_client.delta.change import Change, Delta, DeltaRefusedError
from refitd_client.fingerprint import Bits, bits_of, fingerprint, to_text, updated, width_of

Targets = Mapping[str, tuple[Entry, NDArray[np.uint8]]]
"""Tensors to be changed: what each is, and its bytes in order of index, which can be written."""


def apply(delta: Delta, targets: Targets, fingerprints: Mapping[str, int] | None = None) -> dict[str, int]:
    """Bring tensors from the delta's base, or a version between it and the result, to the result.

    Args:
        delta: what `parse_delta` gave.
        targets: at least the tensors that it names.
        fingerprints: those that the tensors have now, if they are known: then only what changes is computed. Without
            them each changed tensor is read whole.

    Returns:
        The fingerprints of the tensors that it names, which are those that it promises.

    Raises:
        DeltaRefusedError: it does not fit the targets (then nothing was written), or the result is not the one that
            it promises: the tensors were of another version, and now are of none.
    """
    entries = {name: entry for name, (entry, _) in targets.items()}
    check_fits({name: (change.dtype, change.shape) for name, change in delta.changes.items()}, entries)
    results = {name: _apply(change, targets[name][1], (fingerprints or {}).get(name))
               for name, change in delta.changes.items()}  # fmt: skip
    for name, found in results.items():
        expected = delta.changes[name].result
        if found != expected:
            raise DeltaRefusedError(
                f"tensor {name} has fingerprint {to_text(found)} with the delta to {delta.version}, and should have "
                f"{to_text(expected)}: it was neither that of {delta.base} nor of a version since; load a full version"
            )
    return results


def check_fits(changed: Mapping[str, tuple[str, tuple[int, ...]]], entries: Mapping[str, Entry]) -> None:
    """See that a model has the tensors that a delta changes, with their dtypes and shapes.

    Raises:
        DeltaRefusedError: it has not.
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


def _apply(change: Change, data: NDArray[np.uint8], before: int | None) -> int:
    bits = bits_of(data, width_of(change.dtype))
    after = None if before is None else _after(change, bits, before)
    bits[change.indices] = change.values
    return fingerprint(bits) if after is None else after


def _after(change: Change, bits: Bits, before: int) -> int:
    return updated(before, change.indices, bits[change.indices], change.values)
