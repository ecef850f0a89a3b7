"""Collects what nobody needs, with the service's own parts on a copy of a prepared root, and dies on the way.

For each k there is a child that is killed at its k-th effect: a batch of the journal, or a change of the file system.
"""

import asyncio
import contextlib
import os
import shutil
import sys
from itertools import count
from pathlib import Path

from mortal import Life

from refitd.catalog.files import DiskFiles
from refitd.clock import SystemClock
from refitd.reclaim.books import Books
from refitd.reclaim.folders import DiskFolders
from refitd.reclaim.sweep import Collector
from refitd.settings import Settings
from refitd.state.journal.recovery import open_journal
from refitd.state.store import Store
from refitd.update.targets import Targets
from refitd_client.contract.wire import ReclaimPlan


async def sweep(place: Path, keep_last: int, delete: str | None = None) -> ReclaimPlan:
    """One sweep, as the service makes it when it starts on `<place>/root` and `<place>/state`. With `delete`, a request
    deletes that run first.
    """
    root, state = place / "root", place / "state"
    journal = open_journal(state, root)
    writing = asyncio.create_task(journal.run())
    try:
        store = Store(journal, SystemClock())
        store.faults.set(root=None)
        store.faults.set(fleet=None)
        settings = Settings(root=root, state=state, keep_last=keep_last)
        if delete is not None:
            store.delete_run(delete)
            await store.durable()
        facts = Books(store, Targets(store), DiskFiles(root))
        plan = await Collector(store, facts, DiskFolders(root), settings.reclaim_rules).sweeper.run()
        await store.durable()
        return plan
    finally:
        writing.cancel()
        await asyncio.wait({writing})
        journal.close()


def copied(prepared: Path, place: Path) -> Path:
    """The prepared root and journal once more, times and all."""
    shutil.copytree(prepared, place, symlinks=True)
    return place


def kill_at_each(
    prepared: Path, places: Path, keep_last: int, first: int, stride: int, delete: str | None = None
) -> None:
    """Make `<places>/<k>`, what a kill at effect k leaves, for each k, or some of them, until a sweep comes through."""
    for number in count(first + 1, stride):
        place = copied(prepared, places / f"{number:03d}")
        child = os.fork()
        if child == 0:
            life = Life(place / "effects", number, None, armed=True)
            life.watch_journal()
            life.watch_files()
            with contextlib.redirect_stdout(sys.stderr):
                asyncio.run(sweep(place, keep_last, delete))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    kill_at_each(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:6]), *sys.argv[6:])
