"""Engines follow the real trainers of transformers and TRL, in a script of the user's with two lines for refitd."""

from collections.abc import Generator
from pathlib import Path

import pytest

from support.jobs import RUN, TOKEN, Job, running, served_by
from support.scripts import script_ended
from support.servers import EmbeddedServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SCRIPT = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

root, run, url, token, model_path, out = sys.argv[1:7]
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(model_path)
tokenizer = AutoTokenizer.from_pretrained(model_path)
settings = dict(
    output_dir=out, max_steps=4, learning_rate=1e-2, per_device_train_batch_size=2, use_cpu=True, report_to="none",
    save_strategy="steps", save_steps=3, save_only_model=True, disable_tqdm=True, bf16=False,
)
"""
TRAINER = """
from transformers import Trainer, TrainingArguments
rows = [{"input_ids": [n, n + 1, n + 2], "labels": [n, n + 1, n + 2]} for n in range(5, 25)]
trainer = Trainer(model=model, args=TrainingArguments(**settings), train_dataset=rows)
"""
GRPO = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
rows = Dataset.from_list([{"prompt": f"line {n}"} for n in range(20)])
settings |= dict(num_generations=2, max_completion_length=4)
trainer = GRPOTrainer(
    model=model, reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
    args=GRPOConfig(**settings), train_dataset=rows, processing_class=tokenizer,
)
"""
TWO_LINES = """
from refitd_client.trainers.transformers import RefitCallback
trainer.add_callback(RefitCallback(root, run, url, every={every}, wait=60, errors={errors!r}, token=token))
"""
TRAIN = """
trainer.train()
print("trained", trainer.state.global_step)
model.save_pretrained(out + "/last")
"""


@pytest.fixture
def job(models: Path, tmp_path: Path) -> Generator[Job]:
    with EmbeddedServer(tmp_path, models / "model_a") as engine, running(tmp_path, engine) as job:
        yield job


def ended(job: Job, model: Path, out: Path, body: str) -> tuple[int, str]:
    """Run a user's script to its end; its exit status, and all that it printed."""
    out.mkdir(exist_ok=True)
    script = out / "script.py"
    script.write_text(SCRIPT + body)
    return script_ended(script, job.root, RUN, job.refitd.url, TOKEN, model, out, TOKENIZERS_PARALLELISM="false")


def train(job: Job, model: Path, out: Path, body: str, *, every: int | None = 1) -> None:
    """The same, of a script that ends well."""
    status, said = ended(job, model, out, body + TWO_LINES.format(every=every, errors="raise") + TRAIN)
    assert status == 0, said


def published(job: Job) -> list[int]:
    return sorted(version.step for version in job.client.versions().items)


@pytest.mark.parametrize(
    "trainer", [pytest.param(TRAINER, id="transformers"), pytest.param(GRPO, id="trl", marks=pytest.mark.thorough)]
)
def test_engines_serve_what_the_trainer_has_learned(trainer: str, models: Path, tmp_path: Path, job: Job) -> None:
    before = served_by(job.engine)
    train(job, models / "model_a", tmp_path / "out", trainer)
    assert published(job) == [1, 2, 3, 4]
    after = served_by(job.engine)
    assert (after.path, after.label) == (str(job.root / RUN / "v000004"), "4")
    assert after.answer != before.answer
    (tmp_path / "other").mkdir()
    with EmbeddedServer(tmp_path / "other", tmp_path / "out/last") as other:
        assert served_by(other).answer == after.answer
