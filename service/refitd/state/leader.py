"""Which service of a group leads, as it says of itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The process that leads, or led last.

    Attributes:
        address: where clients reach it.
        host: its machine's name.
        pid: its process there.
        since: when it took over (RFC 3339, for people).
        lease: seconds without an answer of the database after which another takes over.
        epoch: the number of the takeover.
        released: whether it has given the lead back.
    """

    address: str
    host: str
    pid: int
    since: str
    lease: float
    epoch: int = 0
    released: bool = False
