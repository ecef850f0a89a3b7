"""vLLM's own trainer classes broadcast to the front, over Gloo in NCCL's place (`nccl_stand_in`)."""

import os
import socket
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support.front import NCCL_STAND_IN, GroupFront
from support.jobs import RUN, Job, running, served_by
from support.servers import VLLM_VENV, EmbeddedServer

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.timeout(600)]
TESTS = Path(__file__).resolve().parents[1]


class Trainer:
    """The process of the trainer."""

    def __init__(self, url: str, how: str, *folders: Path) -> None:
        python = Path(VLLM_VENV or "").absolute() / "bin/python"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [str(python), "-W", "ignore", str(TESTS / "vllm/nccl_trainer.py"), url, str(port), how]
        self.process = subprocess.Popen(
            [*command, *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(NCCL_STAND_IN)},
        )

    @property
    def said(self) -> str:
        """What it says of the next update. vLLM's log is on the same stream."""
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            if line.startswith(("SENT", "RAISED")):
                return line.strip()
            lines.append(line)
        raise AssertionError("".join(lines)[-3000:])

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextmanager
def training(url: str, how: str, *folders: Path) -> Generator[Trainer]:
    trainer = Trainer(url, how, *folders)
    try:
        yield trainer
    finally:
        trainer.process.kill()
        trainer.process.communicate()


@pytest.fixture
def job(models: Path, tmp_path: Path) -> Generator[Job]:
    with EmbeddedServer(tmp_path, models / "model_a") as engine, running(tmp_path, engine) as job:
        yield job


def published(job: Job, step: int) -> dict[str, bytes]:
    files = (job.root / RUN / f"v{step:06d}").glob("*.safetensors")
    return {name: each.view(-1).clone().numpy().tobytes() for f in files for name, each in bits(f).items()}


def bits(file: Path) -> dict[str, object]:
    import torch

    return {name: each.contiguous().view(torch.uint8) for name, each in load_file(file).items()}


def sent(model: Path) -> dict[str, bytes]:
    return {name: each.reshape(-1).numpy().tobytes() for name, each in bits(model / "model.safetensors").items()}


@pytest.mark.parametrize("how", ["packed", "unpacked"])
def test_what_vllms_trainer_broadcasts_is_a_version_with_its_bytes_and_what_has_a_nan_is_an_error_for_it(
    models: Path, tmp_path: Path, job: Job, how: str
) -> None:
    order = ["model_b", "bad_shape", "bad_nan", "model_a"]
    with GroupFront(tmp_path, job) as front, training(front.url, how, *(models / each for each in order)) as trainer:
        before = served_by(job.engine).answer
        assert trainer.said == "SENT"
        assert published(job, 1) == sent(models / "model_b")
        now = served_by(job.engine)
        assert now.label == "1"
        assert now.answer != before
        for fault in ("down_proj.weight is BF16 [64, 100], and was", "NaN"):  # the trainer hears it, and hangs nowhere
            trainer.go_on()
            said = trainer.said
            assert said.startswith("RAISED")
            assert fault in said
            assert served_by(job.engine) == now
        trainer.go_on()
        assert trainer.said == "SENT"
        assert served_by(job.engine).answer == before


def test_patches_change_what_engines_serve_and_one_that_fits_nothing_is_an_error_and_the_next_one_works(
    models: Path, tmp_path: Path, job: Job
) -> None:
    base = models / "model_a"
    order = ["model_a", "model_b", "model_a"]
    flags = ["--base-model", str(base)]
    with (
        GroupFront(tmp_path, job, *flags) as front,
        training(front.url, "sparse", *(models / each for each in order)) as trainer,
    ):
        before = served_by(job.engine).answer
        assert trainer.said == "SENT"  # the first: nothing
        trainer.go_on()
        assert trainer.said == "SENT"
        assert published(job, 1) == sent(models / "model_b")
        assert served_by(job.engine).answer != before
        trainer.go_on()
        assert trainer.said == "SENT"
        assert published(job, 2) == sent(base)
        assert served_by(job.engine).answer == before


def test_a_trainer_that_dies_in_the_middle_of_its_group_leaves_the_engine_and_the_next_one_works(
    models: Path, tmp_path: Path, job: Job
) -> None:
    with GroupFront(tmp_path, job) as front:
        with training(front.url, "packed", models / "model_b") as trainer:
            assert trainer.said == "SENT"
            now = served_by(job.engine)
        with training(front.url, "packed", models / "model_a") as trainer:
            assert trainer.said == "SENT"
        assert served_by(job.engine) != now
