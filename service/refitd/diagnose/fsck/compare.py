"""Journal, disk and engines compared with each other. Pure: facts in, findings out, the worst first.

The journal itself is judged here: whether it is there, is intact, and is this root's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from refitd.diagnose.fsck.disagreement import Disagreement, FsckKind, Repair, Severity, error, note, warning
from refitd.diagnose.fsck.disk import DiskFacts
from refitd.diagnose.fsck.engines import compare_engines
from refitd.diagnose.fsck.versions import compare_leftovers, compare_versions
from refitd.diagnose.journal import JournalFacts
from refitd.diagnose.roster import EngineFacts
from refitd.root.scan import Listing
from refitd.state.journal.condition import Corrupt, Missing, Newer, Sound, UnreadableJournal
from refitd.state.journal.recovery import FORGOTTEN
from refitd.state.journal.schema import SCHEMA_VERSION

_ORDER = list(Severity)
# Repairs that delete files. While a lost journal is rebuilt its readers are not known, so these wait.
_DELETES = frozenset({Repair.FINISH_RECLAIM, Repair.DISCARD_INCOMING, Repair.EMPTY_TRASH, Repair.DISCARD_SLOT})


@dataclass(frozen=True, slots=True, kw_only=True)
class FsckFacts:
    """What is compared. `engines` is None where they were not asked; `running` names the service that runs now."""

    journal: JournalFacts
    disk: DiskFacts
    engines: Sequence[EngineFacts] | None = None
    running: str | None = None


def compare(facts: FsckFacts) -> list[Disagreement]:
    """Return all disagreements, the worst first."""
    found = [_with_repair(finding, facts) for finding in _disagreements(facts)]
    return sorted(found, key=lambda finding: (_ORDER.index(finding.severity), finding.kind, finding.subject))


def _disagreements(facts: FsckFacts) -> Iterator[Disagreement]:
    if facts.running is not None:
        yield note(
            FsckKind.SERVICE_RUNNING,
            facts.running,
            "the service is running: what is found may be momentary, and nothing can be repaired",
            "stop it to be sure, or ask it: 'refitd status'",
        )
    yield from compare_journal(facts.journal, facts.disk)
    yield from compare_versions(facts.journal, facts.disk)
    yield from compare_engines(facts.journal, facts.engines)
    yield from compare_leftovers(facts.disk)


def _with_repair(finding: Disagreement, facts: FsckFacts) -> Disagreement:
    """Remove the repair of a finding where it must not be made now."""
    if facts.running is not None:
        return replace(finding, repair=None)
    if finding.repair in _DELETES and not facts.journal.is_complete:
        return replace(finding, repair=None, advice="nothing is collected before the journal is rebuilt: do that first")
    return finding


def compare_journal(journal: JournalFacts, disk: DiskFacts) -> Iterator[Disagreement]:
    """Find faults of the journal, and loads that began and did not end."""
    yield from _condition(journal, disk)
    for attempt in journal.open_attempts:
        yield warning(
            FsckKind.ATTEMPT_OPEN,
            attempt.engine,
            f"the service stopped while {attempt.version} was being loaded into it (since {attempt.started_at}): "
            "its contents are unknown",
            "the next start takes it for TAINTED, and loads it and proves it before it is resumed",
            Repair.CLOSE_ATTEMPT,
        )


def _condition(journal: JournalFacts, disk: DiskFacts) -> Iterator[Disagreement]:
    condition = journal.condition
    match condition:
        case Sound(origin):
            if not origin.rebuilt:
                yield note(
                    FsckKind.JOURNAL_REBUILDING,
                    str(journal.path),
                    f"a journal was begun anew and is to be rebuilt: {origin.cause}",
                    "run the service: nothing is collected until it has listed the root and asked every engine",
                )
        case Missing():
            yield from _missing(journal, disk)
        case Corrupt(reason) if journal.is_shared:
            advice = "restore the database from its backup; without one give the group an empty database, and delete "
            advice += f"the root's note of this one: {FORGOTTEN}"
            yield error(FsckKind.JOURNAL_CORRUPT, str(journal.path), f"corrupt: {reason}", advice)
        case Corrupt(reason):
            advice = f"--repair moves it aside and begins one with what can be read of it: {FORGOTTEN}"
            yield error(
                FsckKind.JOURNAL_CORRUPT, str(journal.path), f"corrupt: {reason}", advice, Repair.REBUILD_JOURNAL
            )
        case Newer(schema):
            text = f"it has schema {schema}, and this refitd knows {SCHEMA_VERSION}"
            yield error(FsckKind.JOURNAL_NEWER, str(journal.path), text, "use the newer refitd that wrote it")
        case UnreadableJournal(reason):
            advice = "see to its rights, its disk and who else has it open; it is left as it is"
            yield error(FsckKind.JOURNAL_UNREADABLE, str(journal.path), f"it cannot be read: {reason}", advice)
        case _:
            assert_never(condition)


def _missing(journal: JournalFacts, disk: DiskFacts) -> Iterator[Disagreement]:
    before = journal.last_folder
    if journal.elsewhere:
        text = f"there is none here: the root names {before}, and one lies there"
        yield error(FsckKind.JOURNAL_ELSEWHERE, str(journal.path), text, f"say --state {before}")
    elif before is not None:
        advice = f"--repair begins an empty one, as the service does: {FORGOTTEN}"
        yield error(
            FsckKind.JOURNAL_MISSING,
            str(journal.path),
            "it is missing, and a service has run on this root before",
            advice,
            Repair.REBUILD_JOURNAL,
        )
    elif not isinstance(disk.listing, Listing) or disk.listing.found:
        advice = "is --state right? If no service has run on it before, start one: it begins a journal"
        text = "there is none, and the root has versions"
        yield warning(FsckKind.JOURNAL_MISSING, str(journal.path), text, advice, Repair.REBUILD_JOURNAL)
