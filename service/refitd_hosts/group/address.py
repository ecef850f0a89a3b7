"""Where a group's PostgreSQL database is, as the operator writes it: `postgresql://user@host/name`.

libpq reads it: several hosts, `sslmode`, `passfile` and all else that its URIs have
(https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-CONNSTRING).
"""

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

SCHEMES = ("postgresql://", "postgres://")


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    """A database's URI. It may have a password, so only `shown` goes into sentences and logs."""

    uri: str = field(repr=False)

    def __post_init__(self) -> None:
        """Refuse what names no database: libpq would take the user's name for it."""
        if not self._database:
            raise ValueError(f"{self.shown} names no database: write postgresql://user@host/database")

    @property
    def _database(self) -> str:
        parts = urlsplit(self.uri)
        return parts.path.strip("/") or dict(parse_qsl(parts.query)).get("dbname", "")

    @property
    def shown(self) -> str:
        """The URI without its password and its parameters."""
        parts = urlsplit(self.uri)
        user, at, host = parts.netloc.rpartition("@")
        return f"postgresql://{user.partition(':')[0]}{at}{host}/{self._database}"


def is_postgres(text: str) -> bool:
    return text.startswith(SCHEMES)
