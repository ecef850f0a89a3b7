"""What lies under the root: a look that changes nothing but the service's own clock file."""

import asyncio
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Protocol

from refitd.catalog.files import Files, Unreadable
from refitd.materialize.disk import DiskCopies
from refitd.reclaim.folders import DiskFolders
from refitd.root.outcome import Incoming, Slot
from refitd.root.scan import MAX_DEPTH, Listing, ListingFailed
from refitd.state.copy import Copy
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.opening import FileStat
from refitd_client.contract.naming import (
    INCOMING_PREFIX,
    SERVICE_FOLDER,
    TRASH,
    InvalidNameError,
    check_run,
    parse_version_folder,
)
from refitd_client.contract.states import VersionState
from refitd_client.fingerprint import to_text
from refitd_client.validation.examine import read_again, structure

TRASH_PATH = f"{SERVICE_FOLDER}/{TRASH}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignEntry:
    """Something under the root that refitd never touches: its path and what it is."""

    path: str
    noun: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFacts:
    """A copy that deltas are applied to. `odd` (only with --deep) is why its contents are not those that it says."""

    copy: Copy
    odd: str | Unreadable | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """The root. `signatures` and `digests` (only with --deep) are by path; None where nothing is there."""

    listing: Listing | ListingFailed
    signatures: Mapping[str, str | Unreadable | None] = field(default_factory=dict[str, str | Unreadable | None])
    digests: Mapping[str, str | Unreadable] = field(default_factory=dict[str, str | Unreadable])
    incoming: Sequence[Incoming] = ()
    trash: Sequence[str] = ()
    slots: Sequence[Slot] = ()
    copies: Sequence[CopyFacts] = ()
    foreign: Sequence[ForeignEntry] = ()
    unlisted: int = 0


MAX_FOREIGN = 20


class CheckProgress(Protocol):
    """Shows what is read, and how much of it. Must not raise."""

    def say(self, text: str) -> None:
        """A step begins; `text` names it."""
        ...

    def expect(self, count: int) -> None:
        """`count` more bytes are going to be read."""
        ...

    def read(self, count: int) -> None:
        """`count` more bytes were read. Called in any thread."""
        ...


class NoProgress:
    """Shows nothing."""

    def say(self, text: str) -> None:
        """See `CheckProgress`."""

    def expect(self, count: int) -> None:
        """See `CheckProgress`."""

    def read(self, count: int) -> None:
        """See `CheckProgress`."""


async def look_at_disk(
    root: Path,
    files: Files,
    versions: Iterable[VersionRecord],
    copies: DiskCopies,
    *,
    deep: bool,
    incoming_ttl: float,
    progress: CheckProgress,
) -> DiskFacts:
    """Look at everything under the root.

    Args:
        root: its folder.
        files: lists it, and reads signatures.
        versions: those of the journal.
        copies: the copies that deltas are applied to.
        deep: read every byte of every sealed version and of every copy.
        incoming_ttl: seconds after which what a publisher left is abandoned.
        progress: shows what is read.
    """
    versions = list(versions)
    progress.say("listing the root")
    listing = await files.scan()
    signatures = await files.signatures(sorted({version.path for version in versions}))
    sealed = [v for v in versions if v.state is VersionState.SEALED and isinstance(signatures[v.path], str)]
    digests: dict[str, str | Unreadable] = {}
    if deep:
        progress.expect(sum(version.bytes or 0 for version in sealed))
    for number, version in enumerate(sealed if deep else ()):
        progress.say(f"reading {version.path} ({number + 1} of {len(sealed)})")
        digests[version.path] = await _digest(root, version.path, progress)
    folders = DiskFolders(root)
    incoming: list[Incoming] = []
    slots: list[Slot] = []
    found: list[Copy] = []
    # Where no service ever was, looking for what publishers left would leave a trace.
    if isinstance(listing, Listing) and (root / SERVICE_FOLDER).exists():
        with suppress(OSError):  # a root that cannot be written has no clock to measure ages by
            incoming = await folders.survey(sorted(listing.runs), incoming_ttl)
    with suppress(OSError):  # the listing says that a root cannot be read
        slots = await folders.slots()
    with suppress(OSError):
        found = await copies.survey()
    known = frozenset(version.path for version in versions)
    foreign = await asyncio.to_thread(lambda: list(_foreign(root, "", known, MAX_DEPTH)))
    return DiskFacts(
        listing=listing,
        signatures=signatures,
        digests=digests,
        incoming=incoming,
        trash=await asyncio.to_thread(_trash, root),
        slots=slots,
        copies=[await _copy(root, copies, copy, versions, deep=deep, progress=progress) for copy in found],
        foreign=foreign[:MAX_FOREIGN],
        unlisted=max(len(foreign) - MAX_FOREIGN, 0),
    )


async def _digest(root: Path, path: str, progress: CheckProgress) -> str | Unreadable:
    stop = Event()
    try:
        found = await asyncio.to_thread(read_again, root, path, stop=stop, on_read=progress.read)
        return found.digest or Unreadable(found.fault or path)
    except OSError as error:
        return Unreadable(str(error))
    finally:
        stop.set()  # when this is cancelled, the thread would read on to the end


async def _copy(
    root: Path,
    copies: DiskCopies,
    copy: Copy,
    versions: Iterable[VersionRecord],
    *,
    deep: bool,
    progress: CheckProgress,
) -> CopyFacts:
    version = next((v for v in versions if v.id == copy.holds and v.digest == copy.digest), None)
    if not deep or version is None:
        return CopyFacts(copy=copy)
    progress.say(f"reading {copy.path}")
    progress.expect(copy.bytes)
    found = await copies.fingerprints(copy)
    progress.read(copy.bytes)
    if isinstance(found, Unreadable):
        return CopyFacts(copy=copy, odd=found)
    promised = await asyncio.to_thread(_promised, root, version)
    odd = next((name for name, text in promised.items() if to_text(found.get(name, 0)) != text), None)
    return CopyFacts(copy=copy, odd=None if odd is None else f"tensor {odd} is not what that version has")


def _promised(root: Path, version: VersionRecord) -> dict[str, str]:
    """The fingerprints that a version's manifest has; none where it cannot be read, which another finding reports."""
    with suppress(OSError):
        manifest = structure(root, version.path).manifest
        return {} if manifest is None else manifest.fingerprints
    return {}


def _trash(root: Path) -> list[str]:
    with suppress(FileNotFoundError):
        return sorted(os.listdir(root / TRASH_PATH))
    return []


def _foreign(root: Path, run: str, known: frozenset[str], depth: int) -> Iterator[ForeignEntry]:
    """What is no run, no version, nothing of a publisher's and not the service's own. Links are not followed."""
    try:
        entries = sorted(os.scandir(root / run), key=lambda entry: entry.name)
    except OSError:
        return  # the listing says so
    for entry in entries:
        path = f"{run}/{entry.name}" if run else entry.name
        is_publishers = parse_version_folder(entry.name) is not None
        is_publishers |= entry.name.startswith((INCOMING_PREFIX, ".publisher."))
        if path in known or (is_publishers if run else entry.name == SERVICE_FOLDER):
            continue
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            yield ForeignEntry(path=path, noun=FileStat.of(status).noun)
        elif not _is_run(path):
            yield ForeignEntry(path=path, noun="folder")
        elif depth > 0:
            yield from _foreign(root, path, known, depth - 1)


def _is_run(path: str) -> bool:
    try:
        check_run(path)
    except InvalidNameError:
        return False
    return True
