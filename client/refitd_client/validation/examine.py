"""Reading a checkpoint's files: the thin shell around `layout`, `header`, `inventory` and `validate`.

`signature`, `glance` and `structure` are cheap, for settling and for the check right before each load; `examine` reads
every byte. All of it is synchronous: callers on the event loop go through `asyncio.to_thread`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Event
from typing import TypeVar

from refitd_client.checkpoint.fault import Code, Defect, shown
from refitd_client.checkpoint.header import (
    MAX_TENSORS,
    METADATA_KEY,
    Header,
    HeaderRefusedError,
    TornFileError,
    read_header,
)
from refitd_client.checkpoint.index import (
    MAX_INDEX_BYTES,
    MOST_OF_A_KIND,
    CheckpointLayout,
    IndexOfDeltaError,
    IndexRefusedError,
    lay_out,
    layout_of,
    parse_index,
    read_elsewhere,
    two_saves,
)
from refitd_client.checkpoint.inventory import Inventory, Reference
from refitd_client.checkpoint.opening import CONFIG_NAME, ChangedError, FileStat, Folder, OpeningRefusedError, counts
from refitd_client.contract.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    ManifestRefusedError,
    TensorsSummary,
    digest_of_files,
    parse_manifest,
)
from refitd_client.contract.naming import ADAPTER_CONFIG_NAME, DELTA_NAME, INDEX_NAME, MANIFEST_NAME
from refitd_client.contract.states import Kind
from refitd_client.files.plain_file import hole_in, read_at
from refitd_client.validation.base import Base, delta_checks
from refitd_client.validation.contents import StretchSearch, place_of, read_contents, same_bytes
from refitd_client.validation.foreign import recognise
from refitd_client.validation.lora import (
    MAX_CONFIG_BYTES,
    AdapterConfig,
    AdapterRefusedError,
    is_adapter,
    parse_adapter,
)
from refitd_client.validation.validate import Evidence, Options, Structure, judge, pairs_of

T = TypeVar("T")
MAX_BESIDE_BYTES = 2**30  # of a configuration or a tokenizer. Every byte is read, also of a hole in a sparse file
NO_LAYOUT = CheckpointLayout({}, None)  # of what has no weight files of its own
_PAGE_BYTES = 4096  # bytes at the end of a file, of which one that is filled from its begin on has none yet
MAX_HEADERS_BYTES = 2**26  # of all files of a version; 200,000 tensors take 20 MB


def signature(root: Path, path: str) -> str:
    """What the files of `root`/`path` look like from outside; equal to `Structure.signature` while none has changed.

    Raises:
        OpeningRefusedError: the path leads out of the root or over a link.
        OSError: the folder is gone (FileNotFoundError) or cannot be listed.
    """
    with Folder(root, path) as folder:
        return folder.signature(folder.list())


def structure(root: Path, path: str) -> Structure:
    """Read the checkpoint in `root`/`path` (`path` is relative) without its weights.

    What is wrong with it, also a path that leads over a link or a file that changes meanwhile, is in `faults`.

    Raises:
        OSError: the folder is gone (FileNotFoundError), or something in it cannot be read.
    """
    try:
        awaits, foreign = None, recognise(path)
        if foreign is not None and foreign.marker is not None:
            # The marker first: what is listed after it was seen is complete.
            with Folder(root, path.rpartition("/")[0] if foreign.marker.above else path) as folder:
                awaits = None if foreign.marker.is_among(folder.list()) else foreign.marker.awaited
        with Folder(root, path) as folder:
            return replace(_Examination(folder, path).structure(), awaits=awaits)
    except OpeningRefusedError as error:
        return _nothing(path, Defect(Code.NOT_REGULAR, str(error)))


def glance(root: Path, path: str) -> Structure:
    """As `structure`, but of the files only the manifest is read: so of a delta, which has no more, all.

    Parsing the index and the headers of hundreds of tensors takes some milliseconds of the interpreter, and a reply may
    have to wait for them while many threads read a version.
    """
    try:
        with Folder(root, path) as folder:
            return _Examination(folder, path).glance()
    except OpeningRefusedError as error:
        return _nothing(path, Defect(Code.NOT_REGULAR, str(error)))


def examine(
    root: Path,
    path: str,
    reference: Reference | Base | None,
    options: Options,
    *,
    seen: Structure | None = None,
    stop: Event | None = None,
    beside: bool = False,
    fingerprinted: bool = False,
) -> Evidence:
    """Gather all that `validate` needs for a verdict. The weights are read only if the structure is acceptable.

    So a sparse file of a petabyte costs nothing: its tensors are not those of the model.

    `seen` is what `structure` returned a moment ago; it is used again if the files are the same. With `beside` only the
    files beside the weights are read. The evidence then has the manifest's digests of the weights, and counts only
    together with a proof of their tensors (`proof_digest`). With `fingerprinted` the evidence has the fingerprints of
    all tensors.

    Raises:
        ReadingStoppedError: `stop` was set.
    """
    try:
        with Folder(root, path) as folder:
            examination = _Examination(folder, path)
            if seen is None or not examination.confirms(seen):
                seen = examination.structure()
            return _read_weights(folder, seen, reference, options, stop, beside=beside, fingerprinted=fingerprinted)
    except OpeningRefusedError as error:
        return Evidence(structure=_nothing(path, Defect(Code.NOT_REGULAR, str(error))))
    except OSError as error:
        return Evidence(failure=f"{path} cannot be read: {error}")


def _read_weights(
    folder: Folder,
    seen: Structure,
    reference: Reference | Base | None,
    options: Options,
    stop: Event | None,
    *,
    beside: bool,
    fingerprinted: bool,
) -> Evidence:
    if judge(seen, reference, options) is not None:
        return Evidence(structure=seen)
    try:
        delta, files, searches = None, to_read(seen), dict[str, StretchSearch]()
        if isinstance(reference, Base) and DELTA_NAME in files:
            delta = delta_checks().open_delta(folder, files[DELTA_NAME], reference)
            searches |= delta.searches
        named = seen.manifest.files if beside and seen.manifest is not None else {}
        proved = {name: named[name].digest for name in seen.headers if name in named}
        files = {name: file for name, file in files.items() if name not in proved}
        contents = read_contents(folder, files, seen.headers, searches=searches, fingerprinted=fingerprinted, stop=stop)
        contents = replace(contents, digests=proved | dict(contents.digests))
        changes = None if delta is None else delta.contents(stop or Event())
        pairs = pairs_of(seen, reference).items()
        if beside and seen.manifest is not None:  # who proves the tensors proves their fingerprints
            told = seen.manifest.fingerprints
            copies = frozenset(copy for copy, first in pairs if copy in told and told[copy] == told.get(first))
        else:
            copies = frozenset(copy for copy, first in pairs if _is_copy(folder, seen, copy, first, stop))
        if folder.signature(folder.list()) == seen.signature:
            return Evidence(structure=seen, contents=contents, copies=copies, delta=changes)
        change = Defect(Code.CHANGED, "files were added, replaced or removed while it was read: it is read again")
    except ChangedError as error:
        change = Defect(Code.CHANGED, f"{error}: it is read again")
    return Evidence(structure=_nothing(seen.path, change))


def _is_copy(folder: Folder, seen: Structure, copy: str, first: str, stop: Event | None) -> bool:
    places = place_of(seen.headers, copy), place_of(seen.headers, first)
    with (
        folder.open(places[0].file, seen.files[places[0].file]) as one,
        folder.open(places[1].file, seen.files[places[1].file]) as other,
    ):
        return same_bytes(one, other, *places, stop)


@dataclass(frozen=True, slots=True)
class ReadAgain:
    """What was found where a version was read once more: the signature of its files, and their digest as in `Valid`.

    The digest is None where the files do not agree with each other; `fault` says why.
    """

    signature: str
    digest: str | None
    fault: str | None = None


def read_again(
    root: Path, path: str, *, stop: Event | None = None, on_read: Callable[[int], None] | None = None
) -> ReadAgain:
    """Read all of a version that was found good before, for its digest alone: equal bytes need no other verdict.

    `on_read` is called with the number of bytes that were read, in any thread.

    Raises:
        ReadingStoppedError: `stop` was set.
        OSError: the folder is gone (FileNotFoundError), cannot be read, or changes while it is read.
    """
    seen = structure(root, path)
    for fault in seen.faults:
        if not fault.code.is_proof:
            raise OSError(fault.reason)
        return ReadAgain(seen.signature, None, fault.reason)
    try:
        with Folder(root, path) as folder:
            files = to_read(seen)
            digests = read_contents(folder, files, {}, stop=stop, on_read=on_read).digests
            is_same = folder.signature(folder.list()) == seen.signature
    except (ChangedError, OpeningRefusedError) as error:
        raise OSError(str(error)) from error
    if not is_same:
        raise OSError(f"{path} changed while it was read")
    return ReadAgain(seen.signature, digest_of_files({name: (files[name].size, digests[name]) for name in digests}))


def to_read(seen: Structure) -> dict[str, FileStat]:
    """The files whose bytes make the version's digest: all that the manifest names, else those that loaders read."""
    if seen.manifest is not None:
        return {name: seen.files[name] for name in seen.manifest.files}
    beside = (INDEX_NAME, CONFIG_NAME) if seen.adapter is None else (ADAPTER_CONFIG_NAME,)
    names = [*seen.headers, *(name for name in beside if name in seen.files)]
    return {name: seen.files[name] for name in names}


