"""A delta on disk: looked at, checked and read, whole, before anything is written.

Its folder is opened beneath the root and no link is followed, as for full versions. The file is read and not mapped:
what is checked is what is applied. docs/delta-format.md says what it holds.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from weakref import finalize

import numpy as np

from refitd_client.checkpoint.fault import shown
from refitd_client.checkpoint.inventory import Reference
from refitd_client.checkpoint.opening import ChangedError, FileStat, Folder, OpeningRefusedError
from refitd_client.contract.manifest import MAX_MANIFEST_BYTES, Manifest, ManifestRefusedError, parse_manifest
from refitd_client.contract.naming import DELTA_NAME, MANIFEST_NAME, version_id
from refitd_client.contract.states import Kind
from refitd_client.delta import Delta, DeltaFile, DeltaRefusedError, parse_delta
from refitd_client.delta.change import nonfinite_in
from refitd_client.delta.checks import most_bytes_on
from refitd_client.delta.head import Head
from refitd_client.delta.reader import MAX_BYTES, check_memory
from refitd_client.files.plain_file import fill
from refitd_client.validation.base import Base
from refitd_client.validation.contents import read_whole
from refitd_plugin.delta.layout import Allocate, LaidOutDelta, Placements, in_memory, lay_out
from refitd_plugin.memory.source import SourceRefusedError, VersionPlace

_DELTA_FILES = (MANIFEST_NAME, DELTA_NAME)


class DeltaHandle:
    """A delta's file, held open: it can be read again whatever became of its folder. Closed when it is collected."""

    def __init__(self, fd: int, place: VersionPlace, base: str, label: str) -> None:
        """The descriptor `fd` stays the caller's."""
        self._fd = os.dup(fd)
        self._size = os.fstat(fd).st_size
        self.place, self.base, self.label = place, base, label
        finalize(self, os.close, self._fd)

    def opened(self) -> int:
        """A descriptor of the file, which the caller closes."""
        return os.dup(self._fd)

    def read(self) -> Delta:
        """Read the delta once more. Raises SourceRefusedError: the file is not what it was; OSError: it cannot
        be read.
        """
        if os.fstat(self._fd).st_size != self._size:  # before there is room for it: it may be of any size now
            raise SourceRefusedError(f"the changes to {self.label} are not what they were: their file has another size")
        data = np.empty(self._size, np.uint8)
        fill(self._fd, data.data, 0)
        try:
            return parse_delta(data.data)
        except DeltaRefusedError as error:
            raise SourceRefusedError(f"the changes to {self.label} are not what they were: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaChanges:
    """A delta, in memory.

    `files` is what its files looked like from outside, `handle` its file, held open, and `results` the fingerprints
    that it promises of the tensors that it changes. `delta` is there where this process has parsed it, and `laid` where
    it was laid out by `placements` already. Buffers that `laid` lies in are not reused as long as the `lease` lives.
    """

    place: VersionPlace
    manifest: Manifest
    files: tuple[FileStat, ...]
    handle: DeltaHandle = field(repr=False)
    results: Mapping[str, int] = field(repr=False)
    nbytes: int
    delta: Delta | None = field(default=None, repr=False)
    placements: Placements | None = field(default=None, repr=False)
    laid: LaidOutDelta | None = field(default=None, repr=False)
    lease: object = field(default=None, repr=False)

    @property
    def base(self) -> str:
        return self.handle.base

    @property
    def label(self) -> str:
        return self.handle.label

    @property
    def digest(self) -> str:
        return self.manifest.digest

    def read(self) -> Delta:
        """The changes. Raises as `DeltaHandle.read`."""
        return self.handle.read() if self.delta is None else self.delta

    def is_unchanged(self) -> bool:
        """Whether the folder still looks as it did. Cheap."""
        try:
            with Folder(self.place.root, self.place.path) as folder:
                listing = folder.list()
        except (OSError, OpeningRefusedError):
            return False
        return tuple(listing.get(name) for name in _DELTA_FILES) == self.files


def is_delta(path: str) -> bool:
    """Whether a version's folder holds changes in place of tensors."""
    return (Path(path) / DELTA_NAME).is_file()


def most_memory(reference: Reference | None) -> int:
    """Bytes of memory that a delta may take in an engine that was started on a model, where that is known.

    A delta changes each element once. Twice of that: a version may have wider types than the model, before casts.
    """
    return MAX_BYTES if reference is None else 2 * most_bytes_on(Base("", reference.inventory, {}))


def open_changes(
    place: VersionPlace,
    *,
    check_bytes: bool,
    allocate: Allocate = in_memory,
    placements: Placements | None = None,
    most: int = MAX_BYTES,
) -> DeltaChanges:
    """Look at a delta, check it, read it, and lay it out by `placements`. `check_bytes`: whether to look for values
    that are NaN or infinite. `allocate`: gives memory for the file, once its header was found good, and for what is
    laid out. `most`: bytes of memory that it may take.

    Raises:
        SourceRefusedError: it is none that may be applied to anything, or not along `placements`.
        FullNeededError: `placements` are none for it. OSError: it cannot be read.
    """
    try:
        with Folder(place.root, place.path) as folder:
            listing = folder.list()
            files = {name: listing[name] for name in _DELTA_FILES}
            manifest = parse_manifest(bytes(_read(folder, MANIFEST_NAME, files, MAX_MANIFEST_BYTES, in_memory)[0]))
            head = _checked_head(folder, files, most)  # before memory of that size is taken
            data, digest = _read(folder, DELTA_NAME, files, files[DELTA_NAME].size, allocate)
            delta = _checked(manifest, data, digest, place, head)
            with folder.open(DELTA_NAME, files[DELTA_NAME]) as fd:
                handle = DeltaHandle(fd, place, delta.base, delta.version)
    except KeyError as error:
        raise SourceRefusedError(f"{place.folder} has no {error.args[0]}") from error
    except (OpeningRefusedError, ChangedError, ManifestRefusedError) as error:
        raise SourceRefusedError(f"{place.folder}: {error}") from error
    for name, count in nonfinite_in(delta.changes).items() if check_bytes else ():
        raise SourceRefusedError(
            f"tensor {shown(name)} gets {count} non-finite values (NaN or infinity): the trainer has diverged "
            "[non-finite]"
        )
    return DeltaChanges(
        place=place,
        manifest=manifest,
        files=tuple(files.values()),
        handle=handle,
        results={name: change.result for name, change in delta.changes.items()},
        nbytes=sum(change.indices.nbytes + change.values.nbytes for change in delta.changes.values()),
        delta=delta,
        placements=placements,
        laid=None if placements is None else lay_out(delta.changes, placements, allocate),
    )


def _checked_head(folder: Folder, files: dict[str, FileStat], most: int) -> Head:
    """Check how much memory a delta takes, before it takes any: a file with holes takes no room on its disk."""
    try:
        with folder.open(DELTA_NAME, files[DELTA_NAME]) as fd:
            head = DeltaFile(fd).head
            check_memory(head, most)
            return head
    except DeltaRefusedError as error:
        raise SourceRefusedError(f"{DELTA_NAME} is no delta to be used: {error}") from error


def _read(
    folder: Folder, name: str, files: dict[str, FileStat], limit: int, allocate: Allocate
) -> tuple[memoryview, str]:
    """The whole of a file, and its digest."""
    if files[name].size > limit:
        raise SourceRefusedError(f"{name} has {files[name].size} bytes; at most {limit} are read")
    data = allocate(files[name].size)
    with folder.open(name, files[name]) as fd:
        return data.data, read_whole(fd, data)


def _checked(manifest: Manifest, data: memoryview, digest: str, place: VersionPlace, head: Head) -> Delta:
    """Hold file, manifest and delta against each other. `head` is the header as it was before the file was read."""
    if manifest.kind is not Kind.DELTA:
        raise SourceRefusedError(f"{place.folder} holds changes, and its manifest says kind {manifest.kind.value}")
    said = manifest.files.get(DELTA_NAME)
    if said is None or said.size != len(data) or said.digest != digest:
        raise SourceRefusedError(f"{DELTA_NAME} is not what refit.json says it is: its bytes were damaged")
    try:
        delta = parse_delta(data, digested=True, known=head)
    except DeltaRefusedError as error:
        raise SourceRefusedError(f"{DELTA_NAME} is no delta to be used: {error}") from error
    if (delta.base, delta.version) != (manifest.base, version_id(manifest.run, manifest.order)):
        raise SourceRefusedError(
            f"{DELTA_NAME} leads from {shown(delta.base)} to {shown(delta.version)}, and refit.json says otherwise"
        )
    for name, change in delta.changes.items():
        if manifest.fingerprints and manifest.fingerprints.get(name) != f"{change.result:016x}":
            raise SourceRefusedError(f"refit.json has another fingerprint for tensor {shown(name)} than {DELTA_NAME}")
    return delta
