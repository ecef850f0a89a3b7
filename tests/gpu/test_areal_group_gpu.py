"""A trainer's group of NCCL, with members in the engines' places on the other GPUs."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from refitd_front.assembly import sent_part
from refitd_front.members import TrainerGroup
from refitd_front.sessions import Sessions
from support.areal_trainer import GROUP, LOOPBACK, named, trainer_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="trainer and members need a GPU each"),
]


class Folders:
    """What stands in for the publication: the tensors of each version."""

    def __init__(self) -> None:
        self.versions: list[dict[str, torch.Tensor]] = []

    def begin_anew(self) -> None:
        """A trainer has made its group."""

    async def serve_received(self, folder: Path, label: str | None) -> str | None:
        """Read the one bucket."""
        self.versions.append(await asyncio.to_thread(load_file, folder / "bucket-00001.safetensors"))
        return None


def test_what_is_broadcast_over_nccl_becomes_a_version_also_where_some_members_drop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The members get all GPUs but the trainer's, which is the first."""
    ranks = torch.cuda.device_count() - 1
    made = torch.Generator().manual_seed(1)
    tensors = {f"w{each}": torch.randn(4096, 1024 + each, generator=made).bfloat16() for each in range(8)}

    async def updates() -> list[dict[str, torch.Tensor]]:
        published = Folders()
        groups = Sessions(cast("Any", published), tmp_path / "spool")
        group = TrainerGroup(name=GROUP, address=LOOPBACK, port=trainer.port, ranks=ranks, backend="nccl")
        call = named(tensors)
        key = sent_part(GROUP, call["names"], call["dtypes"], call["shapes"])
        try:
            trainer.make(ranks)
            assert await groups.join("engine", group, 1, kept=True) is None
            assert trainer.done() == ""
            for _ in range(2):
                groups.begin()
                trainer.send(tensors)
                assert await groups.bucket("engine", key) is None
                assert trainer.done() == ""
                assert await groups.finish() is None
        finally:
            await groups.aclose()
        return published.versions

    with trainer_rank("nccl") as trainer:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(1, ranks + 1))))
        versions = asyncio.run(updates())
    assert [all(torch.equal(found[name], tensors[name]) for name in tensors) for found in versions] == [True, True]
