"""What fsck makes of facts: engines held against the journal, and what must not be repaired."""

from pathlib import Path
from typing import Any

import pytest

from refitd.diagnose.fsck.compare import FsckFacts, compare
from refitd.diagnose.fsck.disagreement import Disagreement, FsckKind, Repair, Severity
from refitd.diagnose.fsck.disk import DiskFacts
from refitd.diagnose.journal import JournalFacts
from refitd.diagnose.roster import EngineFacts
from refitd.engine.port import Reached, Unreached
from refitd.root.outcome import Incoming, Slot
from refitd.root.scan import FoundFolder, Listing, ListingFailed
from refitd.state.journal.condition import Condition, Corrupt, Newer, Sound, UnreadableJournal
from refitd.state.records import NEW, AttemptRecord, EngineRecord, Origin, UpdateRecord
from refitd_client.contract.states import VersionState
from support.records import engine, version

V1, V2 = version(1), version(2)
SERVES_1 = engine(serving=V1.id)
LISTING = Listing(tuple(FoundFolder(run=v.run, order=v.order, path=v.path) for v in (V1, V2)), frozenset())


def disk(**fields: Any) -> DiskFacts:
    """A root on which everything is as the journal says."""
    signatures = {v.path: v.signature for v in (V1, V2)}
    return DiskFacts(**({"listing": LISTING, "signatures": signatures} | fields))


def journal(*records: EngineRecord, **fields: Any) -> JournalFacts:
    defaults: dict[str, Any] = {
        "path": Path("/state/journal.db"),
        "condition": Sound(NEW),
        "versions": {v.id: v for v in (V1, V2)},
        "engines": {record.id: record for record in records},
        "fingerprints": {(V1.id, "c"): "good"},
    }
    return JournalFacts(**(defaults | fields))


def says(path: str = "/root/run/v000001", label: str = "1", **fields: Any) -> EngineFacts:
    seen = Reached(
        model_path=path, weight_version=label, server_version="", configuration="c", startup_path=fields.pop("up", None)
    )
    defaults: dict[str, Any] = {"fingerprint": "good", "generates": True}
    return EngineFacts(id="a", url="http://a", root="/root", seen=seen, **(defaults | fields))


def found(
    books: JournalFacts, on_disk: DiskFacts | None = None, engines: list[EngineFacts] | None = None, **more: Any
) -> list[Disagreement]:
    return compare(FsckFacts(journal=books, disk=on_disk or disk(), engines=engines, **more))


def kinds(findings: list[Disagreement]) -> list[tuple[FsckKind, Repair | None]]:
    return [(finding.kind, finding.repair) for finding in findings]


def test_nothing_is_found_where_all_agree() -> None:
    assert found(journal(SERVES_1), engines=[says()]) == []


def test_an_engine_that_was_restarted_serves_something_else() -> None:
    assert kinds(found(journal(SERVES_1), engines=[says("/base", "default")])) == [
        (FsckKind.ENGINE_SERVES_OTHER, Repair.FORGET_SERVING)
    ]


def test_a_label_that_someone_else_set_is_not_believed() -> None:
    findings = found(journal(SERVES_1), engines=[says(fingerprint="of something else", generates=False)])
    assert kinds(findings) == [(FsckKind.ENGINE_CONTENTS_DIFFER, Repair.TAINT)]


def test_an_engine_that_is_paused_though_its_contents_are_known_is_resumed() -> None:
    assert kinds(found(journal(SERVES_1), engines=[says(generates=False)])) == [(FsckKind.ENGINE_PAUSED, Repair.RESUME)]


def test_a_paused_engine_on_its_start_up_weights_is_resumed_only_if_it_says_so_itself() -> None:
    at_base = engine(serving=None)
    vouched = found(journal(at_base), engines=[says("/base", "default", up="/base", generates=False)])
    assert kinds(vouched) == [(FsckKind.ENGINE_PAUSED, Repair.RESUME)]
    unknown = found(journal(at_base), engines=[says("/x", "default", up="/base", generates=False)])
    assert kinds(unknown) == [(FsckKind.ENGINE_PAUSED, None)]


@pytest.mark.parametrize("record", [engine(known=False), engine(serving=V1.id)])
def test_a_paused_engine_whose_contents_are_unknown_is_never_resumed(record: EngineRecord) -> None:
    attempt = AttemptRecord(id="x", engine="a", version=V2.id, started_at="t")
    findings = found(journal(record, open_attempts=[attempt]), engines=[says(generates=False)])
    assert Repair.RESUME not in {finding.repair for finding in findings}
    assert (FsckKind.ENGINE_UNPROVEN, None) in kinds(findings)
    assert (FsckKind.ATTEMPT_OPEN, Repair.CLOSE_ATTEMPT) in kinds(findings)


def test_an_engine_that_does_not_answer_and_one_that_nobody_knows() -> None:
    gone = EngineFacts(id="a", url="http://a", root="/root", seen=Unreached(reason="connection refused"))
    assert kinds(found(journal(SERVES_1), engines=[gone])) == [(FsckKind.ENGINE_UNREACHABLE, None)]
    assert kinds(found(journal(), engines=[says()])) == [(FsckKind.ENGINE_UNKNOWN, None)]


