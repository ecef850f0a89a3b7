"""Where a journal is kept: what `Journal` asks of SQLite's file and of a PostgreSQL database alike."""

from typing import Protocol

import sqlalchemy as sa

from refitd.state.records import Origin


class JournalDatabase(Protocol):
    """A database that has the tables of `schema.py`.

    Attributes:
        engine: gives connections to it.
        name: what sentences call it. It has no password in it.
        remedy: what makes it writable again, for sentences.
    """

    engine: sa.Engine
    name: str
    remedy: str

    def create(self, origin: Origin) -> None:
        """Make what is missing, all or nothing; `origin` is for a journal that begins now.

        Raises:
            OSError, sqlalchemy.exc.DatabaseError: it cannot be made.
        """
        ...

    def check_lead(self, connection: sa.Connection) -> None:
        """Called first in each transaction that writes.

        Raises:
            LeadLostError: this process does not lead any more, and so must not write.
        """
        ...


class LeadLostError(Exception):
    """Another process of the group leads now, or it cannot be known who does. The message says which."""