def _nothing(path: str, fault: Defect) -> Structure:
    return Structure(path=path, files={}, headers={}, inventory=Inventory({}), faults=(fault,))


class _Examination:
    """One examination of a folder. Everything is read through its descriptor and compared with one listing."""

    def __init__(self, folder: Folder, path: str) -> None:
        self._folder = folder
        self._path = path
        self._listing = folder.list()
        self._files = {name: file for name, file in self._listing.items() if file.is_regular}
        self._faults: list[Defect] = []
        self._hole: str | None = None
        self._zeros: str | None = None

    def glance(self) -> Structure:
        """Read the manifest alone, and so all of a delta."""
        manifest = self._manifest()
        if manifest is not None and manifest.kind is Kind.DELTA:
            return self._delta(manifest)
        return self._made(manifest, NO_LAYOUT)

    def confirms(self, seen: Structure) -> bool:
        """Whether an earlier examination saw these very files, and all of it agreed. Nothing is read.

        What did not agree then may by now: that is always read again.
        """
        agreed = seen.path == self._path and not seen.faults and seen.awaits is None
        return agreed and seen.files == self._files and seen.signature == self._folder.signature(self._listing)

    def structure(self) -> Structure:
        """Read manifest, index and headers, and compare them with each other."""
        manifest = self._manifest()
        if manifest is not None and manifest.kind is Kind.DELTA:
            return self._delta(manifest)
        adapter = index = None
        if is_adapter(self._listing):
            adapter = self._document(ADAPTER_CONFIG_NAME, MAX_CONFIG_BYTES, Code.BAD_HEADER, parse_adapter)
        if adapter is None:
            index = self._document(INDEX_NAME, MAX_INDEX_BYTES, Code.BAD_INDEX, parse_index)
        twice = two_saves({name: file.mtime_ns for name, file in self._files.items()}, index)
        layout = lay_out(self._listing.keys(), index)
        self._faults += ([] if twice is None else [twice]) + [*layout.faults, *read_elsewhere(self._listing, layout)]
        read = layout_of(self._headers(layout.weights), index)
        if manifest is not None:
            self._faults += islice(check_manifest(manifest, self._listing, read), MOST_OF_A_KIND)
        self._faults += [*read.duplicates, *read.disagreements]
        return self._made(manifest, read, adapter)

    def _delta(self, manifest: Manifest) -> Structure:
        """Compare a delta's files with its manifest. It has no index and no headers: its tensors are its base's."""
        self._faults += islice(check_files(manifest, self._listing), MOST_OF_A_KIND)
        return self._made(manifest, NO_LAYOUT)

    def _made(
        self, manifest: Manifest | None, layout: CheckpointLayout, adapter: AdapterConfig | None = None
    ) -> Structure:
        return Structure(
            path=self._path,
            signature=self._folder.signature(self._listing),
            files=self._files,
            manifest=manifest,
            has_manifest=MANIFEST_NAME in self._listing,
            headers=layout.headers,
            inventory=layout.inventory,
            faults=tuple(self._faults),
            hole=None if manifest is not None else self._hole,
            zeros=None if manifest is not None else self._zeros,
            adapter=adapter,
        )

    def _manifest(self) -> Manifest | None:
        return self._document(MANIFEST_NAME, MAX_MANIFEST_BYTES, Code.BAD_MANIFEST, parse_manifest)

    def _document(self, name: str, limit: int, code: Code, parse: Callable[[bytes], T]) -> T | None:
        """A small file, parsed; None if it is not there or cannot be used, which `faults` say then."""
        file = self._listing.get(name)
        if file is None:
            return None
        if file.is_regular and file.size > limit:
            self._faults.append(Defect(code, f"{name} has {file.size} bytes; at most {limit} are read"))
            return None
        data = self._read(name, lambda fd, size: read_at(fd, size, 0))
        try:
            return None if data is None else parse(data)
        except (AdapterRefusedError, IndexOfDeltaError) as error:
            self._faults.append(Defect(Code.UNSUPPORTED_KIND, f"{name}: {error}"))
        except (ManifestRefusedError, IndexRefusedError) as error:
            self._faults.append(Defect(code, f"{name}: {error}"))
        return None

    def _headers(self, names: tuple[str, ...]) -> dict[str, Header]:
        headers: dict[str, Header] = {}
        tensors = length = 0
        for name in names:
            header = self._read(name, partial(self._header, name))
            if header is None:
                continue
            tensors += len(header.tensors)
            if tensors > MAX_TENSORS:
                self._faults.append(Defect(Code.BAD_HEADER, f"the files have more than {MAX_TENSORS} tensors in all"))
                break
            length += header.data_start
            if length > MAX_HEADERS_BYTES:  # one file may lie there under any number of names
                text = f"the headers of all files take more than the {MAX_HEADERS_BYTES} bytes that are read"
                self._faults.append(Defect(Code.BAD_HEADER, f"{text}: leave out what is in their {METADATA_KEY}"))
                break
            headers[name] = header
        return headers

    def _header(self, name: str, fd: int, size: int) -> Header:
        header = read_header(fd, size)
        if (hole := hole_in(fd, header.data_start)) is not None and self._hole is None:
            self._hole = f"{shown(name)} has a hole at byte {hole}"
        begin = max(header.data_start, size - _PAGE_BYTES)
        if begin < size and self._zeros is None and not any(read_at(fd, size - begin, begin)):
            self._zeros = shown(name)
        return header

    def _read(self, name: str, read: Callable[[int, int], T]) -> T | None:
        try:
            with self._folder.open(name, self._listing[name]) as fd:
                return read(fd, self._listing[name].size)
        except TornFileError as error:
            text = f"{shown(name)}: {error}: it is not written to its end"
            self._faults.append(Defect(Code.TORN_FILE, text))
        except HeaderRefusedError as error:
            text = f"{shown(name)}: {error}: write it with the safetensors library"
            self._faults.append(Defect(Code.BAD_HEADER, text))
        except OpeningRefusedError as error:
            self._faults.append(Defect(Code.NOT_REGULAR, str(error)))
        except ChangedError as error:
            self._faults.append(Defect(Code.CHANGED, str(error)))
        return None


