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
    IndexRefusedError,
    lay_out,
    layout_of,
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
        return {path.name: entries for path, entries in self.shards.items()}

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.shards)

    @property
    def layout(self) -> list[ShardLayout]:
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
    names = {file.name for file in folder.iterdir() if not file.name.startswith(".")}
    layout = lay_out(names - {ADAPTER_NAME}, index)
    if not layout.weights and ADAPTER_NAME in names and index is None:  # alone: a version of its own kind
        layout = lay_out({ADAPTER_NAME}, None)
    faults = [two_saves(times, index), *layout.faults]
    headers = {} if any(faults) else {name: header.read(folder / name) for name in layout.weights}
    read = layout_of(headers, index)
    for fault in [*faults, *read.duplicates, *read.disagreements]:
        if fault is not None:
            raise InvalidWeightsError(f"{folder} is not published: {fault.reason}")
    if not read.inventory.tensors:
        raise InvalidWeightsError(f"there are no tensors to publish: the shards of {folder} are empty")
    return SourceCheckpoint(
        shards={folder / name: header.entries(folder / name, found) for name, found in headers.items()}
    )
