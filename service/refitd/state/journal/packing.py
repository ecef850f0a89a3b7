"""How a record lies in the journal: JSON, a line feed, and a checksum of the JSON.

SQLite finds damage to its own pages' structure; a byte that flips inside a value looks like any other value to it. A
journal that says "step 7" where "step 1" was written would be believed, so each record proves itself.
"""

from typing import TypeVar

import msgspec
import xxhash

RecordT = TypeVar("RecordT")

_SUM_LENGTH = 17  # a line feed and 16 hex digits of XXH3-64


class RecordDamagedError(Exception):
    """A record of the journal is not what was written there."""


def pack(record: object) -> bytes:
    """The bytes to write."""
    data = msgspec.json.encode(record)
    return data + _sum(data)


def unpack(row: object, kind: type[RecordT]) -> RecordT:
    """The record that was written.

    Raises:
        RecordDamagedError: the bytes are not those that were written, or not those of such a record.
    """
    if not isinstance(row, bytes):  # in SQLite a damaged column may hold anything
        raise RecordDamagedError(f"a record of {kind.__name__} is damaged: it is no record")
    data, found = row[:-_SUM_LENGTH], row[-_SUM_LENGTH:]
    if _sum(data) != found:
        raise RecordDamagedError(f"a record of {kind.__name__} is damaged: its checksum does not fit")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RecordDamagedError(f"a record of {kind.__name__} cannot be read: {error}") from error


def _sum(data: bytes) -> bytes:
    return b"\n" + xxhash.xxh3_64_hexdigest(data).encode()
