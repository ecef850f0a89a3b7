"""The calls of a server that may go wrong, and what may happen to them."""

from enum import StrEnum


class Call(StrEnum):
    """A call, whatever the route is that a kind of server has for it."""

    LOAD = "load"
    PAUSE = "pause"
    RESUME = "resume"
    DIGESTS = "digests"
    PROBE = "probe"
    STARTED = "how it was started"
    PREPARE = "prepare"
    CACHES = "empty the caches"
    LABEL = "set the label"
    CONTROL = "a call whose answer is known"
    TRIAL = "a prompt"


class Fault(StrEnum):
    """What happens to the next call of a kind."""

    CUT_BEFORE = "the connection breaks before the server has heard"
    CUT_AFTER = "the reply is lost after success"
    SLOW = "it takes longer than its caller waits"
    REFUSES = "refused, nothing was written"
    ROLLBACK = "it fails in its midst: stock SGLang rolls back onto the same files, the plugin puts back what was there"
    UNCLEAR = "it fails, and it is not known what was written: of several ranks one fails alone"
    UNFLUSHED = "new weights, the cache was not flushed"
    DIES = "the scheduler dies in the middle"
    GARBAGE = "a reply that means nothing"


class DiedError(Exception):
    """The scheduler's process has ended."""
