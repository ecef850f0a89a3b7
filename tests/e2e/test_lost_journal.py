"""A service that was stopped, on real processes: its journal is damaged meanwhile, or its engine is meddled with."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from refitd_client import RefitClient
from refitd_client.contract.states import EngineState
from support.jobs import PATIENCE, RUN, Job, running, served_by
from support.servers import EmbeddedServer, refitd_ended

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def doctor(folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Run it as an operator does; its exit code, and what it found of the journal."""
    places = ["--root", str(folder / "root"), "--state", str(folder / "state")]
    code, said = refitd_ended("doctor", *places, *flags, "--json")
    return code, next(found for found in json.loads(said)["findings"] if found["check"] == "journal")


def versions(job: Job) -> list[str]:
    return sorted(path.name for path in (job.root / RUN).glob("v*"))


def in_sync(job: Job, step: int) -> None:
    """Wait until the service says that the engine serves a step."""
    version_id = f"{RUN.replace('/', '~')}~v{step:06d}"
    result = job.client.wait(version_id, "served", timeout=PATIENCE)
    assert result.outcome.value == "served", f"{result}\n{job.refitd.tail()}"
    assert job.engine_now.state is EngineState.IN_SYNC


def told(job: Job, subject: str, text: str) -> None:
    """Wait until the service says of a subject something that begins so. Who read the old journal misses nothing."""
    with RefitClient(job.refitd.url) as client, closing(client.events("1000000")) as events:
        assert next(event for event in events if event.subject == subject and event.text.startswith(text))


def rebuilt(job: Job) -> None:
    """Wait until the service says that the journal is rebuilt."""
    told(job, "journal", "rebuilt")


def test_a_corrupt_journal_is_moved_aside_and_rebuilt_and_nothing_is_deleted(models: Path, tmp_path: Path) -> None:
    a, b = models / "model_a", models / "model_b"
    with EmbeddedServer(tmp_path, a) as engine, running(tmp_path, engine) as job:
        for step, model in enumerate((b, a, b), start=1):
            job.serve(model, step)
        before = served_by(engine)
        job.refitd.stop()
        journal = tmp_path / "state" / "journal.db"
        damaged = b"\xff" * 100 + journal.read_bytes()[100:]
        journal.write_bytes(damaged)
        code, found = doctor(tmp_path)
        assert (code, found["verdict"]) == (1, "failed")
        assert journal.read_bytes() == damaged

        job.refitd.start()
        assert journal.with_name("journal.db.aside-1").read_bytes() == damaged
        in_sync(job, 3)
        # Nothing on record could prove what it served, so it was loaded again.
        assert job.engine_now.last_attempt is not None
        assert served_by(engine) == before
        assert versions(job) == ["v000001", "v000002", "v000003"]
        assert not job.engine_now.paused
        rebuilt(job)
        job.refitd.stop()
        code, found = doctor(tmp_path, "--deep")
        assert (code, found["verdict"]) == (0, "ok")
