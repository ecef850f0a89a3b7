"""The states of a version, an update and an engine, and the kinds of version. docs/promises.md draws them.

A set of states is a property of each: worked out once, as thousands of engines and versions are asked at a time.
"""

from enum import StrEnum
from functools import cached_property


class Kind(StrEnum):
    """The content of a version's files."""

    FULL = "full"
    DELTA = "delta"
    LORA = "lora"
    HANDOVER = "handover"


class VersionGlance(StrEnum):
    """What people are shown of a version's state."""

    ARRIVING = "arriving"
    GOOD = "good"
    REJECTED = "rejected"
    GONE = "gone"


class EngineGlance(StrEnum):
    """What people are shown of an engine's state, that which needs an operator first."""

    TROUBLED = "troubled"
    AWAY = "away"
    UPDATING = "updating"
    IN_SYNC = "in sync"


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

    @cached_property
    def is_open(self) -> bool:
        return self.awaits_verdict or self is VersionState.UNKNOWN

    @cached_property
    def awaits_verdict(self) -> bool:
        """Whether its verdict is to come, as nothing hinders reading it."""
        return self in {VersionState.ANNOUNCED, VersionState.SETTLING, VersionState.VALIDATING}

    @cached_property
    def may_be_target(self) -> bool:
        """Whether it was proven good and is still needed, also where it has lost its files."""
        return self in {VersionState.SEALED, VersionState.LOST}

    @cached_property
    def may_have_good_files(self) -> bool:
        """Whether files that were proven good may lie there, also where they are about to be deleted."""
        return self in {VersionState.SEALED, VersionState.RETIRED}

    @cached_property
    def is_bad(self) -> bool:
        return self in {VersionState.REJECTED, VersionState.LOST}

    @cached_property
    def is_over(self) -> bool:
        """Whether it is not needed any more: its files are gone or go."""
        return self in {VersionState.RETIRED, VersionState.DELETED}

    @cached_property
    def is_gone(self) -> bool:
        """Whether its files have changed, are gone or go."""
        return self.is_over or self is VersionState.LOST

    @cached_property
    def glance(self) -> VersionGlance:
        if self.is_open:
            return VersionGlance.ARRIVING
        if self.is_gone:
            return VersionGlance.GONE
        return VersionGlance.GOOD if self is VersionState.SEALED else VersionGlance.REJECTED


class UpdateState(StrEnum):
    """The progress of one version to the engines of its run."""

    PENDING = "PENDING"
    ROLLING = "ROLLING"
    COMPLETE = "COMPLETE"
    SUPERSEDED = "SUPERSEDED"
    ABORTED = "ABORTED"
    ROLLED_BACK = "ROLLED_BACK"
    DEGRADED = "DEGRADED"

    @cached_property
    def is_under_way(self) -> bool:
        return self in {UpdateState.PENDING, UpdateState.ROLLING}

    @cached_property
    def is_proven(self) -> bool:
        return self in {UpdateState.COMPLETE, UpdateState.DEGRADED}


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

    @classmethod
    def by_need(cls) -> "tuple[EngineState, ...]":
        """All states, those that need an operator first."""
        in_trouble = (cls.CONTESTED, cls.QUARANTINED, cls.TAINTED, cls.NACKED, cls.UNREACHABLE)
        return (*in_trouble, cls.PROBING, cls.UPDATING, cls.VERIFYING, cls.BEHIND, cls.IN_SYNC)

    @cached_property
    def is_in_trouble(self) -> bool:
        """Whether something has failed, or another writer interferes."""
        return self.stays_paused or self in {EngineState.NACKED, EngineState.UNREACHABLE, EngineState.CONTESTED}

    @cached_property
    def is_away(self) -> bool:
        """Whether it does not answer, or has not been asked yet."""
        return self in {EngineState.PROBING, EngineState.UNREACHABLE}

    @cached_property
    def is_out_of_reach(self) -> bool:
        """Whether nothing can be loaded into it just now, and what it serves may be another writer's."""
        return self.is_away or self is EngineState.CONTESTED

    @cached_property
    def is_at_rest(self) -> bool:
        """Whether it serves what it is known to serve, and nothing is being loaded."""
        return self in {EngineState.IN_SYNC, EngineState.BEHIND, EngineState.NACKED}

    @cached_property
    def is_loading(self) -> bool:
        return self in {EngineState.UPDATING, EngineState.VERIFYING}

    @cached_property
    def stays_paused(self) -> bool:
        """Whether a load has left it with unknown contents."""
        return self in {EngineState.TAINTED, EngineState.QUARANTINED}

    @cached_property
    def is_out_of_service(self) -> bool:
        """Whether it serves nothing because of a load."""
        return self.is_loading or self.stays_paused

    @cached_property
    def is_waited_for(self) -> bool:
        """Whether a version is served only when this engine serves it too."""
        return self not in {EngineState.UNREACHABLE, EngineState.QUARANTINED, EngineState.CONTESTED}

    @cached_property
    def glance(self) -> EngineGlance:
        if self.is_away:
            return EngineGlance.AWAY
        if self.is_in_trouble:
            return EngineGlance.TROUBLED
        return EngineGlance.IN_SYNC if self is EngineState.IN_SYNC else EngineGlance.UPDATING


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
