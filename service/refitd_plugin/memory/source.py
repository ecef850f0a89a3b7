"""A version on disk: looked at as strictly as the service does, checked, and mapped; and the model a server began with.

A version's folder is opened beneath the root, and no link is followed. What was opened stays open: a version that is
deleted afterwards can still be read to its end, and put back. Mappings are private, so a loader may work in place on
what it is given without touching the file.

The model that the server was started with is what versions are held against, and what is put back before the first one.
The operator named it, so links are followed there (the Hugging Face cache is made of them).
"""

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from refitd_client.checkpoint.header import Header, HeaderRefusedError, read_header
from refitd_client.checkpoint.index import MAX_INDEX_BYTES, IndexRefusedError, lay_out, parse_index
from refitd_client.checkpoint.inventory import Reference, inventory_of
from refitd_client.checkpoint.opening import ChangedError, Folder, OpeningRefusedError
from refitd_client.contract.naming import INDEX_NAME, MANIFEST_NAME, SERVICE_FOLDER, version_id
from refitd_client.files.plain_file import read_plain
from refitd_client.tensors import TORCH_NAMES
from refitd_client.validation.examine import examine, signature, structure
from refitd_client.validation.foreign import described, has_kept_manifest
from refitd_client.validation.reference import ReferenceRefusedError, read_reference
from refitd_client.validation.validate import Invalid, Options, Structure, Unknown, judge, validate

if TYPE_CHECKING:
    from refitd_plugin.memory.driver import Registered, Registry
    from refitd_plugin.update.recorder import PlanCopy


_PACKED = "F4"  # torch counts a pair of its elements as one


class SourceRefusedError(Exception):
    """A version that is not loaded. The message is a sentence that says why."""


class FullNeededError(SourceRefusedError):
    """A delta that cannot be applied to what is in memory, and nothing is wrong with either: a full version can."""


@dataclass(frozen=True, slots=True)
class VersionPlace:
    root: Path
    path: str

    @property
    def folder(self) -> Path:
        return self.root / self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSource:
    place: VersionPlace
    structure: Structure
    maps: Mapping[str, mmap.mmap] = field(repr=False)

    @property
    def inventory(self) -> str:
        return self.structure.inventory.digest

    @property
    def digest(self) -> str:
        """Equal for equal versions: what its manifest says of all files, or what its files look like."""
        manifest = self.structure.manifest
        return self.structure.signature if manifest is None else manifest.digest

    @property
    def label(self) -> str:
        manifest = self.structure.manifest
        return str(self.place.folder) if manifest is None else version_id(manifest.run, manifest.order)

    @property
    def nbytes(self) -> int:
        return sum(len(each) for each in self.maps.values())

    @property
    def is_on_device(self) -> bool:
        return False

    @property
    def cut(self) -> object:
        """By what `copies_of` cuts: the same object as long as that gives the same."""
        return None

    def copies_of(self, copies: "Sequence[PlanCopy]") -> "Sequence[PlanCopy]":
        """A load plan's copies, from `pieces`."""
        return copies

    def pieces(self) -> Mapping[str, Any]:
        """What copies are made from, by name: its tensors."""
        return self.tensors()

    def is_unchanged(self) -> bool:
        """Whether the folder still looks as it did. Cheap."""
        try:
            return signature(self.place.root, self.place.path) == self.structure.signature
        except (OSError, OpeningRefusedError):
            return False

    def registered(self, registry: "Registry", device: int) -> "dict[str, Registered] | None":
        """Its weight files, registered for a GPU; None where one cannot be, or is not what was mapped any more."""
        found: dict[str, Any] = {}
        try:
            with Folder(self.place.root, self.place.path) as folder:
                for name in self.maps:
                    with folder.open(name, self.structure.files[name]) as fd:
                        if (file := registry.of(fd, device)) is None:
                            return None
                        found[name] = file
        except (OSError, OpeningRefusedError, ChangedError):
            return None
        return found

    def tensors(self) -> dict[str, Any]:
        """Its tensors by name, as views into the mapped files, in the order of the files."""
        import torch

        found: dict[str, Any] = {}
        for file, header in self.structure.headers.items():
            for name, spec in header.tensors.items():
                dtype = getattr(torch, TORCH_NAMES[spec.dtype])
                count = (spec.end - spec.start) // dtype.itemsize
                found[name] = (
                    torch.frombuffer(
                        self.maps[file], dtype=dtype, count=count, offset=header.data_start + spec.start
                    ).reshape(spec.shape)
                    if count
                    else torch.empty(spec.shape, dtype=dtype)
                )
        return found


