"""A new refitd in the place of an old one, with real processes: engines answer on, a trainer publishes on."""

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from refitd.state.journal.schema import SCHEMA_VERSION
from refitd_client import VersionRejectedError
from refitd_client.contract.states import EngineState, VersionState
from support.jobs import RUN, TOKEN, Job, running, served_by
from support.servers import EmbeddedServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TRAINER = """
import sys
from refitd_client import PublishOptions, WeightPublisher

root, run, url, token, *models = sys.argv[1:]
with WeightPublisher(root, run, url, options=PublishOptions(token=token)) as publisher:
    print("publishing", flush=True)
    for step in range(4, 10):
        publication = publisher.publish(models[step % 2], step=step)
        print(f"published {step}", flush=True)
        print(f"{publication.wait(timeout=60).outcome.value} {step}", flush=True)
"""


@contextmanager
def training(job: Job, *models: Path) -> Generator[subprocess.Popen[str]]:
    """A trainer in a process of its own that publishes steps 4 to 9 and waits for each."""
    command = [sys.executable, "-c", TRAINER, str(job.root), RUN, job.refitd.url, TOKEN, *map(str, models)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def asking(engine: EmbeddedServer) -> Generator[list[str]]:
    """Ask an engine for tokens all the time; what went wrong."""
    over, faults, answers = threading.Event(), [], []

    def ask() -> None:
        while not over.is_set():
            try:
                answers.append(served_by(engine).answer)
            except Exception as error:
                faults.append(repr(error))
                return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield faults
    finally:
        over.set()
        thread.join()
    assert len(answers) > 10


def of_an_old_refitd(journal: Path) -> None:
    """Have a journal say that its tables are those of an earlier release."""
    with closing(sqlite3.connect(journal)) as connection:
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION - 1}")


def test_a_new_refitd_takes_over_from_an_old_one_while_engines_serve_and_a_trainer_publishes(
    models: Path, tmp_path: Path
) -> None:
    a, b = models / "model_a", models / "model_b"
    with EmbeddedServer(tmp_path, a) as engine, running(tmp_path, engine, "--keep-last", "2") as job:
        pinned = job.serve(b, 1).version_id
        barred = job.serve(a, 2).version_id
        job.client.pin(pinned)
        before = job.now  # the engine may be back before the reply is here
        job.client.rollback(RUN)
        job.until(lambda event: event.kind == "engine" and f"serves {pinned}" in event.text, after=before)
        with pytest.raises(VersionRejectedError):
            job.serve(models / "bad_missing", 3)

        journal = tmp_path / "state" / "journal.db"
        with asking(engine) as faults:
            job.refitd.stop()
            of_an_old_refitd(journal)
            with training(job, a, b) as trainer:
                assert trainer.stdout is not None
                assert trainer.stdout.readline() == "publishing\n"  # nobody is there to take its notice
                job.refitd.start()
                said = trainer.stdout.read().splitlines()
                assert trainer.wait() == 0
        assert not faults
        assert [line for line in said if line.startswith("published")] == [f"published {step}" for step in range(4, 10)]
        assert {line.split()[0] for line in said} <= {"published", "served", "superseded"}
        assert said[-1] == "served 9"

        assert "the journal was lost and is rebuilt" in job.refitd.log.read_text()
        with closing(sqlite3.connect(journal)) as connection:
            assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        assert journal.with_name("journal.db.aside-1").exists()
        versions = {version.id: version for version in job.client.versions().items}
        assert versions[pinned].pinned
        assert versions[barred].barred
        assert versions[f"{barred[:-1]}3"].state is VersionState.REJECTED
        job.client.reclaim()
        assert {"v000001", "v000009"} <= {path.name for path in (job.root / RUN).iterdir()}, "pinned, and served"
        assert job.engine_now.state is EngineState.IN_SYNC
        assert served_by(engine).label == "9"
