"""A checkpoint in a folder, as `save_pretrained` writes it, as the source of a version.

A version gets the shards that the index names (without an index, every `*.safetensors` but an adapter's), and the
small files that belong to a model: configuration, tokenizer, its own code. What a trainer keeps beside them (optimizer
states, logs) is left out. Links are followed, as Hugging Face's cache consists of them; the version holds plain files.

Files are cloned where the file system shares blocks (reflinks: XFS, Btrfs), else copied. They are never hard-linked:
a hard link is the trainer's file itself, and a trainer that writes its next checkpoint over the last one would change
a published version under the engines.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from refitd_client.checkpoint import header
from refitd_client.checkpoint.header import Entry
from refitd_client.checkpoint.layout import MAX_INDEX_BYTES, Index, IndexRefusedError, parse_index
from refitd_client.contract.naming import ADAPTER_NAME, INDEX_NAME, MANIFEST_NAME
from refitd_client.contract.slot import ShardLayout
from refitd_client.errors import InvalidWeightsError
from refitd_client.files import durable
from refitd_client.files.plain_file import opened, read_plain
from refitd_client.write.version_folder import Staging

_COMPANIONS = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"})
_NO_COMPANIONS = frozenset({MANIFEST_NAME, "trainer_state.json"})
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt"})
_CHUNK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCheckpoint:
    """A folder's shards with their tensors, and the small files beside them."""

    shards: Mapping[Path, list[Entry]]
    companions: Sequence[Path]

    @property
    def is_adapter(self) -> bool:
        """Whether it is a LoRA adapter, as peft saves it, and no model."""
        return [path.name for path in self.shards] == [ADAPTER_NAME]

    @property
    def tensors(self) -> dict[str, list[Entry]]:
        """What is in each shard."""
        return {path.name: entries for path, entries in self.shards.items()}

    @property
    def size(self) -> int:
        """The bytes that the shards take."""
        return sum(path.stat().st_size for path in self.shards)

    @property
    def layout(self) -> list[ShardLayout]:
        """The files of a slot that fits."""
        return [header.layout(path) for path in self.shards]

    def stage(self, staging: Staging) -> Callable[[], None]:
        """Copy the shards. Raises as `write` does. What is returned has nothing left to do."""
        self.write(staging)
        return lambda: None

    def write(self, staging: Staging) -> None:
        """Copy the shards.

        Raises:
            InvalidWeightsError: one cannot be read, or was written to meanwhile.
            NoSpaceError: there is no room for them.
        """
        for path in self.shards:
            copy_into(staging, path)


def open_checkpoint(folder: Path) -> SourceCheckpoint:
    """Read a folder's listing, its index and the headers of its shards.

    Raises:
        InvalidWeightsError: it is no checkpoint in safetensors, or an incomplete one.
    """
    path = folder / INDEX_NAME
    try:
        index = parse_index(read_plain(path, MAX_INDEX_BYTES + 1, follow=True))
    except FileNotFoundError:
        index = None
    except IndexRefusedError as error:
        raise InvalidWeightsError(f"{path} is no index of a checkpoint: {error}") from error
    shards = {path: header.read(path) for path in _shard_paths(folder, index)}
    _check_names(folder, shards, index)
    return SourceCheckpoint(shards=shards, companions=companions_of(folder))


def companions_of(folder: Path) -> list[Path]:
    """The configuration, the tokenizer's files and the model's own code."""
    return [
        path
        for path in sorted(folder.iterdir())
        if is_companion(path.name) and not path.name.endswith(".index.json") and path.is_file()
    ]


def is_companion(name: str) -> bool:
    """Whether a file of this name belongs to a model beside its weights, by its ending."""
    return PurePath(name).suffix in _COMPANIONS and not name.startswith(".") and name not in _NO_COMPANIONS


def copy_into(staging: Staging, path: Path) -> None:
    """Copy a file into the version under its own name, and see that it was not written to meanwhile.

    Raises:
        InvalidWeightsError: it was, or it is no plain file, or cannot be read.
        NoSpaceError: there is no room for it.
    """
    with opened(path) as source:
        before = os.fstat(source)
        with staging.file(path.name) as file:
            is_clone = durable.clone(source, file.fd)
            if not is_clone and not staging.recycled:
                staging.require_space(before.st_size)
            add, origin = (file.count, file.fd) if is_clone else (file.write, source)
            while chunk := os.read(origin, _CHUNK):  # a clone is read itself: its digest is of what is published
                add(chunk)
        after = os.fstat(source)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise InvalidWeightsError(f"{path} was written to while it was copied: publish after the save has returned")


def _shard_paths(folder: Path, index: Index | None) -> list[Path]:
    if index is not None:
        for name in index.files:
            if not (folder / name).is_file():
                raise InvalidWeightsError(
                    f"{folder / INDEX_NAME} names {name}, which is not there: is the save complete?"
                )
        return [folder / name for name in index.files]
    found = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith(".")]
    shards = [path for path in found if path.name != ADAPTER_NAME]
    if shards:
        return shards
    if found:  # an adapter alone: a version of its own kind
        return found
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise InvalidWeightsError(
            f"{folder} holds no *.safetensors, but {pickles[0]}: pickles are not published, because loading one runs "
            "whatever code is in it; save with safe_serialization=True"
        )
    raise InvalidWeightsError(f"{folder} holds no *.safetensors: is it the folder that the checkpoint was saved to?")


def _check_names(folder: Path, shards: Mapping[Path, list[Entry]], index: Index | None) -> None:
    found: dict[str, str] = {}
    for path, entries in shards.items():
        for entry in entries:
            if found.setdefault(entry.name, path.name) != path.name:
                raise InvalidWeightsError(
                    f"tensor {entry.name} is both in {found[entry.name]} and in {path.name} of {folder}",
                    tensor=entry.name,
                )
    if not found:
        raise InvalidWeightsError(f"there are no tensors to publish: the shards of {folder} are empty")
    if index is not None and index.file_of != found:
        name = min(index.file_of.items() ^ found.items())[0]
        raise InvalidWeightsError(
            f"{folder / INDEX_NAME} and the shards disagree, first over tensor {name}: is the save complete?",
            tensor=name,
        )
