"""What may happen to a call of a server."""

from enum import StrEnum


class Fault(StrEnum):
    """What happens to the next call of a kind."""

    CUT_BEFORE = "the connection breaks before the server has heard"
    CUT_AFTER = "the reply is lost after success"
    SLOW = "it takes longer than its caller waits"
    REFUSES = "400, nothing was written"
    ROLLBACK = "400: stock SGLang rolls back onto the same files, the plugin puts back what was there"
    UNCLEAR = "400, and nobody knows what was written"
    UNFLUSHED = "new weights, the cache was not flushed"
    DIES = "the scheduler dies in the middle"
    GARBAGE = "a reply that means nothing"


class DiedError(Exception):
    """The scheduler's process has ended."""
