"""Looking at a checkpoint's files: the thin shell around `layout`, `header`, `inventory` and `validate`.

`signature` and `structure` are cheap, for settling and for the look right before each load; `examine` reads every byte.
All of it is synchronous: callers on the event loop go through `asyncio.to_thread`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from threading import Event
from typing import TypeVar

from refitd_client.checkpoint.fault import Code, Fault, shown
from refitd_client.checkpoint.inventory import Inventory, Reference, duplicates, inventory_of
from refitd_client.checkpoint.layout import (
    MAX_INDEX_BYTES,
    Index,
    IndexOfDeltaError,
    IndexRefusedError,
    check_index,
    lay_out,
    parse_index,
)
from refitd_client.checkpoint.opening import CONFIG_NAME, ChangedError, FileStat, Folder, OpeningRefusedError
from refitd_client.checkpoint.strict_header import (
    MAX_TENSORS,
    METADATA_KEY,
    Header,
    HeaderRefusedError,
    TornFileError,
    read_header,
)
from refitd_client.contract.manifest import MAX_MANIFEST_BYTES, Manifest, ManifestRefusedError, parse_manifest
from refitd_client.contract.naming import ADAPTER_CONFIG_NAME, DELTA_NAME, INDEX_NAME, MANIFEST_NAME
from refitd_client.contract.states import Kind
from refitd_client.files.file_bytes import read_at
from refitd_client.validation.claims import check_files, check_manifest
from refitd_client.validation.contents import read_contents
from refitd_client.validation.conventions import recognise
from refitd_client.validation.delta import Base
from refitd_client.validation.delta_file import look_into
from refitd_client.validation.evidence import Evidence, Structure
from refitd_client.validation.lora import (
    MAX_CONFIG_BYTES,
    AdapterConfig,
    AdapterRefusedError,
    is_adapter,
    parse_adapter,
)
from refitd_client.validation.validate import Options, judge

T = TypeVar("T")
MAX_HEADERS_BYTES = 2**26  # of all files of a version; 200,000 tensors take 20 MB
_MOST_OF_A_KIND = 3  # one tensor in the wrong place often means all of them


def signature(root: Path, path: str) -> str:
    """What the files of `root`/`path` look like from outside; equal to `Structure.signature` while none has changed.

    Raises:
        OpeningRefusedError: the path leads out of the root or over a link.
        OSError: the folder is gone (FileNotFoundError) or cannot be listed.
    """
    with Folder(root, path) as folder:
        return folder.signature(folder.list())


def structure(root: Path, path: str) -> Structure:
    """Look at the checkpoint in `root`/`path` (`path` is relative) without reading its weights.

    What is wrong with it, also a path that leads over a link or a file that changes meanwhile, is in `faults`.

    Raises:
        OSError: the folder is gone (FileNotFoundError), or something in it cannot be read.
    """
    try:
        # The marker first: what is listed after it was seen is all there.
        awaits = _awaited(root, path)
        with Folder(root, path) as folder:
            return replace(_Look(folder, path).structure(), awaits=awaits)
    except OpeningRefusedError as error:
        return _nothing(path, Fault(Code.NOT_REGULAR, str(error)))


def glance(root: Path, path: str) -> Structure:
    """As `structure`, and no more of it than whose version it is and what it looks like from outside.

    Neither index nor headers are read: to parse hundreds of tensors takes some milliseconds of the interpreter, for
    which a reply may have to wait while a version is read by many threads.
    """
    try:
        with Folder(root, path) as folder:
            return _Look(folder, path).glance()
    except OpeningRefusedError as error:
        return _nothing(path, Fault(Code.NOT_REGULAR, str(error)))


def _awaited(root: Path, path: str) -> str | None:
    """What the trainer whose folder it is writes last, where that is not there yet."""
    foreign = recognise(path)
    if foreign is None or foreign.marker is None:
        return None
    at = path.rpartition("/")[0] if foreign.marker.above else path
    with Folder(root, at) as folder:
        return None if foreign.marker.is_among(folder.list()) else foreign.marker.awaited


def examine(
    root: Path,
    path: str,
    reference: Reference | Base | None,
    options: Options,
    *,
    seen: Structure | None = None,
    stop: Event | None = None,
) -> Evidence:
    """Gather all that `validate` needs for a verdict. The weights are read only where the structure is acceptable.

    So a sparse file of a petabyte costs nothing: its tensors are not those of the model. `seen` is what `structure`
    found a moment ago; it stands in for another look while the files are the same. `stop` ends the reading.

    Raises:
        ReadingStoppedError: `stop` was set.
    """
    try:
        with Folder(root, path) as folder:
            look = _Look(folder, path)
            seen = seen if seen is not None and look.confirms(seen) else look.structure()
            return _examine(folder, seen, reference, options, stop)
    except OpeningRefusedError as error:
        return Evidence(structure=_nothing(path, Fault(Code.NOT_REGULAR, str(error))))
    except OSError as error:
        return Evidence(failure=f"{path} cannot be read: {error}")


def _examine(
    folder: Folder, seen: Structure, reference: Reference | Base | None, options: Options, stop: Event | None
) -> Evidence:
    if judge(seen, reference, options) is not None:
        return Evidence(structure=seen)
    try:
        delta, files = None, to_read(seen)
        if isinstance(reference, Base) and DELTA_NAME in files:
            delta = look_into(folder, files[DELTA_NAME], reference, stop=stop)
        contents = read_contents(folder, files, seen.headers, stop=stop)
        if folder.signature(folder.list()) == seen.signature:
            return Evidence(structure=seen, contents=contents, delta=delta)
        change = Fault(Code.CHANGED, "files were added, replaced or removed while it was read: it is looked at again")
    except ChangedError as error:
        change = Fault(Code.CHANGED, f"{error}: it is looked at again")
    return Evidence(structure=_nothing(seen.path, change))


def to_read(seen: Structure) -> dict[str, FileStat]:
    """The files whose bytes make the version's digest: all that the manifest names, else those that loaders read."""
    if seen.manifest is not None:
        return {name: seen.files[name] for name in seen.manifest.files}
    beside = (INDEX_NAME, CONFIG_NAME) if seen.adapter is None else (ADAPTER_CONFIG_NAME,)
    names = [*seen.headers, *(name for name in beside if name in seen.files)]
    return {name: seen.files[name] for name in names}


