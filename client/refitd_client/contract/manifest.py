"""`refit.json`, the manifest of a version: what was published, file by file, so that damage is found before a load.

    {"format": 1, "run": "exp/trial", "generation": 1, "step": 123, "kind": "full", "base": null,
     "files": {"model-00001-of-00001.safetensors": {"size": 3087467144, "digest": "xxh3-16m:…32 hex digits…"}, …},
     "tensors": {"count": 338, "bytes": 3087428608, "dtypes": {"BF16": 338}}, "created_at": "2026-11-21T12:00:00Z"}

A version that is a delta names its base and says where its changes are; its `tensors` are those of the model that
results, as its `fingerprints` are (docs/delta-format.md has both):

    "kind": "delta", "base": "exp~trial~v000122", "fingerprints": {"model.norm.weight": "53e0a1d1c2f5b7aa", …},
    "delta": {"file": "weights.refit-delta", "encoding": "flat", "compression": "none", "tensors": 301, "changed": …}

Digests of files are XXH3-128 (https://xxhash.com), by blocks, so that several threads can share a large file.

    up to 16 MiB    xxh3:…       the XXH3-128 of the file
    above           xxh3-16m:…   the XXH3-128 of the XXH3-128s, 16 bytes each, of its blocks of 16 MiB, the last shorter

In hexadecimal digits; blocks' digests are joined in xxHash's canonical byte order. One thread digests bytes from memory
at 7 GB/s, a bus brings 55 GB/s: a digest of a large file in one piece would be ready long after the file has arrived.

Digests find damage; they do not protect against forgery.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from refitd_client.contract.decoding import from_json
from refitd_client.contract.naming import InvalidNameError, Order, check_run, check_step, parse_version_id
from refitd_client.contract.states import Kind

BLOCK = 2**24  # bytes of a file that are digested together
FORMAT = 1
MAX_MANIFEST_BYTES = 16 * 2**20
MAX_FILES = 100_000
MAX_FINGERPRINTS = 200_000
MAX_FINGERPRINTS_BYTES = 12 * 2**20  # what they may take of a manifest
_HEX = frozenset("0123456789abcdef")
FOREIGN_CHARACTERS = 200  # of a foreign text in a sentence


class FileDigest:
    """Takes the bytes of a file in order, in any pieces."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._hasher = xxhash.xxh3_128()
        self._room = BLOCK

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view) > self._room:  # a full block may be the file's last: it is closed when more bytes come
            self._hasher.update(view[: self._room])
            view = view[self._room :]
            self._blocks.append(self._hasher.digest())
            self._hasher.reset()
            self._room = BLOCK
        self._hasher.update(view)
        self._room -= len(view)

    def begin_with(self, blocks: Sequence[bytes]) -> None:
        """Take the digests of the file's first blocks, none of which is its last, instead of their bytes."""
        self._blocks = list(blocks)

    @property
    def text(self) -> str:
        return joined(self._all())

    @property
    def digest(self) -> bytes:
        """The same as 16 bytes, for a file that ends in the digest of its other bytes."""
        return combined(self._all())

    def _all(self) -> list[bytes]:
        return [*self._blocks, self._hasher.digest()]


def in_blocks(parts: Iterable[memoryview]) -> list[list[memoryview]]:
    """The bytes of a file by blocks, each in pieces. A file without bytes has one block without pieces."""
    found: list[list[memoryview]] = [[]]
    room = BLOCK
    for part in parts:
        rest = part
        while rest:
            if not room:
                found.append([])
                room = BLOCK
            found[-1].append(rest[:room])
            rest, room = rest[room:], room - min(room, len(rest))
    return found


def digest_of_pieces(pieces: Iterable[bytes | memoryview]) -> bytes:
    """The digest of a block, for `joined` and `combined`."""
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def blocks(size: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + BLOCK, size)) for begin in range(0, max(1, size), BLOCK)]


def digest_of_block(data: NDArray[np.uint8]) -> bytes:
    return xxhash.xxh3_128_digest(data.data)


def joined(blocks: Sequence[bytes]) -> str:
    """The digest of a file, as the manifest has it, from those of its blocks. An empty file has one empty block."""
    return f"{'xxh3' if len(blocks) == 1 else 'xxh3-16m'}:{combined(blocks).hex()}"


def combined(blocks: Sequence[bytes]) -> bytes:
    """The same as 16 bytes: the digest of the one block, or of the blocks' digests."""
    return blocks[0] if len(blocks) == 1 else xxhash.xxh3_128_digest(b"".join(blocks))


class ManifestRefusedError(ValueError):
    """A manifest that is not one: too large, not JSON, fields missing or of the wrong type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """One file of a version: its size in bytes and its digest (`FileDigest`)."""

    size: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsSummary:
    """How many tensors, their bytes without headers, and how many of each safetensors dtype."""

    count: int
    bytes: int
    dtypes: dict[str, int]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, int]]) -> "TensorsSummary":
        listed = list(tensors)
        dtypes = Counter(dtype for dtype, _ in listed)
        return cls(count=len(listed), bytes=sum(size for _, size in listed), dtypes=dict(sorted(dtypes.items())))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaFacts:
    """What a delta's file holds: `changed` of the model's `elements`, in so many of its tensors."""

    file: str
    encoding: str
    compression: str
    tensors: int
    changed: int
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a manifest says beside its files: its kind, its base, its tensors' fingerprints, and its delta.

    `why_full` and `density` as in `Manifest`.
    """

    kind: Kind = Kind.FULL
    base: str | None = None
    fingerprints: dict[str, str] = field(default_factory=dict[str, str])
    delta: DeltaFacts | None = None
    why_full: str | None = None
    density: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of `refit.json`. `files` names everything in the directory but the manifest itself.

    `fingerprints` are those of all tensors by name, as 16 hexadecimal digits, or of none. `base` is a version's id.
    `why_full` says why it is no delta, where one was asked for; `density` is the share of all elements that changed
    since the version that was published before. Both are for people: nothing is decided by them.
    """

    run: str
    generation: int
    step: int
    files: dict[str, ManifestFile]
    tensors: TensorsSummary
    created_at: str
    kind: Kind = Kind.FULL
    base: str | None = None
    format: int = FORMAT
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    fingerprints: dict[str, str] = field(default_factory=dict[str, str])
    delta: DeltaFacts | None = None
    why_full: str | None = None
    density: float | None = None

    @property
    def order(self) -> Order:
        return Order(self.generation, self.step)

    @property
    def digest(self) -> str:
        """One digest for the whole version: of its files' names, sizes and digests, in order of name."""
        return digest_of_files({name: (file.size, file.digest) for name, file in self.files.items()})

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


