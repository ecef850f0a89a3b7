"""A service of a group, from its start to its lead: it stands by until it leads, and then gets the group's journal."""

import asyncio
import socket
from dataclasses import dataclass

import structlog

from refitd.api.api import door_of
from refitd.api.server import Address
from refitd.api.standby import Standby, StandbyView, build_standby, standing_by
from refitd.settings import Settings
from refitd.state.journal.address import PostgresAddress
from refitd.state.journal.journal import Journal
from refitd.state.journal.leadership import Candidate, HeldLead, monotonic
from refitd.state.journal.postgres import connect, open_group_journal, why_unusable

log = structlog.get_logger("refitd")

_EVERY_ADDRESS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - it is compared


@dataclass(frozen=True, slots=True)
class Led:
    """The lead of a group and its journal, which its owner closes before it releases the lead."""

    lead: HeldLead
    journal: Journal


async def lead_group(settings: Settings, database: PostgresAddress, at: Address) -> Led | None:
    """Stand by until this service leads and may act; None where it is to stop before.

    Args:
        settings: of the service.
        database: the group's.
        at: where it listens. Its sockets stay open.

    Raises:
        StartRefusedError: the database or its journal cannot be used; the message says why and what to do.
    """
    candidate = Candidate(database, advertised(settings, at.port), settings.lease)
    view = StandbyView()

    async def refuses() -> str | None:
        return await asyncio.to_thread(_why_refused, database)

    app = build_standby(view, door_of(settings))
    async with standing_by(Standby(candidate, view, refuses), app, settings.host, settings.port, at) as standby:
        lead = await standby.lead()
        if lead is None:
            return None
        try:
            journal = await asyncio.to_thread(open_group_journal, database, lead, settings.root.resolve())
            if await standby.wait_until(lead.acts_at, monotonic):
                log.info("this service leads its group", epoch=lead.epoch, address=lead.leader.address)
                return Led(lead, journal)
            journal.close()
        except BaseException:
            lead.release()
            raise
        lead.release()
        return None


def advertised(settings: Settings, port: int) -> str:
    """The URL by which clients reach this service: the operator's word, else its address and port."""
    if settings.advertise is not None:
        return settings.advertise
    host = socket.gethostname() if settings.host in _EVERY_ADDRESS else settings.host
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _why_refused(database: PostgresAddress) -> str | None:
    with connect(database) as connection:
        why = why_unusable(connection)
    return None if why is None else f"the database {database.shown} cannot hold a group's journal: {why}"
