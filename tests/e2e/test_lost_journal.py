"""A service that was stopped, on real processes: its journal is damaged meanwhile, or its engine is meddled with."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from refitd_client import RefitClient, WeightPublisher
from refitd_client.contract.states import EngineState
from support.jobs import PATIENCE, RUN, Job, running, served_by
from support.servers import ADMIN_KEY, EmbeddedServer, refitd_ended

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


def test_a_service_that_finds_its_journal_corrupt_says_so_and_collects_nothing_while_an_engine_is_away(
    models: Path, tmp_path: Path
) -> None:
    a, b = models / "model_a", models / "model_b"
    with EmbeddedServer(tmp_path, a) as engine, running(tmp_path, engine, "--keep-last", "2") as job:
        for step, model in enumerate((b, a), start=1):
            job.serve(model, step)
        job.refitd.stop()
        with WeightPublisher(job.root, RUN) as publisher:
            publisher.publish(b, step=3)
        (tmp_path / "state" / "journal.db").write_bytes(b"garbage" * 1000)
        engine.kill()
        job.refitd.start()
        assert "the journal was lost and is rebuilt" in job.refitd.log.read_text()
        plan = job.client.reclaim()
        assert all(item.keep for item in plan.items)
        assert versions(job) == ["v000001", "v000002", "v000003"]
        engine.restart()
        in_sync(job, 3)
        rebuilt(job)
        # The oldest is judged last. What is not judged yet is kept, and the service collects by itself after that.
        told(job, f"{RUN.replace('/', '~')}~v000001", "deleted")
        assert versions(job) == ["v000002", "v000003"]


def tell(engine: EmbeddedServer, path: str, **body: Any) -> None:
    """Speak to an engine past refitd, as someone else would."""
    opens = {"Authorization": f"Bearer {ADMIN_KEY}"}
    httpx.post(f"{engine.url}{path}", json=body, headers=opens, timeout=PATIENCE, trust_env=False).raise_for_status()


def test_an_engine_whose_contents_are_not_those_on_record_is_loaded_again_when_the_service_starts(
    models: Path, tmp_path: Path
) -> None:
    """The version label set by someone else: path and label are right, and the weights are others."""
    with EmbeddedServer(tmp_path, models / "model_a") as engine, running(tmp_path, engine) as job:
        job.serve(models / "model_b", 1)
        before = served_by(engine)
        job.refitd.stop()
        place = job.root / RUN / "v000001"
        place.rename(tmp_path / "elsewhere")
        place.symlink_to(models / "model_a")
        tell(engine, "/pause_generation", mode="retract")
        tell(engine, "/update_weights_from_disk", model_path=str(place), weight_version="1", load_format="auto")
        place.unlink()
        (tmp_path / "elsewhere").rename(place)
        job.refitd.start()
        in_sync(job, 1)
        assert served_by(engine) == before
