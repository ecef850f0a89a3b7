"""The actor's ranks in verl publish one version together; each holds its share of it alone."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from refitd_client import InvalidWeightsError, RankLostError
from refitd_client.publish import publication
from support.published import check, shards, versions
from support.ranks import attempted, run_ranks
from support.verl_backend import backend

NAMES = ("embed", "attention", "mlp", "norm", "head")


def model(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((64, 8 * (place + 1)), float(step)) for place, name in enumerate(NAMES)}


def engine(rank: int, root: Path, **more: Any) -> Any:
    """The backend on one rank. The service is down: versions are published all the same."""
    made = backend().RefitCheckpointEngine
    publication.NOTICE_DEADLINE = 0.0
    publication.Publication.wait_async = _served  # type: ignore[method-assign]
    place = {"root": root, "run": "exp", "service_url": "http://127.0.0.1:9"}
    return made(1 << 20, rank == 0, dtype="float32", **place, **more)


async def _served(*_: Any) -> None:
    """Served at once."""


def gathered(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """As verl yields them: each tensor is gathered by a collective, in which every rank takes part."""
    for name, tensor in weights.items():
        part = tensor.clone()
        torch.distributed.all_reduce(part, op=torch.distributed.ReduceOp.MAX)
        yield name, part


def _two_steps(rank: int, _: int, root: Path, more: dict[str, Any]) -> list[str]:
    made = engine(rank, root, **more)
    for step in (0, 1):
        asyncio.run(made.send_weights(gathered(model(step)), global_steps=step))
    torch.distributed.barrier()
    held = sorted(made._share)
    made.close()
    return held


def test_every_rank_holds_and_writes_a_share_and_the_version_is_whole(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, _two_steps, tmp_path / "root", {})
    assert (first, second) == (["embed", "head", "mlp"], ["attention", "norm"])
    folder = tmp_path / "root/exp/v000001"
    check(folder)
    found = {name: tensor for file in shards(folder) for name, tensor in load_file(file).items()}
    assert set(found) == set(NAMES)
    assert all(torch.equal(found[name], tensor) for name, tensor in model(1).items())


def _dying(rank: int, _: int, root: Path) -> Exception | None:
    made = engine(rank, root)
    asyncio.run(made.send_weights(gathered(model(0)), global_steps=0))
    if rank == 1:
        made._publish = _die
    return attempted(lambda: asyncio.run(made.send_weights(gathered(model(1)), global_steps=1)))


async def _die(*_: Any) -> None:
    os._exit(1)


def test_where_a_rank_dies_the_others_say_so_and_no_version_is_visible(tmp_path: Path) -> None:
    error, gone = run_ranks(2, tmp_path, _dying, tmp_path / "root")
    assert isinstance(error, RankLostError)
    assert gone is None
    assert versions(tmp_path / "root/exp") == ["v000000"]


def _with_nan(rank: int, _: int, root: Path) -> tuple[Exception | None, Exception | None]:
    made = engine(rank, root)
    bad = model(0) | {"mlp": torch.full((64, 24), float("nan"))}
    first = attempted(lambda: asyncio.run(made.send_weights(gathered(bad), global_steps=0)))
    second = attempted(lambda: asyncio.run(made.send_weights(gathered(model(0)), global_steps=0)))
    torch.distributed.barrier()
    return first, second


def test_numbers_that_are_none_are_refused_on_every_rank_and_the_step_can_be_sent_again(tmp_path: Path) -> None:
    for first, second in run_ranks(2, tmp_path, _with_nan, tmp_path / "root"):
        assert isinstance(first, InvalidWeightsError)
        assert "mlp" in str(first)
        assert second is None
    check(tmp_path / "root/exp/v000000")
