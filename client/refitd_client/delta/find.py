"""Which elements changed, on the CPU: bits are compared, so that -0.0 is not 0.0, and NaN equals itself."""

import numpy as np

from refitd_client.delta.change import Indices, index_type
from refitd_client.fingerprint import Bits

_CHUNK = 2**18  # elements: what is compared is still in the processor's cache when it is looked through


def changed(old: Bits, new: Bits) -> Indices:
    """The flat indices, in order, at which two tensors' bits differ. Either may be a mapped file."""
    if old.dtype != new.dtype or old.shape != new.shape:
        raise ValueError(f"{old.dtype} of shape {old.shape} cannot be compared with {new.dtype} of shape {new.shape}")
    kind = index_type(len(new))
    found = [
        (np.flatnonzero(old[begin : begin + _CHUNK] != new[begin : begin + _CHUNK]) + begin).astype(kind)
        for begin in range(0, len(new), _CHUNK)
    ]
    return np.concatenate(found) if found else np.empty(0, kind)
