"""The model that a server was started with: what versions are held against, and what is put back before the first one.

The operator named it, so links are followed (the Hugging Face cache is made of them).
"""

import mmap
import os
from pathlib import Path

from refitd_client.checkpoint.inventory import Reference, inventory_of
from refitd_client.checkpoint.layout import IndexRefusedError, lay_out, parse_index
from refitd_client.checkpoint.strict_header import Header, HeaderRefusedError, read_header
from refitd_client.contract.naming import INDEX_NAME
from refitd_client.validation.evidence import Structure
from refitd_client.validation.reference import ReferenceRefusedError, read_reference
from refitd_plugin.source import SourceRefusedError, VersionPlace, VersionSource


def reference_in(folder: Path) -> Reference:
    """Names, shapes and dtypes of the model's tensors, from its files' headers.

    Raises:
        SourceRefusedError: they cannot be read, so nothing can be held against them.
    """
    try:
        return read_reference(folder)
    except (ReferenceRefusedError, OSError) as error:
        advice = "start the engine on a folder of safetensors"
        raise SourceRefusedError(f"there is nothing to hold a version against: {error}: {advice}") from error


def folder_of(path: str, revision: str | None) -> Path:
    """The folder of a model, also of one that the server was given by its name on the hub.

    Raises:
        SourceRefusedError: it is not here.
    """
    if Path(path).is_dir():
        return Path(path)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    except Exception as error:  # the hub's library raises many kinds; all mean that it is not here
        reason = f"{path} is not a folder on this machine ({type(error).__name__})"
        raise SourceRefusedError(f"there is nothing to hold a version against: {reason}") from error


def started_from(folder: Path) -> VersionSource:
    """The model that a server was started with. The operator named it, so links are followed.

    Raises:
        SourceRefusedError: it is not made of safetensors files that can be read.
        OSError: it cannot be read.
    """
    names = {file.name for file in folder.iterdir() if not file.name.startswith(".")}
    try:
        index = parse_index((folder / INDEX_NAME).read_bytes()) if INDEX_NAME in names else None
        layout = lay_out(names, index)
        if layout.faults:
            raise SourceRefusedError(layout.faults[0].reason)
        opened = {name: _header_and_map(folder / name) for name in layout.weights}
    except (HeaderRefusedError, IndexRefusedError) as error:
        raise SourceRefusedError(f"{folder} cannot be read: {error}") from error
    headers = {name: header for name, (header, _) in opened.items()}
    seen = Structure(path=folder.name, files={}, headers=headers, inventory=inventory_of(headers))
    place = VersionPlace(folder.parent, folder.name)
    maps = {name: each for name, (_, each) in opened.items()}
    return VersionSource(place=place, structure=seen, inventory=seen.inventory.digest, maps=maps)


def _header_and_map(path: Path) -> tuple[Header, mmap.mmap]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return read_header(file.fileno(), size), mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
