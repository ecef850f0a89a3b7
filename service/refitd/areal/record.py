"""The watch of AReaL's name-resolve record, for trainers whose own update of engines is switched off.

When a checkpoint is complete, the trainer adds `{user}/{experiment}/{trial}/update_weights_from_disk/{N-1}`: the key
has the old version, and the folder the new one, `weight_update_v{N}` (`weight_update` in older releases). As files:

    {trial}/update_weights_from_disk/{N-1}/ENTRY      written beside and renamed; holds the time as a number
"""

import asyncio
import os
from pathlib import Path

import structlog

from refitd.areal.updates import Updates
from refitd_client import RefitError

LOOK_SECONDS = 0.2
KEY = "update_weights_from_disk"

log = structlog.get_logger("refitd")


class RecordWatch:
    """Publishes what the record of one trial announces. `weights` is the folder that its checkpoints lie in."""

    def __init__(self, trial: Path, weights: Path, updates: Updates) -> None:
        self._record = trial / KEY
        self._weights = weights
        self._updates = updates
        self._seen: dict[int, tuple[int, int]] = {}

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Publish what is new since the last look: the newest of it, since engines take no other."""
        entries = await asyncio.to_thread(_entries, self._record)
        fresh = [version for version, entry in entries.items() if self._seen.get(version) != entry]
        self._seen = entries
        if fresh:
            await self._publish(max(fresh, key=lambda version: entries[version]) + 1)

    async def _publish(self, version: int) -> None:
        path = await asyncio.to_thread(_folder, self._weights, version)
        if path is None:
            return  # an entry of an earlier run: its folder is gone
        try:
            publication = await self._updates.hold(path)
            log.info("held", path=str(path), version=publication.version_id)
        except (RefitError, OSError) as error:
            log.error("a checkpoint of AReaL's did not become a version", path=str(path), error=str(error))


def _folder(weights: Path, version: int) -> Path | None:
    """Where a version lies, in the new layout or in the old one."""
    folders = (weights / f"weight_update_v{version}", weights / "weight_update")
    return next((folder for folder in folders if folder.is_dir()), None)


def _entries(record: Path) -> dict[int, tuple[int, int]]:
    """The versions that are announced, each with when and which file says so."""
    found: dict[int, tuple[int, int]] = {}
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
