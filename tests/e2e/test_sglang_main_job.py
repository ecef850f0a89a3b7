"""The main job, every bad input and every state of an engine, on a real SGLang and a real refitd."""

import shutil
from pathlib import Path

import pytest

from refitd_client.contract.states import EngineState
from support.jobs import RUN, running, served_by
from support.servers import SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.fixture
def engine(sglang: SglangServer) -> SglangServer:
    """The server, up; restarted when the test before has killed it."""
    if not sglang.is_running:
        sglang.restart()
    return sglang


def in_order(states: list[str], *wanted: EngineState) -> bool:
    """Whether `wanted` came in that order, whatever came between."""
    rest = iter(states)
    return all(any(state == each for state in rest) for each in wanted)


def test_what_a_trainer_publishes_is_what_sglang_answers_with_and_the_last_k_stay(
    engine: SglangServer, models: Path, tmp_path: Path
) -> None:
    with running(tmp_path, engine, "--keep-last", "2") as job:
        answers: list[list[int]] = []
        for step, model in enumerate(["model_a", "model_b", "model_a", "model_b"], start=1):
            job.serve(models / model, step)
            served = served_by(engine)
            assert (served.path, served.label) == (str(job.root / RUN / f"v{step:06d}"), str(step))
            answers.append(served.answer)
        assert answers[0] == answers[2] != answers[1] == answers[3]
        assert in_order(
            job.states(),
            EngineState.PROBING,
            EngineState.IN_SYNC,
            EngineState.UPDATING,
            EngineState.VERIFYING,
            EngineState.IN_SYNC,
        )
        job.client.reclaim()
        assert sorted(path.name for path in (job.root / RUN).glob("v*")) == ["v000003", "v000004"]
        assert served_by(engine).answer == answers[3]


def test_an_engine_that_was_killed_and_restarted_is_brought_to_the_target_unasked(
    engine: SglangServer, models: Path, tmp_path: Path
) -> None:
    with running(tmp_path, engine) as job:
        job.serve(models / "model_b", 1)
        before = served_by(engine)
        engine.kill()
        gone = job.until_engine(EngineState.UNREACHABLE)
        assert "cannot be reached" in (job.engine_now.reason or "")
        engine.restart()
        job.until_engine(EngineState.IN_SYNC, after=gone.seq)
        assert in_order(
            job.states(),
            EngineState.UNREACHABLE,
            EngineState.BEHIND,
            EngineState.UPDATING,
            EngineState.VERIFYING,
            EngineState.IN_SYNC,
        )
        assert served_by(engine) == before


def test_an_engine_that_dies_while_it_loads_is_tainted_and_repaired_when_it_is_back(
    engine: SglangServer, models: Path, tmp_path: Path
) -> None:
    mount = tmp_path / "mount"
    shutil.copytree(models / "bad_trunc", mount / RUN / "v000001")  # where the engine looks, the file is torn
    with running(tmp_path, engine, "--path-map", str(mount)) as job:
        job.publish(models / "model_b", 1)
        tainted = job.until_engine(EngineState.TAINTED)
        assert "may have loaded, in part or in full" in tainted.text
        engine.died()
        shutil.rmtree(mount / RUN / "v000001")
        shutil.copytree(job.root / RUN / "v000001", mount / RUN / "v000001")
        engine.restart()
        job.until_engine(EngineState.IN_SYNC, after=tainted.seq)
        assert served_by(engine).label == "1"


def test_an_engine_that_cannot_be_repaired_is_quarantined_and_comes_back_on_a_resync(
    engine: SglangServer, models: Path, tmp_path: Path
) -> None:
    mount = tmp_path / "mount"
    view = mount / RUN / "v000001"
    shutil.copytree(models / "model_b", view)
    with running(tmp_path, engine, "--path-map", str(mount)) as job:
        job.serve(models / "model_b", 1)
        before = served_by(engine)
        # From now on the engine finds other weights in the same place. It answers 200, and only its contents tell.
        shutil.copy(models / "model_a" / "model.safetensors", view / "model.safetensors")
        mark = job.now
        job.client.resync(job.engine_now.id)
        job.until_engine(EngineState.QUARANTINED, after=mark)
        assert in_order(job.states(), EngineState.TAINTED, EngineState.QUARANTINED)
        now = job.engine_now
        assert now.paused
        assert "clean load" in (now.reason or "")
        shutil.copy(models / "model_b" / "model.safetensors", view / "model.safetensors")
        mark = job.now
        job.client.resync(now.id)
        job.until_engine(EngineState.IN_SYNC, after=mark)
        assert served_by(engine) == before
