"""A checkpoint in a folder, as `save_pretrained` writes it, as the source of a version.

What is taken: the shards that the index names (without an index, every `*.safetensors` but an adapter's), and the
small files that belong to a model: configuration, tokenizer, its own code. What a trainer keeps beside them (optimizer
states, logs) is left. Links are followed, as Hugging Face's cache consists of them; the version holds plain files.

Files are cloned where the file system shares blocks (reflinks: XFS, Btrfs), else copied. They are never hard-linked:
a hard link is the trainer's file itself, and a trainer that writes its next checkpoint over the last one would change
a published version under the engines.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import msgspec

from refitd_client.checkpoint import header
from refitd_client.checkpoint.header import Entry
from refitd_client.contract.naming import ADAPTER_NAME, INDEX_NAME, MANIFEST_NAME
from refitd_client.contract.slot import ShardLayout
from refitd_client.errors import InvalidWeightsError
from refitd_client.files import durable
from refitd_client.files.plain_file import read_plain
from refitd_client.files.source_file import opened
from refitd_client.write.staged_file import StagedFile
from refitd_client.write.version_folder import Staging

_MAX_INDEX_BYTES = 64 * 2**20
_COMPANIONS = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"})
_NO_COMPANIONS = frozenset({MANIFEST_NAME, "trainer_state.json"})
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt"})
_CHUNK = 2**20


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
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
        """What a slot has to look like for them."""
        return [header.layout(path) for path in self.shards]

    def stage(self, staging: Staging) -> Callable[[], None]:
        """Copy the shards; nothing is left to do then. Raises as `write` does."""
        self.write(staging)
        return _nothing

    def write(self, staging: Staging) -> None:
        """Copy the shards.

        Raises:
            InvalidWeightsError: one cannot be read, or was written to meanwhile.
            NoSpaceError: there is no room for them.
        """
        for path in self.shards:
            copy_into(staging, path)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read a folder's listing, its index and the headers of its shards.

    Raises:
        InvalidWeightsError: it is no checkpoint in safetensors, or an incomplete one.
    """
    index = _read_index(folder)
    shards = {path: header.read(path) for path in _shard_paths(folder, index)}
    _check_names(folder, shards, index)
    return Checkpoint(shards=shards, companions=companions_of(folder))


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
            _copy(source, file, staging, before.st_size)
        after = os.fstat(source)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise InvalidWeightsError(f"{path} was written to while it was copied: publish after the save has returned")


def _nothing() -> None:
    """Nothing is left to do."""


def _copy(source: int, file: StagedFile, staging: Staging, size: int) -> None:
    is_clone = durable.clone(source, file.fd)
    if not is_clone and not staging.recycled:
        staging.require_space(size)
    add, origin = (file.count, file.fd) if is_clone else (file.write, source)
    while chunk := os.read(origin, _CHUNK):  # a clone is read itself: its digest is of what is published
        add(chunk)


def _shard_paths(folder: Path, index: _Index | None) -> list[Path]:
    if index is not None:
        return [folder / _plain(folder, name) for name in sorted(set(index.weight_map.values()))]
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


def _read_index(folder: Path) -> _Index | None:
    path = folder / INDEX_NAME
    try:
        return msgspec.json.decode(read_plain(path, _MAX_INDEX_BYTES, follow=True), type=_Index)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidWeightsError(f"{path} is no index of a checkpoint: {error}") from error


def _plain(folder: Path, name: str) -> str:
    if not name.endswith(".safetensors") or "/" in name or name.startswith("."):
        raise InvalidWeightsError(f"{folder / INDEX_NAME} names {name!r}, which is no *.safetensors beside it")
    if not (folder / name).is_file():
        raise InvalidWeightsError(f"{folder / INDEX_NAME} names {name}, which is not there: is the save complete?")
    return name


def _check_names(folder: Path, shards: Mapping[Path, list[Entry]], index: _Index | None) -> None:
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
    if index is not None and index.weight_map != found:
        name = min(index.weight_map.items() ^ found.items())[0]
        raise InvalidWeightsError(
            f"{folder / INDEX_NAME} and the shards disagree, first over tensor {name}: is the save complete?",
            tensor=name,
        )
