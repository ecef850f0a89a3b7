"""The states of a version, an update and an engine, and the kinds of version. docs/promises.md draws them."""

from enum import StrEnum


class Kind(StrEnum):
    """The content of a version's files."""

    FULL = "full"
    DELTA = "delta"
    LORA = "lora"
    HANDOVER = "handover"


def way_of(transport: str, kind: Kind) -> str:
    """How a version goes to engines by a transport, as the end of a sentence.

    Args:
        transport: as `publish` takes it; `delta` alone is a full version's as well, where too much changed.
        kind: the version's.
    """
    if transport not in {"disk", "delta"}:
        return f"by {transport}"
    return "as a delta" if kind is Kind.DELTA else "by files"


class VersionState(StrEnum):
    """ANNOUNCED → SETTLING → VALIDATING → SEALED → RETIRED → DELETED, with REJECTED, UNKNOWN and LOST beside it."""

    ANNOUNCED = "ANNOUNCED"
    SETTLING = "SETTLING"  # being written, as far as can be seen
    VALIDATING = "VALIDATING"
    SEALED = "SEALED"  # proven good: engines may load it
    RETIRED = "RETIRED"  # not needed any more: it may be deleted
    DELETED = "DELETED"
    REJECTED = "REJECTED"  # proven bad: no engine loads it
    UNKNOWN = "UNKNOWN"  # could not be read: tried again, never deleted
    LOST = "LOST"  # was sealed, and its files have changed or gone

    @property
    def is_open(self) -> bool:
        """Whether it has no verdict yet."""
        return self in _OPEN


_OPEN = frozenset({VersionState.ANNOUNCED, VersionState.SETTLING, VersionState.VALIDATING, VersionState.UNKNOWN})


class UpdateState(StrEnum):
    """The progress of one version to the engines of its run."""

    PENDING = "PENDING"
    ROLLING = "ROLLING"
    COMPLETE = "COMPLETE"
    SUPERSEDED = "SUPERSEDED"
    ABORTED = "ABORTED"
    ROLLED_BACK = "ROLLED_BACK"
    DEGRADED = "DEGRADED"


class EngineState(StrEnum):
    """PROBING → IN_SYNC | BEHIND → UPDATING → VERIFYING → IN_SYNC, and what can go wrong between them."""

    PROBING = "PROBING"
    IN_SYNC = "IN_SYNC"
    BEHIND = "BEHIND"
    UPDATING = "UPDATING"
    VERIFYING = "VERIFYING"
    NACKED = "NACKED"  # refused, and proved untouched: it serves what it served before
    TAINTED = "TAINTED"  # contents unknown: stays paused until a full load was proved
    UNREACHABLE = "UNREACHABLE"
    QUARANTINED = "QUARANTINED"  # could not be repaired: stays paused, counted, alerted
    CONTESTED = "CONTESTED"  # another writer loads weights into it: nothing is loaded for a while, then not at all


class LogSeverity(StrEnum):
    """How grave an entry of the log is: the level of the service's own log line about it."""

    INFO = "info"
    WARNING = "warning"  # something failed, was refused, or cannot be reached


class Standing(StrEnum):
    """The state of a run at a glance."""

    CURRENT = "CURRENT"  # every engine serves the newest version
    MOVING = "MOVING"  # not yet, and nothing has to be done
    PAUSED = "PAUSED"  # an operator has paused its updates, and a version waits for that
    ROLLED_BACK = "ROLLED_BACK"  # every engine serves what an operator went back to: as ordered, and not the newest
    UNFOLLOWED = "UNFOLLOWED"  # no engine follows it, so that none serves what it publishes
    TROUBLED = "TROUBLED"  # something has failed, and an operator should look
    CLOSED = "CLOSED"  # an operator has said that it has ended


class WaitOutcome(StrEnum):
    """How a wait for a version ended."""

    SERVED = "served"
    SEALED = "sealed"
    TAKEN = "taken"  # every engine that could take an offer of it from memory has answered
    FAILED = "failed"
    SUPERSEDED = "superseded"
    PENDING = "pending"
