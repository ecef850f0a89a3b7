"""A copy: the whole model of a delta, in a folder of the service's own that engines load like any checkpoint.

    <root>/.refitd/copies/<exp~trial>/v000007-<unique>/     shards, index, config, and the note: what was proved of them
    <root>/.refitd/copies/<exp~trial>/.v000007-<unique>/    one that is being made, or that a kill has left: worthless

A copy is made once, and is never written again. It gets its name by a rename, when all its bytes are on stable storage
and their fingerprints were found right.
"""

import re
from dataclasses import dataclass, replace

import msgspec

from refitd_client.contract.decoding import from_json
from refitd_client.contract.manifest import MAX_MANIFEST_BYTES
from refitd_client.contract.naming import SERVICE_FOLDER, Order, parse_version_folder, version_folder, version_id

COPY_STAGE = "copy"  # what its making is called among the stages of an update
COPIES = "copies"
COPIES_PATH = f"{SERVICE_FOLDER}/{COPIES}"
NOTE = ".refitd-copy.json"  # loaders leave such names out, and it is no part of a folder's signature
MAX_NOTE_BYTES = 2 * MAX_MANIFEST_BYTES
FORMAT = 2
_NAME = re.compile(r"(\.?)(v[^-]+)-[0-9a-f]{32}")
_OF_OLD = re.compile(r"\.?[0-9a-f]{32}(\.json)?")  # an earlier refitd wrote deltas into two copies in turns


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What a note says: the version's digest, and what the folder looks like from outside.

    `digests` are the shards', as manifests have them. What is made from the copy later is held against them.
    """

    format: int = FORMAT
    digest: str
    signature: str
    digests: dict[str, str] = {}  # msgspec makes each note a dict of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy as it lies there. `path` is relative to the root.

    `order` is its version's, None where its name is that of none. `digest` (the version's) and `signature` are None
    where it is worthless. `fault` says why it is none of this service's.
    """

    run: str
    name: str
    path: str
    bytes: int = 0
    order: Order | None = None
    digest: str | None = None
    signature: str | None = None
    fault: str | None = None

    @property
    def version(self) -> str | None:
        """The id of the version that it was made of."""
        return None if self.order is None else version_id(self.run, self.order)

    @property
    def holds(self) -> str | None:
        """The id of the version whose contents it has; None where it is worthless."""
        return None if self.digest is None else self.version


def doubted(copy: Copy) -> Copy:
    """The same folder, whose contents nobody believes. Engines may still be reading it."""
    return replace(copy, digest=None, signature=None)


def copy_name(order: Order, unique: str) -> str:
    """The name of a copy; `unique` is 32 hex digits."""
    return f"{version_folder(order)}-{unique}"


def order_in(name: str) -> Order | None:
    """The order of the version that a whole copy of this name is made of."""
    match = _NAME.fullmatch(name)
    return None if match is None or match[1] else parse_version_folder(match[2])


def is_copy_name(name: str) -> bool:
    """Whether this service gives such names, or an earlier one did."""
    return _OF_OLD.fullmatch(name) is not None or _NAME.fullmatch(name) is not None


def parse_note(data: bytes) -> Note | None:
    """What a note says, None where it is none: then the copy is worthless."""
    try:
        note = from_json(data, Note)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return note if note.format == FORMAT else None
