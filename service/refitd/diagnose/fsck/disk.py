"""What lies under the root: a shell that looks and changes nothing but the service's own clock file."""

import asyncio
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event

from refitd.catalog.files import Files, Unreadable
from refitd.diagnose.fsck.facts import CopyFacts, DiskFacts, Foreign
from refitd.diagnose.fsck.leftovers import TRASH_PATH
from refitd.diagnose.fsck.telling import Telling
from refitd.materialize.disk import DiskCopies
from refitd.reclaim.folders import DiskFolders
from refitd.root.leftovers import Incoming, Slot
from refitd.root.scan import MAX_DEPTH, Listing
from refitd.state.copy import Copy
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.opening import ChangedError, FileStat, Folder, OpeningRefusedError
from refitd_client.contract.manifest import digest_of_files
from refitd_client.contract.naming import (
    INCOMING_PREFIX,
    SERVICE_FOLDER,
    NameRefusedError,
    check_run,
    parse_version_folder,
)
from refitd_client.contract.states import VersionState
from refitd_client.fingerprint import to_text
from refitd_client.validation.contents import read_contents
from refitd_client.validation.examine import structure, to_read

MAX_FOREIGN = 20


async def look_at_disk(
    root: Path,
    files: Files,
    versions: Iterable[VersionRecord],
    copies: DiskCopies,
    *,
    deep: bool,
    incoming_ttl: float,
    tell: Telling,
) -> DiskFacts:
    """Look. `deep` reads every byte of every sealed version; `tell` hears what is being read."""
    versions = list(versions)
    tell.say("listing the root")
    listing = await files.scan()
    signatures = await files.signatures(sorted({version.path for version in versions}))
    sealed = [v for v in versions if v.state is VersionState.SEALED and signatures[v.path] == v.signature]
    digests: dict[str, str | Unreadable] = {}
    if deep:
        tell.expect(sum(version.bytes or 0 for version in sealed))
    for number, version in enumerate(sealed if deep else ()):
        tell.say(f"reading {version.path} ({number + 1} of {len(sealed)})")
        digests[version.path] = await _digest(root, version.path, tell)
    known = frozenset(version.path for version in versions)
    foreign = await asyncio.to_thread(lambda: list(_foreign(root, "", known, MAX_DEPTH)))
    return DiskFacts(
        listing=listing,
        signatures=signatures,
        digests=digests,
        incoming=await _incoming(root, listing.runs, incoming_ttl) if isinstance(listing, Listing) else (),
        trash=await asyncio.to_thread(_trash, root),
        slots=await _slots(root),
        copies=[await _copy(root, copies, copy, versions, deep=deep, tell=tell) for copy in await _survey(copies)],
        foreign=foreign[:MAX_FOREIGN],
        unlisted=max(len(foreign) - MAX_FOREIGN, 0),
    )


async def _digest(root: Path, path: str, tell: Telling) -> str | Unreadable:
    stop = Event()
    try:
        return await asyncio.to_thread(_read_digest, root, path, stop, tell)
    except (OSError, OpeningRefusedError, ChangedError) as error:
        return Unreadable(str(error))
    finally:
        stop.set()  # when this is cancelled, the thread would read on to the end


def _read_digest(root: Path, path: str, stop: Event, tell: Telling) -> str:
    seen = structure(root, path)
    with Folder(root, path) as folder:
        files = to_read(seen)
        digests = read_contents(folder, files, seen.headers, stop=stop, tell=tell.read).digests
    return digest_of_files({name: (files[name].size, digest) for name, digest in digests.items()})


async def _incoming(root: Path, runs: Iterable[str], older_than: float) -> list[Incoming]:
    if not (root / SERVICE_FOLDER).exists():
        return []  # no service was ever here, and looking would leave a trace
    with suppress(OSError):  # a root that cannot be written has no clock to measure ages by
        return await DiskFolders(root).survey(sorted(runs), older_than)
    return []


def _trash(root: Path) -> list[str]:
    with suppress(FileNotFoundError):
        return sorted(os.listdir(root / TRASH_PATH))
    return []


async def _survey(copies: DiskCopies) -> list[Copy]:
    with suppress(OSError):  # a root that cannot be read: the scan has said so
        return await copies.survey()
    return []


async def _copy(
    root: Path, copies: DiskCopies, copy: Copy, versions: Iterable[VersionRecord], *, deep: bool, tell: Telling
) -> CopyFacts:
    version = next((v for v in versions if v.id == copy.holds and v.digest == copy.digest), None)
    if not deep or version is None:
        return CopyFacts(copy=copy)
    tell.say(f"reading {copy.path}")
    tell.expect(copy.bytes)
    found = await copies.fingerprints(copy)
    tell.read(copy.bytes)
    if isinstance(found, Unreadable):
        return CopyFacts(copy=copy, odd=found)
    promised = await asyncio.to_thread(_promised, root, version)
    odd = next((name for name, text in promised.items() if to_text(found.get(name, 0)) != text), None)
    return CopyFacts(copy=copy, odd=None if odd is None else f"tensor {odd} is not what that version has")


def _promised(root: Path, version: VersionRecord) -> dict[str, str]:
    """The fingerprints that a version's manifest has; none where it cannot be read: that is told elsewhere."""
    with suppress(OSError):
        manifest = structure(root, version.path).manifest
        return {} if manifest is None else manifest.fingerprints
    return {}


async def _slots(root: Path) -> list[Slot]:
    with suppress(OSError):  # a root that cannot be read: the scan has said so
        return await DiskFolders(root).slots()
    return []


def _foreign(root: Path, run: str, known: frozenset[str], depth: int) -> Iterator[Foreign]:
    """What is no run, no version, nothing of a publisher's and not the service's own. Links are not followed."""
    try:
        entries = sorted(os.scandir(root / run), key=lambda entry: entry.name)
    except OSError:
        return  # the scan has said so
    for entry in entries:
        path = f"{run}/{entry.name}" if run else entry.name
        if path in known or _is_ours(entry.name, run):
            continue
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            yield Foreign(path=path, noun=FileStat.of(status).noun)
        elif not _is_run(path):
            yield Foreign(path=path, noun="folder")
        elif depth > 0:
            yield from _foreign(root, path, known, depth - 1)


def _is_ours(name: str, run: str) -> bool:
    if not run:
        return name == SERVICE_FOLDER
    return parse_version_folder(name) is not None or name.startswith((INCOMING_PREFIX, ".publisher."))


def _is_run(path: str) -> bool:
    try:
        check_run(path)
    except NameRefusedError:
        return False
    return True