def place_of(path: str, root: Path | None) -> VersionPlace:
    """Where a folder is: beneath `root`, else beneath the nearest folder above it that is a root, else by itself."""
    folder = Path(path).absolute()
    nearest = [above for above in folder.parents if (above / SERVICE_FOLDER).is_dir()][:1]
    for above in ([root] if root is not None else []) + nearest:
        if above != folder and folder.is_relative_to(above):
            return VersionPlace(above, str(folder.relative_to(above)))
    return VersionPlace(folder.parent, folder.name)


def is_version(path: str, root: Path | None) -> bool:
    """Whether this folder is a version: refitd's SDK published it, or the service has sealed it."""
    place = place_of(path, root)
    return (place.folder / MANIFEST_NAME).is_file() or has_kept_manifest(place.root, place.path)


def open_version(
    place: VersionPlace, reference: Reference | None, options: Options, *, check_bytes: bool, stop: Event | None = None
) -> VersionSource:
    """Look at a version, check it, and map it. `reference`: the model that it is held against, None where that cannot
    be read.

    Raises:
        SourceRefusedError: it is not one to load into the model that `reference` describes, or it changes meanwhile.
        ReadingStoppedError: `stop` was set.
        OSError: it cannot be read.
    """
    source = mapped(place)
    verdict = judge(source.structure, reference, options)
    if verdict is None and check_bytes:
        evidence = examine(place.root, place.path, reference, options, seen=source.structure, stop=stop)
        read = validate(evidence, reference, options)
        verdict = read if isinstance(read, (Invalid, Unknown)) else None
    if verdict is not None:
        raise SourceRefusedError(f"{verdict.reason} [{verdict.code.value}]")
    if check_bytes and not source.is_unchanged():  # between the look, the mapping and the reading
        raise SourceRefusedError(f"{place.folder} changed while it was looked at")
    return source


def mapped(place: VersionPlace) -> VersionSource:
    """Look at a folder and map its weight files. Its `structure` says whether it is any good.

    Raises:
        SourceRefusedError: a file is no longer what the look saw, or of a dtype that torch does not have.
        OSError: it cannot be read.
    """
    try:
        seen = described(place.root, structure(place.root, place.path))
    except ChangedError as error:
        raise SourceRefusedError(str(error)) from error
    for name, tensor in seen.inventory.tensors.items():
        if tensor.dtype == _PACKED or tensor.dtype not in TORCH_NAMES:
            raise SourceRefusedError(f"tensor {name} has dtype {tensor.dtype}, which torch cannot hold")
    maps: dict[str, mmap.mmap] = {}
    try:
        with Folder(place.root, place.path) as folder:
            for name in seen.headers:
                with folder.open(name, seen.files[name]) as fd:
                    maps[name] = mmap.mmap(fd, seen.files[name].size, access=mmap.ACCESS_COPY)
            return VersionSource(place=place, structure=seen, maps=maps)
    except (OpeningRefusedError, ChangedError) as error:
        raise SourceRefusedError(str(error)) from error


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
    """The model that a server was started with.

    Raises:
        SourceRefusedError: it is not made of safetensors files that can be read.
        OSError: it cannot be read.
    """
    names = {file.name for file in folder.iterdir() if not file.name.startswith(".")}
    try:
        index = None
        if INDEX_NAME in names:
            index = parse_index(read_plain(folder / INDEX_NAME, MAX_INDEX_BYTES + 1, follow=True))
        layout = lay_out(names, index)
        if layout.faults:
            raise SourceRefusedError(layout.faults[0].reason)
        headers: dict[str, Header] = {}
        maps: dict[str, mmap.mmap] = {}
        for name in layout.weights:
            with (folder / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                headers[name] = read_header(file.fileno(), size)
                maps[name] = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except (HeaderRefusedError, IndexRefusedError) as error:
        raise SourceRefusedError(f"{folder} cannot be read: {error}") from error
    seen = Structure(path=folder.name, files={}, headers=headers, inventory=inventory_of(headers))
    place = VersionPlace(folder.parent, folder.name)
    return VersionSource(place=place, structure=seen, maps=maps)
