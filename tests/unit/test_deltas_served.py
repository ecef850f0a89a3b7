"""Deltas on engines that know none: a real trainer, the whole service, engines that load what lies in the folder."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from refitd_client.contract.states import Kind
from support.deltas import Trainer, in_folder, same, training
from support.services import Stage, serving


@asynccontextmanager
async def followed(tmp_path: Path, **more: Any) -> AsyncIterator[tuple[Stage, Trainer]]:
    """The service, and a trainer whose versions it serves."""
    async with serving(tmp_path, **more) as stage:
        with training(stage.root) as trainer:
            trainer.asks(stage.ledger)
            yield stage, trainer


async def served(stage: Stage, trainer: Trainer) -> Kind:
    """Publish a step, and wait until engines serve it."""
    publication = await trainer.follow()
    await stage.until(publication.version_id, lambda record: record.served_at is not None)
    return publication.kind


async def test_engines_that_know_no_deltas_follow_a_chain_of_them(tmp_path: Path) -> None:
    """Each loads a plain checkpoint with the very bits that the trainer had, under the delta's label."""
    async with followed(tmp_path) as (stage, trainer):
        kinds = [await served(stage, trainer) for _ in range(6)]
        assert kinds == [Kind.FULL, *[Kind.DELTA] * 5]
        engine = stage.engines["a"]
        assert engine.label == "6"
        assert same(in_folder(engine.path), trainer.weights)
        folders = {path.rpartition("/")[0] for path in engine.loads[1:]}
        assert folders == {str(stage.root / ".refitd/copies/run")}
        assert len(set(engine.loads[1:])) == 2
        assert all(one != other for one, other in zip(engine.loads, engine.loads[1:], strict=False))
