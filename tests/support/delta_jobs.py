"""A trainer that fine-tunes a little from step to step and publishes deltas, beside real engines on a real refitd."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from refitd_client import Publication, PublishOptions, WeightPublisher
from refitd_client.publish.options import DeltaRules

from .jobs import PATIENCE, RUN, TOKEN, Job, Served, served_by

BOOST = 0.5  # what is added to an element: enough to change what a model with random weights answers


class FineTuning:
    """`weights` are a model's tensors; each step changes some elements of a few."""

    def __init__(self, job: Job, model: Path, publisher: WeightPublisher) -> None:
        self.job = job
        self.publisher = publisher
        self._model = model
        self.weights = {name: tensor.clone() for file in _shards(model) for name, tensor in load_file(file).items()}
        self.step = 0

    def publish(self) -> Publication:
        """Train a step, publish it and wait until it is served."""
        self.step += 1
        chance = np.random.default_rng(self.step)
        for name in sorted(self.weights)[self.step % 3 :: 3]:
            flat = self.weights[name].view(-1)
            flat[chance.choice(len(flat), max(1, len(flat) // 50), replace=False)] += BOOST
        publication = self.publisher.publish(self.weights, step=self.step, transport="delta")
        publication.wait(timeout=PATIENCE)
        return publication

    def answered(self) -> Served:
        """What the engine answers now."""
        return served_by(self.job.engine)

    def gathered(self, folder: Path) -> Path:
        """A full checkpoint of the weights as the trainer has them."""
        folder.mkdir()
        for file in self._model.iterdir():
            if not file.name.endswith((".safetensors", ".index.json")):
                (folder / file.name).write_bytes(file.read_bytes())
        save_file(self.weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


@contextmanager
def fine_tuning(job: Job, model: Path) -> Generator[FineTuning]:
    """A trainer for a job."""
    rules = DeltaRules(threshold=0.5, anchor_every=5)
    with WeightPublisher(
        job.root, RUN, job.refitd.url, options=PublishOptions(token=TOKEN, base_model=model, delta_rules=rules)
    ) as publisher:
        yield FineTuning(job, model, publisher)


def _shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))
