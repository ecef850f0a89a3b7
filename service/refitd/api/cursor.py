"""Where a page of versions ended, as an opaque word."""

import base64
import binascii
from typing import Annotated

import msgspec

from refitd.problem import Kind, ProblemError
from refitd.state.version import VersionRecord

Key = tuple[int, int, int]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # what the journal's database can compare with
_Key = tuple[_Number, _Number, _Number]


def encode_cursor(last: VersionRecord, place: int) -> str:
    """The cursor behind `last`, which has this `place` in lists."""
    key: Key = (place, last.order.generation, last.order.step)
    return base64.urlsafe_b64encode(msgspec.json.encode(key)).decode()


def decode_cursor(cursor: str | None) -> Key | None:
    """The key that a cursor stands for.

    Raises:
        ProblemError: it is none that a page gave.
    """
    if cursor is None:
        return None
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(cursor.encode()), type=_Key)
    except (binascii.Error, msgspec.MsgspecError, ValueError) as error:
        raise ProblemError(Kind.BAD_REQUEST, "cursor: take it from next_cursor of the page before") from error
