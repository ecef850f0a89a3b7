"""A real refitd finds a real engine, brings it to the target, and keeps it when the place that named it is gone."""

import shutil
from pathlib import Path

import pytest

from refitd_client.contract.states import EngineState
from support.jobs import running, served_by
from support.servers import EmbeddedServer, ServerError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_engines_are_found_and_a_place_that_vanishes_takes_none_away(models: Path, tmp_path: Path) -> None:
    trial = tmp_path / "name_resolve/me/exp/trial"
    with (
        EmbeddedServer(tmp_path, models / "model_a") as engine,
        running(tmp_path, engine, "--discover", f"areal:{trial}", named=False) as job,
    ):
        assert job.client.engines().items == []
        entry = trial / "gen_servers/1/ENTRY"
        entry.parent.mkdir(parents=True)
        entry.write_text(engine.url.removeprefix("http://"))
        job.until_engine(EngineState.IN_SYNC)
        job.serve(models / "model_b", 1)
        assert served_by(engine).label == "1"
        shutil.rmtree(trial)
        job.refitd.kill()
        job.refitd.restart()  # who was found before this start is known all the same
        again = job.serve(models / "model_a", 2)
        assert served_by(engine).label == "2"
        assert again.step == 2
        assert "engines that were found before stay" in (job.client.faults().engines or "")


def test_a_place_that_is_none_stops_the_start_and_says_how_to_write_one(tmp_path: Path, models: Path) -> None:
    with (
        EmbeddedServer(tmp_path, models / "model_a") as engine,
        pytest.raises(ServerError, match=r"--discover \(REFITD_DISCOVER\): 'consul:x' is no place"),
        running(tmp_path, engine, "--discover", "consul:x"),
    ):
        pass
