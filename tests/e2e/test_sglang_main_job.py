"""The main job, every bad input and every state of an engine, on a real SGLang and a real refitd."""

import re
import shutil
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from refitd_client import RefitClient, UnauthorizedError, VersionRejectedError
from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import Notice
from refitd_client.errors import NotFoundError
from support.bad_checkpoints import DOWN_PROJ, REASONS
from support.jobs import RUN, Job, Served, running, served_by
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


def test_an_engine_that_does_not_see_the_files_refuses_and_follows_when_it_does(
    engine: SglangServer, models: Path, tmp_path: Path
) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    before = served_by(engine)
    with running(tmp_path, engine, "--path-map", str(mount)) as job:
        job.publish(models / "model_b", 1)
        refused = job.until_engine(EngineState.NACKED)
        assert "Failed to get weights iterator" in (job.engine_now.reason or "")
        assert served_by(engine) == before  # it answers: it is not paused
        (mount / RUN).parent.mkdir()
        (mount / RUN).symlink_to(job.root / RUN)
        job.until_engine(EngineState.IN_SYNC, after=refused.seq)
        served = served_by(engine)
        assert (served.path, served.label) == (str(mount / RUN / "v000001"), "1")


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


def test_a_service_that_is_killed_in_mid_update_repairs_and_resumes_the_engine(
    engine: SglangServer, models: Path, tmp_path: Path
) -> None:
    with running(tmp_path, engine) as job:
        job.serve(models / "model_a", 1)
        mark = job.now
        with engine.frozen():
            job.publish(models / "model_b", 2)
            loading = job.until_engine(EngineState.UPDATING, after=mark)
            job.refitd.kill()
        job.refitd.restart()
        job.until_engine(EngineState.IN_SYNC, after=loading.seq)
        assert in_order(job.states(), EngineState.UPDATING, EngineState.TAINTED, EngineState.IN_SYNC)
        assert served_by(engine).label == "2"


class Bystander:
    """An engine that serves a version, and a check that bad input has left everything as it was."""

    def __init__(self, job: Job, models: Path) -> None:
        self.job, self.models = job, models
        job.serve(models / "model_b", 1)
        self.before: Served = served_by(job.engine)
        self.attempt = job.engine_now.last_attempt
        self.step = 1

    def place(self, model: str) -> tuple[Path, int]:
        """Put a checkpoint where a trainer without the SDK would; its path and step."""
        self.step += 1
        return shutil.copytree(self.models / model, self.job.root / RUN / f"v{self.step:06d}"), self.step

    def assert_undisturbed(self) -> None:
        """No engine has heard of anything, and the version is served on."""
        now = self.job.engine_now
        assert (now.state, now.step, now.last_attempt) == (EngineState.IN_SYNC, 1, self.attempt)
        assert served_by(self.job.engine) == self.before


@pytest.fixture(scope="module")
def bystander(sglang: SglangServer, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Bystander]:
    """One service for all bad inputs: what one of them did to it, the next would notice."""
    if not sglang.is_running:
        sglang.restart()
    with running(tmp_path_factory.mktemp("bystander"), sglang) as job:
        yield Bystander(job, models)


@pytest.mark.parametrize(("model", "reason"), REASONS.items())
def test_a_bad_checkpoint_is_rejected_by_name_and_no_engine_hears_of_it(
    bystander: Bystander, model: str, reason: str
) -> None:
    path, step = bystander.place(model)
    said = bystander.job.rejected(path, step)
    assert re.search(reason, said), said
    bystander.assert_undisturbed()
    assert path.is_dir()


def _outside(bystander: Bystander) -> Path:
    return shutil.copytree(bystander.models / "model_a", bystander.job.root.parent / "elsewhere", dirs_exist_ok=True)


def _missing(bystander: Bystander) -> Path:
    return bystander.job.root / RUN / "v000099"


def _unreadable(bystander: Bystander) -> Path:
    path = bystander.job.root / RUN / "v000099"
    path.write_text("a file where a directory should be")
    return path


@pytest.mark.parametrize(
    ("path_of", "status", "slug"),
    [(_outside, 422, "path-outside-root"), (_missing, 422, "path-missing"), (_unreadable, 422, "path-unreadable")],
)
def test_a_notice_for_a_path_that_cannot_be_used_is_refused_with_a_problem_of_its_own(
    bystander: Bystander, path_of: Callable[[Bystander], Path], status: int, slug: str
) -> None:
    path = path_of(bystander)
    said = bystander.job.refused(path, 99)
    assert said[:2] == (status, slug)
    assert path.name in said[2]
    bystander.assert_undisturbed()
    path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)


def test_the_same_step_with_other_content_is_a_conflict(bystander: Bystander) -> None:
    path = shutil.copytree(bystander.models / "model_a", bystander.job.root / RUN / "checkpoint-one")
    status, slug, _ = bystander.job.refused(path, 1)
    assert (status, slug) == (409, "version-conflict")
    bystander.assert_undisturbed()
    assert path.is_dir()


def test_an_unknown_engine_is_named(bystander: Bystander) -> None:
    with pytest.raises(NotFoundError, match=r"nobody.*unknown-engine"):
        bystander.job.client.resync("nobody")
    bystander.assert_undisturbed()


def test_a_wrong_token_changes_nothing(bystander: Bystander) -> None:
    path, step = bystander.place("model_a")
    shutil.move(path, bystander.job.root / "hidden")
    for token in ("wrong", None):
        with (
            RefitClient(bystander.job.refitd.url, token=token) as client,
            pytest.raises(UnauthorizedError, match="unauthorized"),
        ):
            client.announce(Notice(run=RUN, step=step))
    bystander.assert_undisturbed()


def test_a_trainer_hears_the_reason_and_goes_on_with_the_next_step(bystander: Bystander) -> None:
    publication = bystander.job.publish(bystander.models / "bad_missing", 50)
    with pytest.raises(VersionRejectedError, match=DOWN_PROJ):
        publication.wait()
    bystander.assert_undisturbed()
    bystander.job.serve(bystander.models / "model_a", 51)
    assert served_by(bystander.job.engine).label == "51"
    assert publication.path.is_dir()