def test_leases_to_versions_that_are_not_there() -> None:
    record = engine(serving="run~v000007", unproven=("run~v000008", V1.id))
    assert kinds(found(journal(record))) == [
        (FsckKind.LEASE_DANGLING, Repair.FORGET_SERVING),
        (FsckKind.LEASE_DANGLING, Repair.DROP_LEASES),
    ]


def test_an_update_to_nowhere() -> None:
    update = UpdateRecord(number=1, run="run", version="run~v000009", cause="", started_at="")
    assert kinds(found(journal(updates=[update]))) == [(FsckKind.UPDATE_DANGLING, None)]


@pytest.mark.parametrize(
    ("listing", "kind"),
    [(ListingFailed("EIO"), FsckKind.ROOT_UNREADABLE), (Listing((), frozenset()), FsckKind.ROOT_EMPTY)],
)
def test_a_vanished_mount_is_no_reason_to_mark_versions_as_lost(listing: Any, kind: FsckKind) -> None:
    gone = {v.path: None for v in (V1, V2)}
    assert kinds(found(journal(), disk(listing=listing, signatures=gone))) == [(kind, None)]


def test_what_a_killed_sweep_left_is_finished_and_what_came_back_is_left_alone() -> None:
    retired, deleted = version(1, state=VersionState.RETIRED), version(2, state=VersionState.DELETED)
    books = journal(versions={v.id: v for v in (retired, deleted)}, fingerprints={})
    assert kinds(found(books)) == [
        (FsckKind.VERSION_BACK, None),
        (FsckKind.VERSION_HALF_RECLAIMED, Repair.FINISH_RECLAIM),
    ]


def test_a_folder_that_is_used_again_is_not_what_was_deleted() -> None:
    deleted = version(1, state=VersionState.DELETED, path="run/checkpoint")
    again = version(2, path="run/checkpoint", signature="s")
    books = journal(versions={v.id: v for v in (deleted, again)})
    assert found(books, disk(signatures={"run/checkpoint": "s"})) == []


@pytest.mark.parametrize("condition", [Corrupt("x"), Sound(Origin(cause="lost", lost=True, rebuilt=False))])
def test_nothing_is_deleted_before_the_journal_is_rebuilt(condition: Condition) -> None:
    left = disk(
        incoming=[Incoming(path="run/.incoming-1", abandoned=True, reason="abandoned")], trash=["0" * 32], signatures={}
    )
    retired = version(1, state=VersionState.RETIRED)
    findings = found(journal(condition=condition, versions={retired.id: retired}), left)
    repairs = {finding.repair for finding in findings}
    assert repairs <= {None, Repair.REBUILD_JOURNAL}
    assert {FsckKind.INCOMING_ABANDONED, FsckKind.TRASH_LEFT} <= {finding.kind for finding in findings}
    assert kinds(found(journal(), left))[-2:] == [
        (FsckKind.INCOMING_ABANDONED, Repair.DISCARD_INCOMING),
        (FsckKind.TRASH_LEFT, Repair.EMPTY_TRASH),
    ]


@pytest.mark.parametrize("condition", [Newer(9), UnreadableJournal("locked")])
def test_a_journal_that_proves_nothing_is_left_as_it_is(condition: Condition) -> None:
    findings = found(journal(condition=condition, versions={}))
    assert [(finding.severity, finding.repair) for finding in findings] == [(Severity.ERROR, None)]


def test_a_running_service_is_only_looked_at() -> None:
    findings = found(journal(engine(known=False)), disk(trash=["0" * 32]), running="pid 7")
    assert {finding.repair for finding in findings} == {None}
    assert FsckKind.SERVICE_RUNNING in {finding.kind for finding in findings}


def test_the_worst_comes_first() -> None:
    findings = found(journal(), disk(signatures={V1.path: None, V2.path: V2.signature}, trash=["0" * 32]))
    assert [finding.severity for finding in findings] == [Severity.ERROR, Severity.WARNING]


def test_a_slot_that_is_none_is_taken_away_and_somebody_else_s_folder_is_not() -> None:
    slots = [
        Slot(run="run", name="a", layout="L"),
        Slot(run="run", name="b", layout="L", fault="holds 'refit.json', which is no slot's"),
        Slot(run="run", name="c", fault="was not put there by this service: it is not deleted", ours=False),
    ]
    findings = found(journal(), disk(slots=slots))
    assert kinds(findings) == [(FsckKind.SLOT_DAMAGED, Repair.DISCARD_SLOT), (FsckKind.FOREIGN, None)]


def test_a_folder_of_slots_that_cannot_be_used_is_something_to_do() -> None:
    (finding,) = found(journal(), disk(slots=[Slot(run="", name="", fault="cannot be used", ours=False)]))
    assert (finding.kind, finding.subject, finding.is_open) == (FsckKind.SLOTS_UNUSABLE, ".refitd/slots", True)
