"""The journal that repairs are written into: a service's own, or a group's, which this process leads meanwhile."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from refitd.root.ownership import StartRefusedError
from refitd.settings import Settings
from refitd.state.journal.address import PostgresAddress
from refitd.state.journal.journal import Journal
from refitd.state.journal.recovery import open_journal

if TYPE_CHECKING:
    from refitd.state.journal.leadership import HeldLead


@asynccontextmanager
async def opened(settings: Settings) -> AsyncGenerator[tuple[Journal, int]]:
    """Open the journal as a service does that starts, with its epoch: 0 for a service alone.

    Nothing acts on a group's before the lead of the service before is over for sure.

    Raises:
        StartRefusedError: it cannot be opened, or a service of its group leads.
    """
    if settings.database is None:
        journal = await asyncio.to_thread(open_journal, settings.state_folder, settings.root.resolve())
        try:
            yield journal, 0
        finally:
            journal.close()
        return
    # Here, because its driver is an extra.
    from refitd.state.journal.group_journal import open_group_journal
    from refitd.state.journal.leadership import monotonic

    lead = await asyncio.to_thread(_lead, settings.database, settings.lease)
    try:
        journal = await asyncio.to_thread(open_group_journal, settings.database, lead, settings.root.resolve())
        try:
            await asyncio.sleep(max(0.0, lead.acts_at - monotonic()))
            yield journal, lead.epoch
        finally:
            journal.close()
    finally:
        lead.release()


def _lead(database: PostgresAddress, lease: float) -> "HeldLead":
    """Take the lead of a group of which no service runs."""
    import psycopg

    from refitd.state.journal.leadership import Candidate

    candidate = Candidate(database, "refitd fsck --repair", lease)
    try:
        lead = candidate.try_to_lead(_lost)
        if lead is not None:
            return lead
        leader = candidate.leader()
    except psycopg.Error as error:
        why = " ".join(str(error).split())
        raise StartRefusedError(f"the database {database.shown} cannot be asked: {why}") from error
    finally:
        candidate.close()
    who = "a service" if leader is None else leader.address
    raise StartRefusedError(
        f"{who} leads the group of {database.shown}: stop all its services, on every host, or leave --repair out and "
        "ask the leader (refitd resync, refitd reclaim)"
    )


def _lost(reason: str) -> None:
    """End at once, as a service does that does not lead any more: what is not committed is not done."""
    from refitd.state.journal.leadership import EXIT_LEAD_LOST

    sys.stderr.write(f"refitd fsck does not lead the group any more, and ends: {reason}. Start it again.\n")
    sys.stderr.flush()
    os._exit(EXIT_LEAD_LOST)