def check_manifest(manifest: Manifest, listing: Mapping[str, FileStat], layout: CheckpointLayout) -> Iterator[Defect]:
    """How the files, their sizes and their tensors differ from what the manifest says. Pure; `validate` compares
    digests.
    """
    yield from check_files(manifest, listing)
    for name in manifest.files.keys() - layout.headers.keys():
        if name in listing and listing[name].size > MAX_BESIDE_BYTES:
            size = listing[name].size
            yield _mismatch(f"{shown(name)} has {size} bytes; beside weights at most {MAX_BESIDE_BYTES} are read")
    if layout.summary != manifest.tensors:
        yield _mismatch(
            f"the files hold {_in_words(layout.summary)}, and {MANIFEST_NAME} says {_in_words(manifest.tensors)}"
        )


def check_files(manifest: Manifest, listing: Mapping[str, FileStat]) -> Iterator[Defect]:
    """How files and sizes differ from what the manifest says. Others may lie there, but none that counts."""
    for name, file in manifest.files.items():
        found = listing.get(name)
        if found is None:
            yield Defect(Code.MISSING_FILE, f"{shown(name)} is named by {MANIFEST_NAME} and is not in the folder")
        elif not found.is_regular:
            yield Defect(Code.NOT_REGULAR, f"{shown(name)} is a {found.noun}, not a regular file")
        elif found.size != file.size:
            yield _mismatch(f"{shown(name)} has {found.size} bytes, and {MANIFEST_NAME} says {file.size}")
    for name in listing:
        if counts(name) and name != MANIFEST_NAME and name not in manifest.files:
            yield _mismatch(f"{shown(name)} is not in {MANIFEST_NAME}")


def _in_words(tensors: TensorsSummary) -> str:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in sorted(tensors.dtypes.items()))
    return f"{tensors.count} tensors of {tensors.bytes} bytes ({dtypes})"


def _mismatch(what: str) -> Defect:
    return Defect(Code.MANIFEST_MISMATCH, f"{what}: nothing may change after publishing; publish the step again")
