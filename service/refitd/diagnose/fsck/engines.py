"""What the journal says of the engines, held against what they say themselves. Pure.

Path and label are names; contents are what a fingerprint on record proves. An engine is only ever resumed where all of
it agrees: one that is paused may be paused for a reason.
"""

from collections.abc import Iterator, Sequence

from refitd.diagnose.fsck.facts import EngineFacts, JournalFacts
from refitd.diagnose.fsck.finding import Finding, Kind, Repair, Severity
from refitd.engine.fingerprint import comparable
from refitd.engine.port import Reached, Unreached
from refitd.policy.label import label_of
from refitd.state.journal.condition import Sound
from refitd.state.records import EngineRecord
from refitd_client.contract.states import Kind as VersionKind
from refitd_client.contract.states import VersionState


def compare_engines(journal: JournalFacts, engines: Sequence[EngineFacts] | None) -> Iterator[Finding]:
    """Where engines and journal disagree. `engines` is None where they were not asked."""
    for record in journal.engines.values():
        yield from _leases(record, journal)
    for engine in engines or ():
        yield from _of_engine(engine, journal)


def _leases(record: EngineRecord, journal: JournalFacts) -> Iterator[Finding]:
    there = {v.id for v in journal.versions.values() if v.state is not VersionState.DELETED}
    if record.serving is not None and record.serving not in there:
        yield _of(
            record.id,
            Kind.LEASE_DANGLING,
            f"the journal says that it serves {record.serving}, and knows no such version",
            "it is loaded again",
            repair=Repair.FORGET_SERVING,
        )
    if gone := sorted(set(record.unproven) - there):
        yield _of(
            record.id,
            Kind.LEASE_DANGLING,
            f"it may still be reading {', '.join(gone)}, and there is no such version",
            "that holds up nothing",
            severity=Severity.INFO,
            repair=Repair.DROP_LEASES,
        )


def _of_engine(engine: EngineFacts, journal: JournalFacts) -> Iterator[Finding]:
    record = journal.engines.get(engine.id)
    if isinstance(engine.seen, Unreached):
        advice = "nobody knows what it serves; start it, or leave it out with --no-engines"
        yield _of(engine.id, Kind.ENGINE_UNREACHABLE, engine.seen.reason, advice)
    elif record is None:
        if isinstance(journal.condition, Sound):
            text = f"the journal does not know it; it says that it serves {_claim(engine.seen)}"
            yield _of(engine.id, Kind.ENGINE_UNKNOWN, text, "the service takes it in", severity=Severity.INFO)
    elif not record.known or any(attempt.engine == engine.id for attempt in journal.open_attempts):
        yield from _unproven(engine, record)
    else:
        yield from _of_known(engine, engine.seen, record, journal)


def _unproven(engine: EngineFacts, record: EngineRecord) -> Iterator[Finding]:
    if engine.generates is False:
        text, severity = "its contents are unknown, and it is paused, as it should be", Severity.INFO
    else:
        text, severity = "its contents are unknown, and it may be generating", Severity.WARNING
    why = f": {record.reason}" if record.reason else ""
    advice = "run the service: it loads it and proves it before it is resumed"
    yield _of(engine.id, Kind.ENGINE_UNPROVEN, text + why, advice, severity=severity)


def _of_known(engine: EngineFacts, seen: Reached, record: EngineRecord, journal: JournalFacts) -> Iterator[Finding]:
    if (fault := _other(engine, seen, record, journal)) is not None:
        advice = "was it restarted? The service loads it again"
        yield _of(engine.id, Kind.ENGINE_SERVES_OTHER, fault, advice, repair=Repair.FORGET_SERVING)
        return
    recorded = journal.fingerprints.get((record.serving or "", seen.configuration))
    found = engine.fingerprint
    if found is not None and comparable(found, recorded) and recorded != found:
        yield _of(
            engine.id,
            Kind.ENGINE_CONTENTS_DIFFER,
            f"its tensors are not those that a clean load of {record.serving} gave, whatever its label says",
            "it is loaded and proved before it is trusted: --repair notes that, the service does it",
            severity=Severity.ERROR,
            repair=Repair.TAINT,
        )
    elif engine.generates is False:
        # On start-up weights there is no label to hold against: it must at least say so itself.
        vouched = record.serving is not None or seen.model_path == seen.startup_path
        serves = record.serving or record.of_others or "its start-up weights"
        yield _of(
            engine.id,
            Kind.ENGINE_PAUSED,
            f"it is paused, and serves what the journal says ({serves})",
            "--repair resumes it, and so does the service when it starts",
            severity=Severity.ERROR,
            repair=Repair.RESUME if vouched else None,
        )


def _other(engine: EngineFacts, seen: Reached, record: EngineRecord, journal: JournalFacts) -> str | None:
    """How what it says differs from what the journal says, None where it does not."""
    if record.serving is None:
        return None
    version = journal.versions.get(record.serving)
    if version is None:
        return None
    loaded_from = f"{engine.root}/{version.path}"
    if version.kind is VersionKind.DELTA:  # from a copy, which may hold another version by now
        loaded_from = record.model_path or seen.model_path
    expected = (loaded_from, label_of(version))
    if (seen.model_path, seen.weight_version) == expected:
        return None
    return f"it says that it serves {_claim(seen)}, and the journal says {record.serving}"


def _claim(seen: Reached) -> str:
    return f"{seen.model_path} as {seen.weight_version!r}"


def _of(
    engine: str,
    kind: Kind,
    text: str,
    advice: str,
    *,
    severity: Severity = Severity.WARNING,
    repair: Repair | None = None,
) -> Finding:
    return Finding(severity=severity, kind=kind, subject=engine, text=text, advice=advice, repair=repair)
