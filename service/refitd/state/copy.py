"""A copy: a run's model as a plain checkpoint of the service's own, which deltas are applied to.

    <root>/.refitd/copies/<exp~trial>/<unique>/         shards, index, config: engines load it as any checkpoint
    <root>/.refitd/copies/<exp~trial>/<unique>.json     the note: which version it holds

A copy without a note is worthless. The note is durably removed before the first byte of the copy is written, and comes
back, by rename, when all bytes are on stable storage and their fingerprints were found right. So a kill in between
leaves a folder that is not used.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from refitd_client.contract.decoding import from_json
from refitd_client.contract.manifest import MAX_MANIFEST_BYTES
from refitd_client.contract.naming import SERVICE_FOLDER, Order, version_id

COPY_STAGE = "copy"  # what its writing is called among the stages of an update
COPIES = "copies"
COPIES_PATH = f"{SERVICE_FOLDER}/{COPIES}"
NOTE_ENDING = ".json"
MAX_NOTE_BYTES = 2 * MAX_MANIFEST_BYTES
FORMAT = 1
_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What is known of the contents of a checkpoint: its shards' digests and its tensors' fingerprints, by name.

    Both were taken from the bytes, or follow from such by what has changed since. Either may be empty.
    """

    digests: Mapping[str, str]
    fingerprints: Mapping[str, int]


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What a note says: the version and its digest, the bytes of all files, and what they look like from outside.

    `digests` are the shards', `fingerprints` the tensors', as manifests have them. What is written from the copy later
    is held against both. Notes of an earlier refitd have neither; a model with very many tensors has no fingerprints.
    """

    format: int = FORMAT
    run: str
    generation: int
    step: int
    digest: str
    bytes: int
    signature: str
    digests: dict[str, str] = {}  # msgspec makes each note a dict of its own
    fingerprints: dict[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy as it lies there. `order`, `digest` (the version's) and `signature` are None while it is worth nothing.

    `path` is where engines find it: relative to the root, or absolute where copies lie in a folder of their own.
    `fault` says why it is none of this service's. `read_as` is the version as which engines may still be reading one
    that is worth nothing any more.
    """

    run: str
    name: str
    path: str
    bytes: int = 0
    order: Order | None = None
    digest: str | None = None
    signature: str | None = None
    read_as: str | None = None
    fault: str | None = None

    @property
    def holds(self) -> str | None:
        """The id of the version whose contents it has."""
        return None if self.order is None else version_id(self.run, self.order)


def doubted(copy: Copy) -> Copy:
    """The same folder, whatever is in it. Engines may still be reading it as what it was."""
    return replace(copy, order=None, digest=None, signature=None, read_as=copy.holds or copy.read_as)


def is_copy_name(name: str) -> bool:
    """Whether this service gives such names."""
    return _NAME.fullmatch(name) is not None


def parse_note(data: bytes, run: str) -> Note | None:
    """The note of a copy of `run`, None where it is none: then the copy is worth nothing."""
    try:
        note = from_json(data, Note)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return note if note.format == FORMAT and note.run == run else None
