"""`refitd bench transports`: every way that can work is tried, the others are named, and the engine is as before."""

from collections.abc import Generator
from pathlib import Path

import pytest

from refitd.diagnose.transports import TransportComparison
from refitd_client import WeightPublisher
from refitd_client.contract.states import Standing
from support.command_line import answer, refitd
from support.jobs import RUN, TOKEN, Job, running, served_by
from support.servers import EmbeddedServer

ONE = ("--publications", "1", "--between", "0", "--device", "cpu")


@pytest.fixture
def job(tmp_path: Path, models: Path) -> Generator[Job]:
    with EmbeddedServer(tmp_path, models / "model_a") as engine, running(tmp_path, engine) as job:
        yield job


def told(job: Job, model: Path, *flags: str) -> TransportComparison:
    words = ("bench", "transports", str(model), "--root", str(job.root), "--url", job.refitd.url)
    return answer(*words, *ONE, *flags, kind=TransportComparison, env={"REFITD_TOKEN": TOKEN})


def test_ways_that_work_have_figures_others_a_reason_and_the_engine_ends_on_the_weights_of_the_folder(
    job: Job, models: Path
) -> None:
    with WeightPublisher(job.root, RUN, job.refitd.url, token=TOKEN, engines="mine") as publisher:
        publisher.publish(models / "model_b", step=1).wait(60)
    as_it_is = served_by(job.engine).answer
    job.client.close_run(RUN)
    found = told(job, models / "model_b")
    figures = {each.transport: each for each in found.figures}
    assert [name for name, each in figures.items() if each.answered] == ["disk", "delta"]
    assert set(figures["disk"].medians_ms) == {"answered", "held", "paused"}
    assert (figures["disk"].bytes or 0) > (figures["delta"].bytes or 0) > 0
    for transport in ("handover", "nccl", "gloo"):
        assert ") has refitd inside: install it there" in (figures[transport].reason or "")
    assert found.fastest in {"disk", "delta"}
    assert found.auto == "delta"
    assert served_by(job.engine).answer == as_it_is
    closed = {run.run: run.standing is Standing.CLOSED for run in job.client.overview().runs}
    assert closed["bench/transports"]


def test_a_run_that_has_versions_is_not_taken_without_a_word(job: Job, models: Path) -> None:
    job.serve(models / "model_a", 7)
    words = ("bench", "transports", str(models / "model_a"), "--root", str(job.root), "--url", job.refitd.url)
    result = refitd(*words, *ONE, "--run", RUN, env={"REFITD_TOKEN": TOKEN})
    assert result.exit_code == 2
    assert "publishes up to 12 versions of exp/trial" in result.stderr
    result = refitd(*words, *ONE, env={"REFITD_TOKEN": TOKEN})
    assert result.exit_code == 2
    assert f"no engine is free: try the engines of a run, --run {RUN}" in " ".join(result.stderr.split())
    assert not (job.root / "bench").exists(), "nothing is written before that is known"
    assert job.engine_now.step == 7


def test_nothing_is_written_into_a_root_that_the_service_does_not_watch(job: Job, models: Path, tmp_path: Path) -> None:
    (tmp_path / "other" / ".refitd").mkdir(parents=True)
    (tmp_path / "other" / ".refitd" / "id").write_text("another")
    words = ("bench", "transports", str(models / "model_a"), "--root", str(tmp_path / "other"), "--url", job.refitd.url)
    result = refitd(*words, *ONE, env={"REFITD_TOKEN": TOKEN})
    assert result.exit_code == 2
    assert "your root is not this service's" in " ".join(result.stderr.split())
    assert [each.name for each in (tmp_path / "other").iterdir()] == [".refitd"]


def test_a_folder_without_weights_and_a_device_that_is_not_there_are_named(
    job: Job, models: Path, tmp_path: Path
) -> None:
    given = "--root", str(job.root), "--url", job.refitd.url
    for folder, device, code, said in (
        (tmp_path, "cpu", 1, f"{tmp_path} has no *.safetensors"),
        (models / "model_a", "cuda:99", 2, "--device cuda:99: "),
    ):
        result = refitd("bench", "transports", str(folder), *given, "--device", device, env={"REFITD_TOKEN": TOKEN})
        assert result.exit_code == code
        assert said in result.stderr


def test_nothing_is_published_into_a_run_while_the_service_cannot_say_what_it_has(tmp_path: Path, models: Path) -> None:
    words = ("bench", "transports", str(models / "model_a"), "--root", str(tmp_path), "--url", "http://127.0.0.1:9")
    for more in ((), ("--run", RUN)):
        result = refitd(*words, *ONE, *more)
        assert (result.exit_code, list(tmp_path.iterdir())) == (3, [])
