"""Decoding into a type of ours: dataclasses and structs.

msgspec makes what it knows of such a type when something is first decoded into it. Another thread that decodes into the
type meanwhile reads what is half made, and the process ends with a segmentation fault (msgspec 0.22, about one start of
eight in twelve threads). So a type is made known under a lock, and only then is anything decoded into it. A signal
handler that interrupts this, and needs it itself, gets an error: it can neither wait for what it interrupts nor go on.
"""

import json
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")


class TooManyValuesError(msgspec.DecodeError):
    """JSON has more values than it may have."""


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_making = threading.RLock()
_made: list[Any] = []  # the type that is being made known


@contextmanager
def _making_known(kind: Any) -> Generator[None, None, None]:
    with _making:
        if _made:
            raise RuntimeError("a signal handler has interrupted refitd's first use of a message: call refitd outside")
        _made.append(kind)
        try:
            yield
        finally:
            _made.clear()


def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """A decoder of JSON into a type, which msgspec knows from then on: other ways to decode into it are safe."""
    found = _decoders.get(kind)
    if found is None:
        with _making_known(kind):
            found = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return found


def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder of MessagePack into a type. Keep it: it is made anew each time."""
    with _making_known(kind):
        return msgspec.msgpack.Decoder(kind)


def from_json(data: bytes | str, kind: type[_T]) -> _T:
    """Decode JSON.

    Raises:
        msgspec.MsgspecError: it is no JSON, or of another form.
        UnicodeDecodeError: a string in it is not UTF-8.
    """
    return json_decoder(kind).decode(data)


def plain_json(data: bytes, most: int) -> Any:
    """Decode JSON of which no type is known: Python makes up to forty times as much of it, where it is all brackets.

    It may have `most` values: commas and brackets are counted, also those in strings.

    Raises:
        TooManyValuesError: it has more.
        msgspec.MsgspecError: it is no JSON.
        UnicodeDecodeError: a string in it is not UTF-8.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) >= most:
        raise TooManyValuesError(f"it has more than {most} values")
    return msgspec.json.decode(data)


def from_python_json(data: bytes, kind: type[_T]) -> _T:
    """Decode JSON as Python writes it: a model's configuration may hold Infinity and NaN, which JSON has not. Raises
    msgspec.MsgspecError if it is no such text, or of another form.
    """
    try:
        return converted(json.loads(data), kind)
    except (ValueError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def converted(data: Any, kind: type[_T]) -> _T:
    """Check plain data (dictionaries, lists, texts, numbers), and make an object of it. Raises msgspec.ValidationError
    if it is of another form.
    """
    json_decoder(kind)
    return msgspec.convert(data, kind)


def _after_fork() -> None:
    """Another thread may have held the lock when this process was forked, and does not exist in it."""
    global _making  # noqa: PLW0603 - the lock of a process
    _making = threading.RLock()
    _made.clear()


os.register_at_fork(after_in_child=_after_fork)
