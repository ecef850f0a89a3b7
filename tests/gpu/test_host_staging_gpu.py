"""What a GPU that is too full has received, or its trainer offers, in memory of the host: it is read where it lies."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from refitd_client.fingerprint import fingerprints
from refitd_client.transport.memory import SharedTensors
from refitd_client.transport.proving import PinnedMemory
from support.exporting import exporting, fill
from support.mini_sglang import tiny_weights
from support.one_to_one import half, one_to_one, weights
from support.tiny_rank import Rank, version

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SPECS = {"a": ("BF16", (3000, 1025)), "b": ("F32", (7,)), "c": ("BF16", (0, 4)), "d": ("U8", (1_000_003,))}


@pytest.fixture
def made() -> Iterator[SharedTensors]:
    made = SharedTensors(SPECS)
    yield made
    made.close()


def test_tensors_in_memory_of_the_host_are_looked_at_by_the_gpu(made: SharedTensors) -> None:
    torch.zeros(1, device="cuda")
    memory = PinnedMemory(made.flat)
    assert memory.is_pinned
    tensors = list(made.tensors.values())
    for _ in range(2):
        sent = torch.randint(0, 256, (made.flat.numel(),), dtype=torch.uint8, device="cuda")
        made.flat.copy_(sent)
        assert memory.fingerprints(tensors) == fingerprints(tensors)
    memory.close()


def test_a_receiver_whose_gpu_is_too_full_keeps_what_it_receives_in_memory_of_the_host(tmp_path: Path) -> None:
    torch.zeros(1, device="cuda")
    with one_to_one(tmp_path, on_device=True) as pair:
        pair.goes(1, half())  # both processes have their contexts on the GPU now
        pair.taker.keep(None)
        free, _ = torch.cuda.mem_get_info()
        ballast = torch.empty(free - 2**29, dtype=torch.uint8, device="cuda")
        for step in (2, 3):
            there, sent = pair.goes(step, None), weights(step)
            assert not any(each.is_cuda for each in there.values())
            assert all(torch.equal(there[name], each) for name, each in sent.items())
        assert not any(each.is_cuda for each in pair.goes(4, half()).values())
        del ballast
    torch.cuda.empty_cache()


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