def _nothing(path: str, fault: Fault) -> Structure:
    return Structure(path=path, files={}, headers={}, inventory=Inventory({}), faults=(fault,))


class _Look:
    """One look at a folder. Everything is read through its descriptor and held against one listing."""

    def __init__(self, folder: Folder, path: str) -> None:
        self._folder = folder
        self._path = path
        self._listing = folder.list()
        self._faults: list[Fault] = []

    def glance(self) -> Structure:
        """Read the manifest alone."""
        return self._without_headers(self._manifest())

    def confirms(self, seen: Structure) -> bool:
        """Whether an earlier look saw these very files, and all of it agreed. Nothing is read.

        What did not agree may by now: that is always looked at anew.
        """
        agreed = seen.path == self._path and not seen.faults and seen.awaits is None
        return agreed and seen.files == self._files() and seen.signature == self._folder.signature(self._listing)

    def structure(self) -> Structure:
        """Read manifest, index and headers, and hold them against each other."""
        manifest = self._manifest()
        if manifest is not None and manifest.kind is Kind.DELTA:
            return self._delta(manifest)
        adapter = self._adapter()
        index = self._index() if adapter is None else None
        layout = lay_out(self._listing.keys(), index)
        self._faults += layout.faults
        headers = self._headers(layout.weights)
        self._check(manifest, index, headers)
        return Structure(
            path=self._path,
            signature=self._folder.signature(self._listing),
            files=self._files(),
            manifest=manifest,
            has_manifest=MANIFEST_NAME in self._listing,
            headers=headers,
            inventory=inventory_of(headers),
            faults=tuple(self._faults),
            adapter=adapter,
        )

    def _delta(self, manifest: Manifest) -> Structure:
        """A delta has no index and no headers: the tensors that it speaks of are its base's."""
        self._faults += islice(check_files(manifest, self._listing), _MOST_OF_A_KIND)
        return self._without_headers(manifest)

    def _files(self) -> dict[str, FileStat]:
        return {name: file for name, file in self._listing.items() if file.is_regular}

    def _without_headers(self, manifest: Manifest | None) -> Structure:
        return Structure(
            path=self._path,
            signature=self._folder.signature(self._listing),
            files=self._files(),
            manifest=manifest,
            has_manifest=MANIFEST_NAME in self._listing,
            headers={},
            inventory=Inventory({}),
            faults=tuple(self._faults),
        )

    def _check(self, manifest: Manifest | None, index: Index | None, headers: Mapping[str, Header]) -> None:
        found: list[Iterator[Fault]] = [duplicates(headers)]
        if manifest is not None:
            found.insert(0, check_manifest(manifest, self._listing, headers))
        if index is not None:
            found.append(check_index(index, {name: header.tensors for name, header in headers.items()}))
        for faults in found:
            self._faults += islice(faults, _MOST_OF_A_KIND)

    def _manifest(self) -> Manifest | None:
        data = self._document(MANIFEST_NAME, MAX_MANIFEST_BYTES, Code.BAD_MANIFEST)
        try:
            return None if data is None else parse_manifest(data)
        except ManifestRefusedError as error:
            self._faults.append(Fault(Code.BAD_MANIFEST, f"{MANIFEST_NAME}: {error}"))
            return None

    def _adapter(self) -> AdapterConfig | None:
        if not is_adapter(self._listing):
            return None
        data = self._document(ADAPTER_CONFIG_NAME, MAX_CONFIG_BYTES, Code.BAD_HEADER)
        try:
            return None if data is None else parse_adapter(data)
        except AdapterRefusedError as error:
            self._faults.append(Fault(Code.UNSUPPORTED_KIND, f"{ADAPTER_CONFIG_NAME}: {error}"))
            return None

    def _index(self) -> Index | None:
        data = self._document(INDEX_NAME, MAX_INDEX_BYTES, Code.BAD_INDEX)
        try:
            return None if data is None else parse_index(data)
        except IndexOfDeltaError as error:
            self._faults.append(Fault(Code.UNSUPPORTED_KIND, f"{INDEX_NAME}: {error}"))
            return None
        except IndexRefusedError as error:
            self._faults.append(Fault(Code.BAD_INDEX, f"{INDEX_NAME}: {error}"))
            return None

    def _document(self, name: str, limit: int, code: Code) -> bytes | None:
        file = self._listing.get(name)
        if file is None:
            return None
        if file.is_regular and file.size > limit:
            self._faults.append(Fault(code, f"{name} has {file.size} bytes; at most {limit} are read"))
            return None
        return self._read(name, _whole)

    def _headers(self, names: tuple[str, ...]) -> dict[str, Header]:
        headers: dict[str, Header] = {}
        tensors = length = 0
        for name in names:
            header = self._read(name, read_header)
            if header is None:
                continue
            tensors += len(header.tensors)
            if tensors > MAX_TENSORS:
                self._faults.append(Fault(Code.BAD_HEADER, f"the files have more than {MAX_TENSORS} tensors in all"))
                break
            length += header.data_start
            if length > MAX_HEADERS_BYTES:  # one file may lie there under any number of names
                text = f"the headers of all files take more than the {MAX_HEADERS_BYTES} bytes that are read"
                self._faults.append(Fault(Code.BAD_HEADER, f"{text}: leave out what is in their {METADATA_KEY}"))
                break
            headers[name] = header
        return headers

    def _read(self, name: str, read: Callable[[int, int], T]) -> T | None:
        try:
            with self._folder.open(name, self._listing[name]) as fd:
                return read(fd, self._listing[name].size)
        except HeaderRefusedError as error:
            self._faults.append(_refused(name, error))
        except OpeningRefusedError as error:
            self._faults.append(Fault(Code.NOT_REGULAR, str(error)))
        except ChangedError as error:
            self._faults.append(Fault(Code.CHANGED, str(error)))
        return None


def _refused(name: str, error: HeaderRefusedError) -> Fault:
    if isinstance(error, TornFileError):
        return Fault(Code.TORN_FILE, f"{shown(name)}: {error}: it is still being written, or its writing was cut off")
    return Fault(Code.BAD_HEADER, f"{shown(name)}: {error}: write it with the safetensors library")


def _whole(fd: int, size: int) -> bytes:
    """The whole of a small file."""
    return read_at(fd, size, 0)
