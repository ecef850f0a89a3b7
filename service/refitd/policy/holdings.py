"""What a version's folder holds and takes on disk, and which of it refitd may delete. Pure.

A folder is a version's only if its top says so, by refitd's manifest or by a weight file with an intact header: a data
set may have a folder `v000001` as well. Of such a folder these files are the version's:

    refit.json, and each file that it names
    *.safetensors with an intact header, and the index
    the small files that trainers and transformers write beside weights, by their exact names

Everything else stays where it is: other files, hidden files, links, folders and what lies in them. A disk budget counts
the bytes that refitd may delete.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from refitd.root.handle import Identity, parts_below
from refitd.root.scan import Gone, Refused
from refitd.state.version import VersionRecord
from refitd.text import listed
from refitd_client.checkpoint.fault import shown
from refitd_client.checkpoint.index import SAFETENSORS
from refitd_client.contract.manifest import Manifest
from refitd_client.contract.naming import ADAPTER_CONFIG_NAME, INDEX_NAME, MANIFEST_NAME, STAGING_LOCK
from refitd_client.contract.states import VersionState
from refitd_client.validation.foreign import recognise

_COMPANIONS = (
    ADAPTER_CONFIG_NAME,
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "configuration_*.py",
    "generation_config.json",
    "merges.txt",
    "modeling_*.py",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenization_*.py",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "trainer_state.json",
    "training_args.bin",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderEntry:
    """One name in a folder. `stamp` is equal as long as nothing has replaced or changed it; `bytes` is its room."""

    stamp: str
    bytes: int
    is_file: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What a folder holds.

    `files` maps the names of the version's files to their stamps, in the order in which they may go: what proves that
    it is
    a version goes last. `others` are the names of everything else at its top. `seal` is equal as long as no entry at
    its top
    changes. `foreign_bytes` are those of `others`, with all that lies in them.
    """

    identity: Identity
    seal: str
    files: Mapping[str, str]
    others: tuple[str, ...] = ()
    bytes: int = 0
    foreign_bytes: int = 0

    @property
    def refusal(self) -> str | None:
        """Why nothing of it may be deleted, None where something may."""
        if self.files:
            return None
        return (
            "refitd may not delete it: neither a manifest of refitd's nor a safetensors file with an intact header "
            "lies at its top, so nothing proves that it is a version; move it out of the root or delete it by hand"
        )

    @property
    def rest(self) -> str | None:
        """What stays when the version's files go, None where that is nothing."""
        if not self.others:
            return None
        named = listed([shown(name) for name in self.others])
        return f"{named} in its folder belong to no version: refitd may not delete them"


def sort_out(
    path: str,
    entries: Mapping[str, FolderEntry],
    *,
    manifest: Manifest | None,
    intact: Collection[str],
) -> tuple[list[str], list[str]]:
    """The names of the version's files, in the order in which they may go, and the names of everything else.

    Args:
        path: the folder's path beneath the root, which may say by which trainer it was written.
        manifest: refitd's, None where there is none that parses.
        intact: the names of the weight files with an intact header.
    """
    if manifest is None and not intact:
        return [], sorted(entries)
    named = frozenset[str]() if manifest is None else manifest.files.keys()
    mine = [
        name
        for name, entry in entries.items()
        if entry.is_file and (name in named or name in intact or _is_companion(name, path))
    ]
    proof = {MANIFEST_NAME} if manifest is not None else set[str]()
    mine.sort(key=lambda name: (name in proof, name in intact, name))  # a kill on the way leaves a proof of the rest
    return mine, sorted(entries.keys() - set(mine))


def is_weights(name: str) -> bool:
    """Whether a file's name says that it holds weights that a loader would read."""
    return name.endswith(SAFETENSORS) and not name.startswith(".")


def _is_companion(name: str, path: str) -> bool:
    if name in {MANIFEST_NAME, INDEX_NAME, STAGING_LOCK}:
        return True
    trainer = recognise(path)
    if trainer is not None and trainer.marker is not None and not trainer.marker.above:
        return trainer.marker.is_among([name]) or _is_known(name)
    return _is_known(name)


def _is_known(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _COMPANIONS)


Found = Holdings | Gone | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """What a version's folder takes, in bytes; None where it is not known.

    `foreign` are those of them that refitd may not delete. `refusal` says why nothing of it may be deleted.
    """

    bytes: int | None = None
    foreign: int = 0
    refusal: str | None = None

    @property
    def counted(self) -> int:
        """The bytes that count in a disk budget."""
        return (self.bytes or 0) - self.foreign


Weights = Mapping[str, Weight]


def wants_look(version: VersionRecord) -> bool:
    """Whether only a look at its folder says what a version takes. Of a good one every byte was counted."""
    return version.state is not VersionState.SEALED


def weigh(
    versions: Iterable[VersionRecord], found: Mapping[str, Found], spared: Callable[[VersionRecord], bool]
) -> dict[str, Weight]:
    """Map the ids of versions to what they take. Bytes of a folder that several versions share count once.

    Args:
        found: what looks at their folders have found, by path.
        spared: whether a version's folder is its trainer's to delete.
    """
    by_age = sorted(versions, key=lambda version: version.order)
    newest = {version.path: version.id for version in by_age}
    return {
        version.id: weight_of(version, found.get(version.path), is_spared=spared(version))
        if newest[version.path] == version.id
        else Weight(bytes=0)
        for version in by_age
    }


def weight_of(version: VersionRecord, found: Found | None, *, is_spared: bool) -> Weight:
    """What one version takes. `found`: what a look at its folder has found, None without a look."""
    is_ours = not is_spared and parts_below(version.path) is not None
    match found:
        case Holdings():
            total = found.bytes + found.foreign_bytes
            return Weight(bytes=total, foreign=found.foreign_bytes if is_ours else total, refusal=found.refusal)
        case Gone():
            return Weight(bytes=0)
        case _:
            return Weight(bytes=version.files.bytes, foreign=0 if is_ours else version.files.bytes or 0)
