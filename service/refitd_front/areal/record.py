"""The watch of AReaL's name-resolve record, for trainers whose own update of engines is switched off.

When a checkpoint is complete, the trainer adds `{user}/{experiment}/{trial}/update_weights_from_disk/{N-1}`: the key
has the old version, and the folder the new one, `weight_update_v{N}` (`weight_update` in older releases). As files:

    {trial}/update_weights_from_disk/{N-1}/ENTRY      written beside and renamed; holds the time as a number

Which entry a version comes from stands in its manifest, so that after a restart it is not published again.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from refitd.root.handle import LOOK_TIMEOUT_SECONDS, RootThreads
from refitd_client import RefitError
from refitd_front.areal.updates import Updates

EVERY_SECONDS = 0.2
RECORD_AGAIN_SECONDS = 5.0  # before a checkpoint that failed is tried again: what fills a disk may go
KEY = "update_weights_from_disk"
METADATA = "areal-record"
Entry = tuple[int, int]
AnswerT = TypeVar("AnswerT")

log = structlog.get_logger("refitd")


class RecordWatch:
    """Publishes what the record of one trial announces. `weights` is the folder that its checkpoints lie in."""

    def __init__(self, trial: Path, weights: Path, updates: Updates) -> None:
        self._record = trial / KEY
        self._weights = weights
        self._updates = updates
        self._seen: dict[int, Entry] = {}
        self._threads = RootThreads()
        self._has_begun = False
        self._fault: str | None = None

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            is_well = await self.look()
            await asyncio.sleep(EVERY_SECONDS if is_well else RECORD_AGAIN_SECONDS)

    async def look(self) -> bool:
        """Publish the newest checkpoint since the last look: engines take no other.

        Returns:
            False where that failed: then it is still new at the next look, and the fault is logged once.
        """
        try:
            await self._look()
        except (RefitError, OSError, ValueError) as error:
            if self._fault != str(error):
                log.error("AReaL's checkpoint did not become a version", record=str(self._record), error=str(error))
            self._fault = str(error)
            return False
        self._fault = None
        return True

    async def _look(self) -> None:
        entries = await self._asked(partial(_entries, self._record))
        if not self._has_begun:
            self._seen = _up_to(await self._asked(self._updates.newest_metadata), entries)
            self._has_begun = True
        fresh = [version for version, entry in entries.items() if self._seen.get(version) != entry]
        if fresh:
            await self._publish(newest := max(fresh, key=lambda version: entries[version]), entries[newest])
        self._seen = entries

    async def _asked(self, call: Callable[[], AnswerT]) -> AnswerT:
        return await self._threads.run(f"looking at {self._record}", call, within=LOOK_TIMEOUT_SECONDS)

    async def _publish(self, old: int, entry: Entry) -> None:
        path = await self._asked(partial(_folder, self._weights, old + 1))
        if path is None:
            return  # an entry of an earlier run: its folder is gone
        publication = await self._updates.hold(path, {METADATA: _written(old, entry)})
        name, untold = publication.version_id, publication.notice_error
        log.info("held", path=str(path), version=name)
        if untold is not None:
            log.error("the service was not told, and finds the version by itself", version=name, error=str(untold))


def _written(old: int, entry: Entry) -> str:
    return f"{old} {entry[0]} {entry[1]}"


def _up_to(metadata: Mapping[str, str], entries: Mapping[int, Entry]) -> dict[int, Entry]:
    """Return the entries that an earlier watch has published: that of the newest version, and those before it."""
    published = next((each for old, each in entries.items() if metadata.get(METADATA) == _written(old, each)), None)
    return {} if published is None else {old: each for old, each in entries.items() if each <= published}


def _folder(weights: Path, version: int) -> Path | None:
    """Return where a version lies, in the new layout or in the old one."""
    folders = (weights / f"weight_update_v{version}", weights / "weight_update")
    return next((folder for folder in folders if folder.is_dir()), None)


def _entries(record: Path) -> dict[int, Entry]:
    """Return the announced versions, each with time and inode of its entry."""
    found: dict[int, Entry] = {}
    try:
        names = os.listdir(record)
    except FileNotFoundError:
        return found
    for name in names:
        try:
            status = (record / name / "ENTRY").stat()
        except (FileNotFoundError, NotADirectoryError):
            continue  # being written, or taken away
        if name.isdecimal():
            found[int(name)] = (status.st_mtime_ns, status.st_ino)
    return found
