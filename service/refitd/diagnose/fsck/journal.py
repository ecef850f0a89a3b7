"""The journal itself: whether it is there, is what was written, and is this root's. Pure."""

from collections.abc import Iterator
from typing import assert_never

from refitd.diagnose.fsck.facts import DiskFacts, JournalFacts
from refitd.diagnose.fsck.finding import Finding, Kind, Repair, Severity
from refitd.root.scan import Listing
from refitd.state.journal.condition import Corrupt, Missing, Newer, Sound, Unreadable
from refitd.state.journal.recovery import FORGOTTEN
from refitd.state.journal.schema import SCHEMA_VERSION


def compare_journal(journal: JournalFacts, disk: DiskFacts) -> Iterator[Finding]:
    """What is wrong with the journal, and the loads that it saw begin and not end."""
    yield from _condition(journal, disk)
    for attempt in journal.open_attempts:
        yield Finding(
            severity=Severity.WARNING,
            kind=Kind.ATTEMPT_OPEN,
            subject=attempt.engine,
            text=f"the service stopped while {attempt.version} was being loaded into it (since {attempt.started_at}): "
            "its contents are unknown",
            advice="the next start takes it for TAINTED, and loads it and proves it before it is resumed",
            repair=Repair.CLOSE_ATTEMPT,
        )


def _condition(journal: JournalFacts, disk: DiskFacts) -> Iterator[Finding]:
    condition = journal.condition
    match condition:
        case Sound(origin):
            if not origin.rebuilt:
                yield _of(
                    journal,
                    Kind.JOURNAL_REBUILDING,
                    f"an empty journal was begun and is to be rebuilt: {origin.cause}",
                    "run the service: nothing is collected until it has listed the root and asked every engine",
                    severity=Severity.INFO,
                )
        case Missing():
            yield from _missing(journal, disk)
        case Corrupt(reason):
            advice = f"--repair moves it aside and begins an empty one: {FORGOTTEN}"
            yield _of(journal, Kind.JOURNAL_CORRUPT, f"corrupt: {reason}", advice, repair=Repair.REBUILD_JOURNAL)
        case Newer(schema):
            text = f"it has schema {schema}, and this refitd knows {SCHEMA_VERSION}"
            yield _of(journal, Kind.JOURNAL_NEWER, text, "use the newer refitd that wrote it")
        case Unreadable(reason):
            advice = "see to its rights, its disk and who else has it open; it is left as it is"
            yield _of(journal, Kind.JOURNAL_UNREADABLE, f"it cannot be read: {reason}", advice)
        case _:
            assert_never(condition)


def _missing(journal: JournalFacts, disk: DiskFacts) -> Iterator[Finding]:
    before = journal.last_folder
    if journal.elsewhere:
        text = f"there is none here: the root names {before}, and one lies there"
        yield _of(journal, Kind.JOURNAL_ELSEWHERE, text, f"say --state {before}")
    elif before is not None:
        advice = f"--repair begins an empty one, as the service does: {FORGOTTEN}"
        yield _of(
            journal,
            Kind.JOURNAL_MISSING,
            "it is missing, and a service has run on this root before",
            advice,
            repair=Repair.REBUILD_JOURNAL,
        )
    elif not isinstance(disk.listing, Listing) or disk.listing.found:
        advice = "is --state right? If no service has run on it before, start one: it begins a journal"
        text = "there is none, and the root has versions"
        yield _of(journal, Kind.JOURNAL_MISSING, text, advice, severity=Severity.WARNING, repair=Repair.REBUILD_JOURNAL)


def _of(
    journal: JournalFacts,
    kind: Kind,
    text: str,
    advice: str,
    *,
    severity: Severity = Severity.ERROR,
    repair: Repair | None = None,
) -> Finding:
    return Finding(severity=severity, kind=kind, subject=str(journal.path), text=text, advice=advice, repair=repair)
