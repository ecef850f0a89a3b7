"""Reading the model that the engines serve: headers and config; of the weights only an output layer that it stores
beside the embedding that it is tied to, and that embedding.

The operator named the folder, or the engine was started with it, so links are followed (the Hugging Face cache is made
of them). Models lie on hubs with faults that loaders pass over: an index that names a tensor which no file has, a
tensor in two files, the index of an earlier save. A checkpoint is not rejected for those: what is there is used, and
the faults are warnings.
"""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from refitd_client.checkpoint.fault import shown
from refitd_client.checkpoint.header import Header, HeaderRefusedError, read_header
from refitd_client.checkpoint.index import (
    MAX_INDEX_BYTES,
    CheckpointLayout,
    Index,
    IndexRefusedError,
    lay_out,
    layout_of,
    parse_index,
)
from refitd_client.checkpoint.inventory import Inventory, Reference
from refitd_client.checkpoint.opening import CONFIG_NAME
from refitd_client.contract.decoding import from_python_json
from refitd_client.contract.naming import INDEX_NAME, MODEL_NAME
from refitd_client.files.plain_file import NotPlainError, plain_file, read_at
from refitd_client.validation.contents import place_of, same_bytes

MAX_CONFIG_BYTES = 4 * 2**20
T = TypeVar("T")


class ReferenceRefusedError(ValueError):
    """A folder that checkpoints cannot be compared with. The message is a sentence that says what to do."""


class _Config(msgspec.Struct):
    """Of a model of several parts, those that hold a language model."""

    tie_word_embeddings: bool | None = None
    text_config: "_Config | None" = None
    llm_config: "_Config | None" = None
    language_config: "_Config | None" = None
    thinker_config: "_Config | None" = None

    @property
    def tied(self) -> bool | None:
        """What it says, or the first of its parts that says something; None if none does."""
        parts = (self.text_config, self.llm_config, self.language_config, self.thinker_config)
        said = (self.tie_word_embeddings, *(part.tied for part in parts if part is not None))
        return next((each for each in said if each is not None), None)


def read_reference(path: Path) -> Reference:
    """Read the inventory of the model in the folder `path`.

    Raises:
        ReferenceRefusedError: it is no folder, or no model in safetensors that a loader would accept.
        OSError: something in it cannot be read.
    """
    if not _is_folder(path):
        raise ReferenceRefusedError(
            f"{path} is not a folder on this machine: set --base-model (REFITD_BASE_MODEL) to the local folder "
            "of the model that the engines serve, not to its name on a hub"
        )
    try:
        names = {file.name for file in path.iterdir() if not file.name.startswith(".")}
        index, warnings = _index(path) if INDEX_NAME in names else None, list[str]()
        if index is not None and MODEL_NAME in names and names.isdisjoint(index.files):
            warnings.append(f"{INDEX_NAME} is of an earlier save, whose files are gone: {MODEL_NAME} is read")
            index = None
        layout = lay_out(names, index)
        headers = {} if layout.faults else {name: _header(path, name) for name in layout.weights}
    except (HeaderRefusedError, IndexRefusedError) as error:
        raise ReferenceRefusedError(f"the base model in {path} cannot be used: {error}") from error
    if layout.faults:
        raise ReferenceRefusedError(f"the base model in {path} cannot be used: {layout.faults[0].reason}")
    read = layout_of(headers, index)
    tied = _is_tied(path, read.inventory)
    return Reference(
        read.inventory,
        tied,
        str(path),
        copies=_copies(path, read) if tied else frozenset(),
        unstored=frozenset(index.file_of if index is not None else ()) - read.inventory.tensors.keys(),
        warnings=(*warnings, *(fault.reason for fault in [*read.duplicates, *read.disagreements])),
    )


def _is_folder(path: Path) -> bool:
    """Whether a folder is there. Raises OSError where that cannot be found out, which `Path.is_dir` may hide."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENAMETOOLONG}:
            return False
        raise


def _header(path: Path, name: str) -> Header:
    try:
        return _read(path / name, read_header)
    except HeaderRefusedError as error:
        raise HeaderRefusedError(f"{shown(name)}: {error}") from error


def _index(path: Path) -> Index:
    try:
        return parse_index(_read(path / INDEX_NAME, lambda fd, size: read_at(fd, min(size, MAX_INDEX_BYTES + 1), 0)))
    except IndexRefusedError as error:
        raise IndexRefusedError(f"{INDEX_NAME}: {error}") from error


def _copies(path: Path, layout: CheckpointLayout) -> frozenset[str]:
    """The output layers that are stored beside the embedding that they are tied to, and have its bytes."""

    def is_copy(copy: str, first: str) -> bool:
        places = place_of(layout.headers, copy), place_of(layout.headers, first)
        with (
            plain_file(path / places[0].file, follow=True) as one,
            plain_file(path / places[1].file, follow=True) as other,
        ):
            return same_bytes(one, other, *places)

    return frozenset(copy for copy, first in layout.inventory.pairs.items() if is_copy(copy, first))


def _is_tied(path: Path, inventory: Inventory) -> bool:
    """Whether the output layer is the embedding. If the config does not say, a model without output layer is tied."""
    try:
        data = _read(path / CONFIG_NAME, lambda fd, size: read_at(fd, min(size, MAX_CONFIG_BYTES), 0))
        said = from_python_json(data, _Config).tied
    except FileNotFoundError:
        said = None
    except msgspec.MsgspecError as error:
        raise ReferenceRefusedError(f"{path / CONFIG_NAME} cannot be read as a model's config: {error}") from error
    return not inventory.pairs if said is None else said


def _read(path: Path, read: Callable[[int, int], T]) -> T:
    try:
        with plain_file(path, follow=True) as fd:
            return read(fd, os.fstat(fd).st_size)
    except NotPlainError as error:
        raise ReferenceRefusedError(f"{path} is not a regular file") from error