def digest_of_files(files: dict[str, tuple[int, str]]) -> str:
    """One digest for many files, given as name → (size in bytes, digest)."""
    hasher = xxhash.xxh3_128()
    for name, (size, digest) in sorted(files.items()):
        hasher.update(f"{name}\0{size}\0{digest}\n".encode())
    return f"xxh3:{hasher.hexdigest()}"


def parse_manifest(data: bytes) -> Manifest:
    """Parse a manifest of any origin. Raises ManifestRefusedError with a sentence that says what is wrong."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestRefusedError(f"manifest is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        manifest = from_json(data, Manifest)
        check_run(manifest.run)
        check_step(manifest.step)
    except (msgspec.MsgspecError, InvalidNameError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestRefusedError(f"manifest does not parse: {_shown(str(error))}") from error
    if manifest.format != FORMAT:
        raise ManifestRefusedError(f"manifest has format {manifest.format}; this refitd reads format {FORMAT}")
    if manifest.generation < 1:
        raise ManifestRefusedError(f"manifest has generation {manifest.generation}; the first is 1")
    if len(manifest.files) > MAX_FILES:
        raise ManifestRefusedError(f"manifest names more than {MAX_FILES} files")
    for name, file in manifest.files.items():
        if "/" in name or name.startswith(".") or name in {"", "refit.json"}:
            raise ManifestRefusedError(
                f"manifest names a file {_shown(name)!r}; names are plain and in the version's own folder"
            )
        if file.size < 0:
            raise ManifestRefusedError(f"manifest gives {_shown(name)} a negative size")
    _check_fingerprints(manifest.fingerprints)
    if manifest.kind is Kind.DELTA or manifest.delta is not None:
        _check_delta(manifest)
    return manifest


def metadata_texts(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """A copy of what a trainer says of a version. Raises TypeError if it is no mapping, or a key or a value is no text;
    it says which.
    """
    if not isinstance(cast("object", metadata), Mapping | None):
        raise TypeError(f"metadata is {metadata!r}, {_typed(metadata)}: it is a mapping of texts to texts")
    texts = dict(metadata or {})
    for key, value in cast("dict[object, object]", texts).items():
        if not isinstance(key, str):
            raise TypeError(f"metadata has the key {key!r}, {_typed(key)}: keys and values are texts")
        if not isinstance(value, str):
            raise TypeError(f"metadata[{key!r}] is {value!r}, {_typed(value)}: values are texts, as {str(value)!r} is")
    return texts


def to_text(fingerprint: int) -> str:
    return f"{fingerprint:016x}"


def fitting_fingerprints(fingerprints: Mapping[str, int]) -> dict[str, str]:
    """The tensors' fingerprints for a manifest, by name: all, or none if they would take more of it than they may.

    They are optional there: a reader that needs them and does not find them computes them.
    """
    taken = sum(len(name.encode()) + 16 + len('  "": "",\n') for name in fingerprints)
    fit = len(fingerprints) <= MAX_FINGERPRINTS and taken <= MAX_FINGERPRINTS_BYTES
    return {name: to_text(found) for name, found in sorted(fingerprints.items())} if fit else {}


def _check_fingerprints(fingerprints: dict[str, str]) -> None:
    if len(fingerprints) > MAX_FINGERPRINTS:
        raise ManifestRefusedError(f"manifest has more than {MAX_FINGERPRINTS} fingerprints")
    for name, text in fingerprints.items():
        if len(text) != 16 or not _HEX.issuperset(text):
            raise ManifestRefusedError(f"manifest gives {_shown(name)} a fingerprint that is not 16 hexadecimal digits")


def _check_delta(manifest: Manifest) -> None:
    base = None if manifest.base is None else parse_version_id(manifest.base)
    facts = manifest.delta
    if manifest.kind is not Kind.DELTA or base is None or facts is None:
        raise ManifestRefusedError("manifest lacks what a delta's must have: kind, base or delta")
    if base[0] != manifest.run or base[1] >= manifest.order:
        raise ManifestRefusedError(f"manifest has base {_shown(str(manifest.base))}: no earlier version of its run")
    if facts.file not in manifest.files:
        raise ManifestRefusedError(f"manifest has its changes in {_shown(facts.file)}, which is not among its files")
    if not 0 <= facts.changed <= facts.elements or facts.tensors < 0:
        raise ManifestRefusedError(f"manifest says that {facts.changed} of {facts.elements} elements changed")


def _typed(value: object) -> str:
    return f"of the type {type(value).__name__}"


def _shown(text: str) -> str:
    """A foreign text for a sentence: a line of it at most, and no control characters."""
    return ascii(text[:FOREIGN_CHARACTERS])[1:-1]
