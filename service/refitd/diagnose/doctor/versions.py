"""The bytes of good versions, with --deep. A service reads a version again where its files look otherwise than they
did; this finds what changed without a trace. A version that looks otherwise is left to the service.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from threading import Event
from typing import Protocol

from refitd.diagnose.doctor.finding import CheckName, Finding, failed, good, unknown
from refitd.state.version import VersionRecord
from refitd.text import size_of
from refitd_client.contract.states import VersionState
from refitd_client.validation.examine import read_again

_MOVE_FOLDER = (
    "move its folder away: the service then takes it for LOST, and loads no engine with it; publish the step again, "
    "roll back, or put the files back from a backup"
)


class ReadProgress(Protocol):
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


async def read_versions(root: Path, known: Iterable[VersionRecord], progress: ReadProgress | None) -> list[Finding]:
    """Read every byte of every good version of the journal, and hold it against the digest that it was sealed with."""
    sealed = [version for version in known if version.state is VersionState.SEALED and version.digest is not None]
    if progress is not None:
        progress.expect(sum(version.bytes or 0 for version in sealed))
    findings: list[Finding] = []
    stop, bytes_of_good, count = Event(), 0, 0
    try:
        for number, version in enumerate(sealed, start=1):
            if progress is not None:
                progress.say(f"reading {version.path} ({number} of {len(sealed)})")
            found = await asyncio.to_thread(_read, root, version, stop, progress)
            if isinstance(found, Finding):
                findings.append(found)
            elif found:
                count, bytes_of_good = count + 1, bytes_of_good + (version.bytes or 0)
    finally:
        stop.set()  # when this is cancelled, the thread would read on to the end
    text = f"{count} of {len(sealed)} good versions were read, {size_of(bytes_of_good)}: they are as they were sealed"
    return [good(CheckName.VERSIONS, str(root), text), *findings]


def _read(root: Path, version: VersionRecord, stop: Event, progress: ReadProgress | None) -> Finding | bool:
    """What is wrong with a version, else whether it has the bytes that it had: not if the service sees to it."""
    path = version.path
    try:
        found = read_again(root, path, stop=stop, on_read=None if progress is None else progress.read)
    except FileNotFoundError:
        return False
    except OSError as error:
        text = f"{path} cannot be read to its end: {error}"
        return unknown(CheckName.VERSIONS, version.id, text, "see to its disk, or run doctor as the service's user")
    if found.digest == version.digest:
        return True
    if found.signature != version.signature:
        return False
    why = "" if found.fault is None else f" ({found.fault})"
    text = f"the bytes in {path} are not those that were sealed, though names, sizes and times are{why}"
    return failed(CheckName.VERSIONS, version.id, text, _MOVE_FOLDER)
