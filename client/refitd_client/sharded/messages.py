"""A message between ranks as bytes. Large arrays go beside it, as they lie in memory: pickling would copy them."""

import pickle
from collections.abc import Sequence
from typing import Any

_LARGE = 2**16  # bytes of an array from which on a part of its own costs less than a copy


def parts_of(message: Any) -> list[Any]:
    """The message, and after it the bytes of its large arrays, as buffers that can be written to."""
    beside: list[Any] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LARGE:
            return True
        beside.append(bytearray(raw) if raw.readonly else raw)  # torch warns of what cannot be written to
        return False

    return [bytearray(pickle.dumps(message, protocol=5, buffer_callback=stays)), *beside]


def message_of(parts: Sequence[Any]) -> Any:
    """The message of its parts, whose memory its arrays use."""
    message, *beside = parts
    return pickle.loads(message, buffers=beside)  # noqa: S301 from a rank of the same job, as torch's own collectives do
