"""The pairs of a large JSON object, one after another.

A JSON parser that builds everything first can be made to take gigabytes by a file of a few megabytes
(`[{},{},{},…]`), and does not report a key that comes twice. Here one pair is built at a time, nothing nests, and the
caller counts the pairs.
"""

import re
from collections.abc import Iterator

import msgspec

# Possessive (`++`, `*+`): no text can make these patterns go back and try again, so time is linear in its length.
_SPACE = rb"[ \t\n\r]*+"
_STRING = rb'"(?:[^"\\\x00-\x1f]++|\\.)*+"'
_OPEN = re.compile(_SPACE + rb"\{" + _SPACE + rb"(\})?+")
_END = re.compile(_SPACE + rb"\Z")


class PairsRefusedError(ValueError):
    """Not a JSON object, or one whose values are not what the caller asked for."""


def _pair(value: bytes) -> re.Pattern[bytes]:
    return re.compile(
        _SPACE + rb"(" + _STRING + rb")" + _SPACE + rb":" + _SPACE + rb"(" + value + rb")" + _SPACE + rb"([,}])"
    )


STRINGS = _pair(_STRING)  # values are strings
OBJECTS = _pair(rb'(?:null|\{(?:[^{}"]++|' + _STRING + rb")*+\})")  # values are objects that hold no objects, or null


def pairs(data: bytes, pattern: re.Pattern[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield each key with the JSON text of its value, in the order of the text. Repeated keys are repeated.

    Raises:
        PairsRefusedError: where the text stops being such an object.
    """
    opening = _OPEN.match(data)
    if opening is None:
        raise PairsRefusedError("it is not a JSON object")
    position, closed = opening.end(), opening[1] is not None
    while not closed:
        match = pattern.match(data, position)
        if match is None:
            raise PairsRefusedError(f"its JSON is malformed or of the wrong form at byte {position}")
        yield text(match[1]), match[2]
        position, closed = match.end(), match[3] == b"}"
    if _END.match(data, position) is None:
        raise PairsRefusedError(f"it goes on after its JSON object ends, at byte {position}")


def text(string: bytes) -> str:
    """The text of a JSON string, which is given with its quotes.

    Raises:
        PairsRefusedError: it is not UTF-8, or has an escape that stands for nothing.
    """
    try:
        return string[1:-1].decode() if b"\\" not in string else msgspec.json.decode(string, type=str)
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise PairsRefusedError(f"it holds a string that is not valid: {error}") from error
