"""Decoding into a type of ours: dataclasses and structs.

msgspec makes what it knows of such a type when something is first decoded into it. Another thread that decodes into the
type meanwhile reads what is half made, and the process ends with a segmentation fault (msgspec 0.22, about one start of
eight in twelve threads). So a type is made known under a lock, and only then is anything decoded into it.
"""

import os
import threading
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_making = threading.Lock()


def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of JSON into a type, which is known to msgspec from then on: other ways to decode into it are safe.

    Args:
        kind: the type, or a union of types.
    """
    found = _decoders.get(kind)
    if found is None:
        with _making:
            found = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return found


def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder of MessagePack into a type. Keep it: it is made anew each time.

    Args:
        kind: the type, or a union of types.
    """
    with _making:
        return msgspec.msgpack.Decoder(kind)


def from_json(data: bytes | str, kind: type[_T]) -> _T:
    """Decode JSON.

    Args:
        data: the text, as bytes in UTF-8 or as a string.
        kind: what it is to be.

    Raises:
        msgspec.MsgspecError: it is no JSON, or of another form.
        UnicodeDecodeError: a string in it is not UTF-8.
    """
    return json_decoder(kind).decode(data)


def converted(data: Any, kind: type[_T]) -> _T:
    """Check plain data (dictionaries, lists, texts, numbers), and make an object of it.

    Args:
        data: the data.
        kind: what it is to be.

    Raises:
        msgspec.ValidationError: it is of another form.
    """
    json_decoder(kind)
    return msgspec.convert(data, kind)


def _after_fork() -> None:
    """Another thread may have held the lock when this process was forked, and does not exist in it."""
    global _making  # noqa: PLW0603 - the lock of a process
    _making = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
