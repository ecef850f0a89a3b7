"""What a GPU that is too full has received, or its trainer offers, in memory of the host: it is read where it lies."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from refitd_client.transport.memory import SharedTensors
from support.exporting import exporting, fill
from support.mini_sglang import tiny_weights
from support.tiny_rank import Rank, version

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_an_engine_on_a_gpu_copies_what_is_offered_in_memory_of_the_host_from_where_it_lies(tmp_path: Path) -> None:
    root, startup = tmp_path / "root", tmp_path / "startup"
    (root / ".refitd").mkdir(parents=True)
    startup.mkdir()
    save_file(tiny_weights(0), startup / "model.safetensors")
    rank = Rank(startup, device="cuda")
    for step in (1, 2):
        rank.answer(version(root, step))
    trainer = SharedTensors({name: ("BF16", tuple(each.shape)) for name, each in tiny_weights(5).items()})
    cache = rank.engine.preparing.handle_cache
    for step in (5, 6):
        fill(trainer, tiny_weights(step))
        with exporting(root, step, trainer, files=False) as exported:
            rank.engine.prepare(str(root / "run" / f"v{step:06d}"), offer=f"run/{exported.path.name}")
            assert len(cache._registry) == 1
            answer = rank.answer(root / "run" / f"v{step:06d}")
        assert (answer.how, answer.proved >= 3) == ("replay", True)
        assert rank.holds(step)
    trainer.close()
