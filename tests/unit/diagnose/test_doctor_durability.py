"""What doctor says of engines whose version is in memory alone."""

import pytest

from refitd.state.journal.recovery import Sound
from refitd.state.records import NEW, EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.states import VersionState
from refitd_doctor.finding import CheckName, CheckVerdict, Finding
from refitd_doctor.journal import JournalFacts, judge_durability
from support.records import engine, version

SERVED = "2026-01-01T00:00:01Z"
FILES = version(30, served_at=SERVED, bytes=3_090_000_000)
MEMORY = version(37, state=VersionState.ANNOUNCED, handed=True, served_at=SERVED, metadata={"durable": "every=10"})
CHOSEN = "it gets files only where an engine does not take it (durable=every=10)"


def judged(versions: list[VersionRecord], *engines: EngineRecord, push: str | None = None) -> list[Finding]:
    return list(
        judge_durability(
            JournalFacts(
                path="journal.db",
                condition=Sound(NEW),
                versions={each.id: each for each in versions},
                engines={each.id: each for each in engines},
            ),
            push,
        )
    )


def test_it_says_where_an_engine_that_restarts_goes_back_to_and_what_it_loads() -> None:
    (found,) = judged([FILES, MEMORY], engine("a", serving=MEMORY.id), engine("b", serving=MEMORY.id))
    assert (found.check, found.subject, found.verdict) == (CheckName.VERSIONS, "run", CheckVerdict.OK)
    assert found.text == (
        f"2 engines serve run~v000037 from memory alone ({CHOSEN}): "
        "one that restarts goes back to run~v000030, by 7 steps, and loads 3.1 GB"
    )


def test_it_warns_where_there_is_no_version_with_files() -> None:
    (found,) = judged([MEMORY], engine(serving=MEMORY.id))
    assert found.verdict is CheckVerdict.WARNING
    assert "no version of the run has good files, so one that restarts stays on its start-up weights" in found.text


@pytest.mark.parametrize(("state", "why"), [(VersionState.REJECTED, "no space"), (VersionState.ANNOUNCED, None)])
def test_it_warns_where_files_should_be_and_are_not(state: VersionState, why: str | None) -> None:
    lacks = version(31, state=state, handed=True, reason=why)
    (found,) = judged([FILES, lacks], engine(serving=lacks.id))
    assert (found.verdict, (why or "its files are to follow") in found.text) == (CheckVerdict.WARNING, True)


def test_what_no_engine_holds_is_not_spoken_of() -> None:
    assert judged([FILES, MEMORY], engine(serving=FILES.id), engine("b", serving=MEMORY.id, known=False)) == []


def test_it_warns_where_the_service_pushes_that_the_store_gets_what_has_files_alone() -> None:
    chosen, pushed = judged([FILES, MEMORY], engine(serving=MEMORY.id), push="s3://bucket/job")
    assert (chosen.verdict, pushed.verdict) == (CheckVerdict.OK, CheckVerdict.WARNING)
    assert pushed.text == (
        "run~v000037 has no files, and only versions with files are pushed: s3://bucket/job gets run~v000030 at most"
    )
    assert "durable='always'" in str(pushed.fix)
    _, pushed = judged([MEMORY], engine(serving=MEMORY.id), push="s3://bucket/job")
    assert "s3://bucket/job gets no version of the run" in pushed.text
    assert judged([FILES, MEMORY], engine(serving=FILES.id), push="s3://bucket/job") == []
