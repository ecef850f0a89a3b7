"""What fsck finds, and what `--repair` does about it."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad it is. INFO is no disagreement: it is as it should be, or the service corrects it by itself."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class FsckKind(StrEnum):
    """What was found."""

    SERVICE_RUNNING = "service-running"
    JOURNAL_MISSING = "journal-missing"
    JOURNAL_ELSEWHERE = "journal-elsewhere"
    JOURNAL_CORRUPT = "journal-corrupt"
    JOURNAL_NEWER = "journal-newer"
    JOURNAL_UNREADABLE = "journal-unreadable"
    JOURNAL_REBUILDING = "journal-rebuilding"
    ROOT_UNREADABLE = "root-unreadable"
    ROOT_EMPTY = "root-empty"
    VERSION_GONE = "version-gone"
    VERSION_CHANGED = "version-changed"
    VERSION_DAMAGED = "version-damaged"
    VERSION_UNREADABLE = "version-unreadable"
    VERSION_UNKNOWN = "version-unknown"
    VERSION_BACK = "version-back"
    VERSION_HALF_RECLAIMED = "version-half-reclaimed"
    ATTEMPT_OPEN = "attempt-open"
    ENGINE_UNKNOWN = "engine-unknown"
    ENGINE_NOT_NAMED = "engine-not-named"
    ENGINE_UNREACHABLE = "engine-unreachable"
    ENGINE_SERVES_OTHER = "engine-serves-other"
    ENGINE_CONTENTS_DIFFER = "engine-contents-differ"
    ENGINE_PAUSED = "engine-paused"
    ENGINE_UNPROVEN = "engine-unproven"
    LEASE_DANGLING = "lease-dangling"
    UPDATE_DANGLING = "update-dangling"
    INCOMING_ABANDONED = "incoming-abandoned"
    INCOMING_UNREADABLE = "incoming-unreadable"
    TRASH_LEFT = "trash-left"
    SLOT_DAMAGED = "slot-damaged"
    SLOTS_UNUSABLE = "slots-unusable"
    DELTA_BASELESS = "delta-baseless"
    COPY_DAMAGED = "copy-damaged"
    COPY_UNREADABLE = "copy-unreadable"
    COPY_UNFINISHED = "copy-unfinished"
    FOREIGN = "foreign"


class Repair(StrEnum):
    """What `--repair` does. The finding's subject says to what."""

    REBUILD_JOURNAL = "rebuild-journal"  # moves what is there aside, and begins one with what can be read of it
    MARK_LOST = "mark-lost"
    FINISH_RECLAIM = "finish-reclaim"
    CLOSE_ATTEMPT = "close-attempt"  # its engine counts as TAINTED
    FORGET_SERVING = "forget-serving"  # the engine is loaded again
    TAINT = "taint"  # the engine is loaded and proved before it is trusted
    RESUME = "resume"
    DROP_LEASES = "drop-leases"
    DISCARD_INCOMING = "discard-incoming"
    EMPTY_TRASH = "empty-trash"
    DISCARD_SLOT = "discard-slot"
    DISOWN_COPY = "disown-copy"  # its contents are not trusted any more; the service writes it anew


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One disagreement. `subject` is a version, an engine, a run or a path; `advice` says what to do about it.

    `repair` is None where nothing can be done safely, or nothing has to be. `outcome` says why a repair did not work.
    """

    severity: Severity
    kind: FsckKind
    subject: str
    text: str
    advice: str
    repair: Repair | None = None
    repaired: bool = False
    outcome: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether something still disagrees."""
        return self.severity is not Severity.INFO and not self.repaired


def error(kind: FsckKind, subject: str, text: str, advice: str, repair: Repair | None = None) -> Disagreement:
    """An error. The arguments are the fields of `Disagreement`, as in the next two."""
    return Disagreement(Severity.ERROR, kind, subject, text, advice, repair)


def warning(kind: FsckKind, subject: str, text: str, advice: str, repair: Repair | None = None) -> Disagreement:
    """A warning."""
    return Disagreement(Severity.WARNING, kind, subject, text, advice, repair)


def note(kind: FsckKind, subject: str, text: str, advice: str, repair: Repair | None = None) -> Disagreement:
    """What is as it should be, or is corrected without fsck."""
    return Disagreement(Severity.INFO, kind, subject, text, advice, repair)
