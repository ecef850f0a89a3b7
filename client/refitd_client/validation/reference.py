"""Reading the model that the engines serve: headers and config, no weights.

The operator named the folder, or the engine was started with it, so links are followed (the Hugging Face cache is made
of them). What is read is checked as strictly as a checkpoint.
"""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from refitd_client.checkpoint.fault import shown
from refitd_client.checkpoint.index import MAX_INDEX_BYTES, Index, IndexRefusedError, lay_out, parse_index
from refitd_client.checkpoint.inventory import LM_HEAD, Inventory, Reference
from refitd_client.checkpoint.layout import layout_of
from refitd_client.checkpoint.opening import CONFIG_NAME
from refitd_client.checkpoint.strict_header import Header, HeaderRefusedError, read_header
from refitd_client.contract.decoding import from_json
from refitd_client.contract.naming import INDEX_NAME
from refitd_client.files.plain_file import NotPlainError, plain_file, read_at

MAX_CONFIG_BYTES = 4 * 2**20
T = TypeVar("T")


class ReferenceRefusedError(ValueError):
    """A folder that checkpoints cannot be compared with. The message is a sentence that says what to do."""


class _Text(msgspec.Struct):
    tie_word_embeddings: bool | None = None


class _Config(_Text):
    text_config: _Text | None = None


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
        index = _index(path) if INDEX_NAME in names else None
        layout = lay_out(names, index)
        headers = {} if layout.faults else {name: _header(path, name) for name in layout.weights}
    except (HeaderRefusedError, IndexRefusedError) as error:
        raise ReferenceRefusedError(f"the base model in {path} cannot be used: {error}") from error
    read = layout_of(headers, index)
    if faults := [*layout.faults, *read.duplicates, *read.disagreements]:
        raise ReferenceRefusedError(f"the base model in {path} cannot be used: {faults[0].reason}")
    return Reference(read.inventory, _is_tied(path, read.inventory), str(path))


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


def _is_tied(path: Path, inventory: Inventory) -> bool:
    """Whether the output layer is the embedding. If the config does not say, a model without `lm_head` is tied."""
    try:
        data = _read(path / CONFIG_NAME, lambda fd, size: read_at(fd, min(size, MAX_CONFIG_BYTES), 0))
        config = from_json(data, _Config)
    except FileNotFoundError:
        config = _Config()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ReferenceRefusedError(f"{path / CONFIG_NAME} cannot be read as a model's config: {error}") from error
    for each in (config, config.text_config or config):
        if each.tie_word_embeddings is not None:
            return each.tie_word_embeddings
    return LM_HEAD not in inventory.tensors


def _read(path: Path, read: Callable[[int, int], T]) -> T:
    try:
        with plain_file(path, follow=True) as fd:
            return read(fd, os.fstat(fd).st_size)
    except NotPlainError as error:
        raise ReferenceRefusedError(f"{path} is not a regular file") from error
