"""A trainer that publishes deltas, small enough for tests, and what engines would load from a folder."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from refitd.explain.present import present_engine
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.targets import Targets
from refitd_client import Publication, PublishOptions, WeightPublisher
from refitd_client.contract.states import Kind, VersionState
from refitd_client.delta.change import last_served
from refitd_client.publish.options import DeltaRules
from refitd_client.publish.ports import Full
from refitd_client.validation.examine import structure

from .checkpoints import Tensors, tensors
from .inside import in_process

RUN = "run"


def trained(weights: Tensors, step: int) -> Tensors:
    """A step of training: a few elements of two tensors change."""
    chance = np.random.default_rng(step)
    after = {name: array.copy() for name, array in weights.items()}
    for name in sorted(after)[step % 2 :][:2]:
        after[name].flat[chance.integers(0, after[name].size, 2)] += 1.0
    return after


def in_folder(path: Path | str) -> Tensors:
    """What an engine that is pointed at a folder loads."""
    found: Tensors = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        found |= load_file(file)
    return found


def same(one: Tensors, other: Tensors) -> bool:
    """Whether they are equal, bit for bit."""
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


class Trainer:
    """Publishes step after step. `weights` are those of the last one, `history` of all."""

    def __init__(self, publisher: WeightPublisher) -> None:
        self.publisher = publisher
        self.step = 0
        self.weights = tensors(1)
        self.history: dict[int, Tensors] = {}
        self.base: Callable[[], str | Full] = lambda: Full("nobody was asked")

    def publish(self) -> Publication:
        """Train a step and publish it, as a delta where that is possible."""
        self.step += 1
        self.weights = trained(self.weights, self.step)
        self.history[self.step] = self.weights
        return self.publisher.publish(self.weights, step=self.step, transport="delta")

    async def follow(self) -> Publication:
        """The same beside an event loop."""
        return await asyncio.to_thread(self.publish)

    def ask(self) -> str | Full:
        """What a delta is to lead from."""
        return self.base()

    def asks(self, store: Store, targets: Targets) -> None:
        """Ask this store what engines serve, without a server in between."""
        self.base = lambda: last_served(
            [present_engine(each, store, targets) for each in list(store.engines.values())], RUN
        )


@contextmanager
def training(root: Path, *, anchor_every: int = 50) -> Generator[Trainer]:
    """A trainer on a root."""
    rules = DeltaRules(threshold=0.5, anchor_every=anchor_every)
    with WeightPublisher(root, RUN, options=PublishOptions(delta_rules=rules)) as publisher:
        trainer = Trainer(publisher)
        in_process(publisher)._context.deltas._ask_base = trainer.ask
        yield trainer


def record_of(root: Path, publication: Publication) -> VersionRecord:
    """What the catalog would know of a published version that it found good."""
    seen = structure(root, f"{RUN}/{publication.path.name}")
    assert seen.manifest is not None
    return VersionRecord(
        run=RUN,
        order=seen.manifest.order,
        path=seen.path,
        state=VersionState.SEALED,
        created_at="",
        kind=seen.manifest.kind,
        base=seen.manifest.base,
    ).having(digest=seen.manifest.digest, signature=seen.signature, owned=True)


def chain(trainer: Trainer, root: Path, length: int) -> list[VersionRecord]:
    """A full version and deltas, each on the one before."""
    found: list[VersionRecord] = []
    for _ in range(length):
        publication = trainer.publish()
        found.append(record_of(root, publication))
        trainer.base = lambda: found[-1].id
    assert [record.kind for record in found] == [Kind.FULL, *[Kind.DELTA] * (length - 1)]
    return found
