"""Journal, disk and engines held against each other. Pure: facts in, findings out, the worst first."""

from collections.abc import Iterator
from dataclasses import replace

from refitd.diagnose.fsck.engines import compare_engines
from refitd.diagnose.fsck.facts import Facts
from refitd.diagnose.fsck.finding import Finding, Kind, Repair, Severity
from refitd.diagnose.fsck.journal import compare_journal
from refitd.diagnose.fsck.leftovers import compare_leftovers
from refitd.diagnose.fsck.versions import compare_versions

_ORDER = list(Severity)
# What takes files away. A journal that was lost knew of readers that nobody knows now: then these wait.
_DELETES = frozenset({Repair.FINISH_RECLAIM, Repair.DISCARD_INCOMING, Repair.EMPTY_TRASH, Repair.DISCARD_SLOT})


def compare(facts: Facts) -> list[Finding]:
    """Say where they disagree."""
    found = [_withheld(finding, facts) for finding in _all(facts)]
    return sorted(found, key=lambda finding: (_ORDER.index(finding.severity), finding.kind, finding.subject))


def _all(facts: Facts) -> Iterator[Finding]:
    if facts.running is not None:
        yield Finding(
            severity=Severity.INFO,
            kind=Kind.SERVICE_RUNNING,
            subject=facts.running,
            text="the service is running: what is found may be momentary, and nothing can be repaired",
            advice="stop it to be sure, or ask it: 'refitd status'",
        )
    yield from compare_journal(facts.journal, facts.disk)
    yield from compare_versions(facts.journal, facts.disk)
    yield from compare_engines(facts.journal, facts.engines)
    yield from compare_leftovers(facts.disk)


def _withheld(finding: Finding, facts: Facts) -> Finding:
    """The same without its repair, where that must not happen now."""
    if facts.running is not None:
        return replace(finding, repair=None)
    if finding.repair in _DELETES and not facts.journal.is_complete:
        return replace(finding, repair=None, advice="nothing is collected before the journal is rebuilt: do that first")
    return finding
