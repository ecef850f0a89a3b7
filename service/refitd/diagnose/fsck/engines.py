"""What engines say of themselves, compared with what the journal says of them. Pure.

Path and label are names; a fingerprint on record proves the contents. An engine is only resumed where all of it agrees:
it may be paused for a reason.
"""

from collections.abc import Iterator, Sequence

from refitd.diagnose.fsck.disagreement import Disagreement, FsckKind, Repair, Severity, error, note, warning
from refitd.diagnose.journal import JournalFacts
from refitd.diagnose.roster import EngineFacts
from refitd.engine.fingerprints import comparable
from refitd.engine.port import Reached, Unreached
from refitd.state.journal.condition import Sound
from refitd.state.records import EngineRecord
from refitd_client.contract.states import Kind, VersionState


def compare_engines(journal: JournalFacts, engines: Sequence[EngineFacts] | None) -> Iterator[Disagreement]:
    """Find where engines and journal disagree. `engines` is None where they were not asked."""
    for record in journal.engines.values():
        yield from _leases(record, journal)
    for engine in engines or ():
        yield from _of_engine(engine, journal)


def _leases(record: EngineRecord, journal: JournalFacts) -> Iterator[Disagreement]:
    there = {v.id for v in journal.versions.values() if v.state is not VersionState.DELETED}
    if record.serving is not None and record.serving not in there:
        yield warning(
            FsckKind.LEASE_DANGLING,
            record.id,
            f"the journal says that it serves {record.serving}, and knows no such version",
            "it is loaded again",
            Repair.FORGET_SERVING,
        )
    if gone := sorted(set(record.unproven) - there):
        yield note(
            FsckKind.LEASE_DANGLING,
            record.id,
            f"it may still be reading {', '.join(gone)}, and there is no such version",
            "that holds up nothing",
            Repair.DROP_LEASES,
        )


def _of_engine(engine: EngineFacts, journal: JournalFacts) -> Iterator[Disagreement]:
    record = journal.engines.get(engine.id)
    if isinstance(engine.seen, Unreached):
        advice = "what it serves is not known; start it, or leave it out with --no-engines"
        yield warning(FsckKind.ENGINE_UNREACHABLE, engine.id, engine.seen.reason, advice)
    elif record is None:
        if isinstance(journal.condition, Sound):
            text = f"the journal does not know it; it says that it serves {_claim(engine.seen)}"
            yield note(FsckKind.ENGINE_UNKNOWN, engine.id, text, "the service takes it in")
    elif not record.known or any(attempt.engine == engine.id for attempt in journal.open_attempts):
        yield from _unproven(engine, record)
    else:
        yield from _of_known(engine, engine.seen, record, journal)


def _unproven(engine: EngineFacts, record: EngineRecord) -> Iterator[Disagreement]:
    if engine.generates is False:
        text, severity = "its contents are unknown, and it is paused, as it should be", Severity.INFO
    else:
        text, severity = "its contents are unknown, and it may be generating", Severity.WARNING
    why = f": {record.reason}" if record.reason else ""
    advice = "run the service: it loads it and proves it before it is resumed"
    yield Disagreement(severity, FsckKind.ENGINE_UNPROVEN, engine.id, text + why, advice)


def _of_known(
    engine: EngineFacts, seen: Reached, record: EngineRecord, journal: JournalFacts
) -> Iterator[Disagreement]:
    if (fault := _other(engine, seen, record, journal)) is not None:
        advice = "was it restarted? The service loads it again"
        yield warning(FsckKind.ENGINE_SERVES_OTHER, engine.id, fault, advice, Repair.FORGET_SERVING)
        return
    recorded = journal.fingerprints.get((record.serving or "", seen.configuration))
    found = engine.fingerprint
    if found is not None and comparable(found, recorded) and recorded != found:
        yield error(
            FsckKind.ENGINE_CONTENTS_DIFFER,
            engine.id,
            f"its tensors are not those that a clean load of {record.serving} gave, whatever its label says",
            "it is loaded and proved before it is trusted: --repair notes that, the service does it",
            Repair.TAINT,
        )
    elif engine.generates is False:
        # Start-up weights have no label to compare: the engine itself has to name its start-up path.
        vouched = record.serving is not None or seen.model_path == seen.startup_path
        serves = record.serving or record.of_others or "its start-up weights"
        yield error(
            FsckKind.ENGINE_PAUSED,
            engine.id,
            f"it is paused, and serves what the journal says ({serves})",
            "--repair resumes it, and so does the service when it starts",
            Repair.RESUME if vouched else None,
        )


def _other(engine: EngineFacts, seen: Reached, record: EngineRecord, journal: JournalFacts) -> str | None:
    """How what it says differs from what the journal says, None where it does not."""
    if record.serving is None:
        return None
    version = journal.versions.get(record.serving)
    if version is None:
        return None
    loaded_from = f"{engine.root}/{version.path}"
    if version.kind is Kind.DELTA:  # from a copy, which may hold another version by now
        loaded_from = record.model_path or seen.model_path
    seen = seen.expecting(loaded_from, version.label)
    if (seen.model_path, seen.weight_version) == (loaded_from, version.label):
        return None
    return f"it says that it serves {_claim(seen)}, and the journal says {record.serving}"


def _claim(seen: Reached) -> str:
    return f"{seen.model_path} as {seen.weight_version!r}"
