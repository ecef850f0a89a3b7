"""A checkpoint in a folder, as `save_pretrained` writes it, as the source of a version.

A version gets the shards that the index names (without an index, every `*.safetensors` but an adapter's), and the
small files that belong to a model: configuration, tokenizer, its own code. What a trainer keeps beside them (optimizer
states, logs) is left out. Links are followed, as Hugging Face's cache consists of them; the version holds plain files.

Files are cloned or copied (`Staging.copy`), never hard-linked: a hard link is the trainer's file itself, and a trainer
that writes its next checkpoint over the last one would change a published version under the engines.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from refitd_client.checkpoint import header
from refitd_client.checkpoint.header import Entry
from refitd_client.checkpoint.index import (
    MAX_INDEX_BYTES,
    PICKLES,
    Index,
    IndexRefusedError,
    lay_out,
    parse_index,
    two_saves,
)
from refitd_client.contract.naming import ADAPTER_NAME, INDEX_NAME, ShardLayout
from refitd_client.errors import InvalidWeightsError
from refitd_client.files.plain_file import read_plain
from refitd_client.write.version_folder import Staging


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCheckpoint:
    """A folder's shards with their tensors."""

    shards: Mapping[Path, list[Entry]]

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
            staging.copy(path)


def open_checkpoint(folder: Path, *, once: bool = False) -> SourceCheckpoint:
    """Read a folder's listing, its index and the headers of its shards. With `once` a folder that a model was saved to
    more than once is refused. Raises InvalidWeightsError if it is no checkpoint in safetensors, or an incomplete one.
    """
    path = folder / INDEX_NAME
    try:
        index = parse_index(read_plain(path, MAX_INDEX_BYTES + 1, follow=True))
    except FileNotFoundError:
        index = None
    except IndexRefusedError as error:
        raise InvalidWeightsError(f"{path} is no index of a checkpoint: {error}") from error
    times = {file.name: file.stat().st_mtime_ns for file in folder.iterdir() if once and file.is_file()}
    if (fault := two_saves(times, index)) is not None:
        raise InvalidWeightsError(f"{folder} is not published: {fault.reason}")
    shards = {path: header.read(path) for path in _shard_paths(folder, index)}
    _check_names(folder, shards, index)
    return SourceCheckpoint(shards=shards)


def _shard_paths(folder: Path, index: Index | None) -> list[Path]:
    if index is not None:
        for name in index.files:
            if not (folder / name).is_file():
                raise InvalidWeightsError(
                    f"{folder / INDEX_NAME} names {name}, which is not there: is the save complete?"
                )
        return [folder / name for name in index.files]
    found = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith(".")]
    shards = lay_out([path.name for path in found if path.name != ADAPTER_NAME], None).weights
    if shards:
        return [folder / name for name in shards]
    if found:  # an adapter alone: a version of its own kind
        return found
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
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
