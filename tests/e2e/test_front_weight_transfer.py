"""vLLM's weight transfer at the front, and what the engines of the run serve: folders (`disk`)."""

import re
import shutil
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from refitd_client.contract.states import EngineState
from support.bad_checkpoints import REASONS
from support.front import FrontServer
from support.jobs import PATIENCE, PROMPT, RUN, Job, running, served_by
from support.servers import EmbeddedServer
from support.weight_transfer import WeightTransfer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


class Trained:
    """Two engines of a run, the front of both, and a trainer that was given its address."""

    def __init__(self, job: Job, engines: list[EmbeddedServer], front: FrontServer, folder: Path) -> None:
        self.job, self.engines, self.front, self.folder = job, engines, front, folder
        self.trainer = WeightTransfer(front.url)

    def saved(self, model: Path, name: str) -> Path:
        """A checkpoint where the trainer saves them."""
        return Path(shutil.copytree(model, self.folder / name))

    @property
    def served(self) -> list[str]:
        return [served_by(engine).label for engine in self.engines]

    @property
    def generated(self) -> httpx.Response:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        return httpx.post(f"{self.front.url}/generate", json=body, timeout=PATIENCE, trust_env=False)


@pytest.fixture
def trained(models: Path, tmp_path: Path) -> Generator[Trained]:
    (tmp_path / "second").mkdir()
    (tmp_path / "fileroot").mkdir()
    with (
        EmbeddedServer(tmp_path, models / "model_a") as one,
        EmbeddedServer(tmp_path / "second", models / "model_a") as two,
        running(tmp_path, one, "--engine", two.url) as job,
        FrontServer(tmp_path, job) as front,
    ):
        trained = Trained(job, [one, two], front, tmp_path / "fileroot")
        with trained.trainer:
            yield trained


def test_a_folder_is_one_version_of_all_engines_of_the_run_with_the_trainers_name(
    models: Path, trained: Trained
) -> None:
    trainer = trained.trainer
    assert trained.generated.status_code == 200  # by the start-up weights, as a trainer expects
    assert trainer.init() == ""
    assert trainer.ask("/get_world_size") == {"world_size": 1}
    old = served_by(trained.engines[0]).answer
    folder = trained.saved(models / "model_b", "first")
    assert trainer.by_disk(folder, "first") == ""
    shutil.rmtree(folder)
    assert trained.served == ["1", "1"]
    assert all(served_by(engine).answer != old for engine in trained.engines)
    assert trainer.ask("/weight_info") == {"weight_version": "first"}
    assert trained.job.client.version("exp~trial~v000001").metadata["weight_version"] == "first"
    assert trained.generated.status_code == 200

    assert trainer.by_disk(trained.saved(models / "model_a", "second"), "7") == ""  # a number is the step
    assert trained.served == ["7", "7"]
    assert trainer.by_disk(trained.saved(models / "model_b", "third")) == ""  # none: the next step
    assert trained.served == ["8", "8"]
    assert "already" in trainer.by_disk(trained.saved(models / "model_a", "fourth"), "first")
    assert "not above 8" in trainer.by_disk(trained.saved(models / "model_a", "fifth"), "7")
    assert trained.served == ["8", "8"]


def test_what_is_no_good_checkpoint_is_an_error_that_names_the_fault_and_the_next_update_works(
    models: Path, trained: Trained
) -> None:
    trainer = trained.trainer
    assert trainer.by_disk(trained.saved(models / "model_b", "good"), "1") == ""
    before = [served_by(engine) for engine in trained.engines]
    for step, (variant, reason) in enumerate(REASONS.items(), start=2):
        said = trainer.by_disk(trained.saved(models / variant, variant), str(step))
        assert re.search(reason, said), (variant, said)
    assert [served_by(engine) for engine in trained.engines] == before
    assert all(
        engine.state is EngineState.IN_SYNC and not engine.paused for engine in trained.job.client.engines().items
    )
    assert trained.generated.status_code == 200
    assert trainer.by_disk(trained.saved(models / "model_a", "next"), "100") == ""
    assert trained.served == ["100", "100"]


def test_a_session_that_is_not_finished_or_begun_twice_changes_nothing_and_the_next_one_works(
    models: Path, trained: Trained
) -> None:
    trainer = trained.trainer
    good, other = trained.saved(models / "model_b", "good"), trained.saved(models / "model_a", "other")
    assert "no update has begun" in trainer.update(path=str(good))
    assert "no update has begun" in trainer.finish()
    assert trainer.start() == ""
    assert "no weights have come" in trainer.finish()
    assert trainer.update(path=str(good)) == ""
    assert trainer.start() == ""  # what came before is dropped
    assert trainer.update(path=str(other)) == ""
    assert "nothing beside it" in trainer.update(path=str(good))
    assert "nothing beside it" in trainer.finish()
    assert "nothing beside it" in trainer.finish()  # the answer stays
    for bad in ("/etc", "relative", str(trained.folder / "../x"), str(trained.folder)):
        assert trainer.start() == ""
        assert trainer.update(path=bad) != "", bad
        assert trainer.finish() != ""
    assert not list((trained.job.root / RUN).glob("v*"))
    assert trained.generated.status_code == 200
    assert trainer.by_disk(other, "3") == ""
    assert trained.served == ["3", "3"]


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"trainer_addr": "10.0.0.1", "layout": {}}, "trainer_addr"),
        ({"world_size": 1, "master_address": "127.0.0.1", "master_port": 9}, "1 ranks"),
        ({"world_size": 2}, "master_address and master_port"),
        ({"world_size": 10**9, "master_address": "127.0.0.1", "master_port": 9}, "ranks"),
    ],
)
def test_a_way_that_is_not_taken_is_refused_by_its_name_with_those_that_are(
    trained: Trained, info: dict[str, object], said: str
) -> None:
    refused = trained.trainer.init(**info)
    assert said in refused
    assert "disk" in refused
