"""Members of the front on a GPU: they receive over NCCL, and read a trainer's memory, as vLLM's workers would."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_gpu_trainer import LOOPBACK, ONE_GPU, GpuTrainer, call_of, gpu_trainer

from refitd_front.assembly import UpdatePart, sent_part
from refitd_front.handles import read_handles
from refitd_front.members import GroupMembers, TrainerGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="trainer and member need a GPU"),
]
WITHIN = 100.0
BUFFER = 5_000_000  # bytes, of the 60 MB that are sent
NAME = "group"


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuTrainer]:
    for name, value in {**ONE_GPU, "NCCL_HOSTID": "member"}.items():
        monkeypatch.setenv(name, value)
    with gpu_trainer() as trainer:
        yield trainer


def weights(seed: int = 1) -> dict[str, torch.Tensor]:
    """Tensors whose bytes do not end where others begin, one of a byte and one of none among them."""
    made = torch.Generator().manual_seed(seed)
    kinds = [torch.bfloat16, torch.float32, torch.float8_e4m3fn]
    tensors = {f"w{at}": torch.randn(1023, 517 + at, generator=made).to(kinds[at % 3]) for at in range(40)}
    odd = {"flag": torch.tensor([True]), "none": torch.empty(0, 3), "half": torch.ones(3, dtype=torch.bfloat16)}
    return {**dict(list(tensors.items())[:5]), **odd, **tensors}


def is_same(file: Path, sent: dict[str, torch.Tensor]) -> bool:
    found = load_file(file)
    return found.keys() == sent.keys() and all(
        torch.equal(found[name].reshape(-1).view(torch.uint8), sent[name].reshape(-1).view(torch.uint8))
        for name in sent
    )


def run(group: TrainerGroup, trainer: GpuTrainer, folder: Path, *parts: tuple[UpdatePart, str, list[object]]) -> None:
    """Join, and take parts: what is taken, the file it goes to or that is patched, and the trainer's order for it."""

    async def all_of_it() -> None:
        members = GroupMembers(group)
        try:
            trainer.tell("join")
            await members.join(WITHIN)
            assert trainer.hear() == "done"
            for part, file, order in parts:
                trainer.tell("broadcast", *order)
                await members.take(part, folder, file, [file] if part.counts else [], WITHIN)
                assert trainer.hear() == "done"
        finally:
            await members.end()

    asyncio.run(all_of_it())


def group_of(trainer: GpuTrainer, chunk: int = 0) -> TrainerGroup:
    return TrainerGroup(name=NAME, address=LOOPBACK, port=trainer.port, ranks=1, backend="vllm", chunk=chunk)


@pytest.mark.parametrize("buffer", [None, BUFFER])
def test_what_is_broadcast_over_nccl_by_itself_or_packed_is_a_file_of_the_same_bytes(
    buffer: int | None, trainer: GpuTrainer, tmp_path: Path
) -> None:
    first, second = weights(1), weights(2)
    parts = [
        (sent_part(NAME, *call_of(each)), f"{at}.safetensors", [list(each.values()), buffer])
        for at, each in enumerate([first, second])
    ]
    run(group_of(trainer, buffer or 0), trainer, tmp_path, *parts)
    assert is_same(tmp_path / "0.safetensors", first)
    assert is_same(tmp_path / "1.safetensors", second)


def test_patches_that_are_broadcast_over_nccl_change_the_elements_of_a_file(
    trainer: GpuTrainer, tmp_path: Path
) -> None:
    before = {name: each for name, each in weights(1).items() if each.is_floating_point() and each.numel()}
    save_file(before, tmp_path / "model.safetensors")
    made = torch.Generator().manual_seed(3)
    after, sent, counts = {}, [], []
    for name, each in before.items():
        indices = torch.randperm(each.numel(), generator=made)[: each.numel() // 50].int()
        values = torch.randn(len(indices), generator=made).to(each.dtype)
        bits = each.clone().view(-1).view(torch.uint8).reshape(-1, each.element_size())
        bits[indices.long()] = values.view(torch.uint8).reshape(-1, each.element_size())
        after[name] = bits.reshape(-1).view(each.dtype).reshape(each.shape)
        sent += [indices, values]
        counts.append(len(indices))
    part = sent_part(NAME, *call_of(before), counts=counts)
    run(group_of(trainer), trainer, tmp_path, (part, "model.safetensors", [sent, None]))
    assert is_same(tmp_path / "model.safetensors", after)


@pytest.mark.parametrize("buffer", [None, BUFFER])
def test_what_a_trainer_shares_is_a_file_of_the_same_bytes_and_its_memory_is_its_own_again(
    buffer: int | None, trainer: GpuTrainer, tmp_path: Path
) -> None:
    """Twice, with one member. Unpacked, what is shared is not written yet when the member gets the handles."""
    group = TrainerGroup(name=NAME, address="", port=0, ranks=1, backend="ipc")
    left: list[int] = []

    async def shared(members: GroupMembers, at: int) -> list[str]:
        trainer.tell("share", weights(at), buffer)
        files: list[str] = []
        while True:
            said = trainer.hear()
            if isinstance(said, int):
                left.append(said)
                assert trainer.hear() == "done"
                return files
            *call, pickled, sizes = said
            part = sent_part(NAME, *call, handles=read_handles(pickled, sizes))
            files.append(f"{at}-{len(files)}.safetensors")
            await members.take(part, tmp_path, files[-1], [], WITHIN)
            trainer.tell("read")

    async def all_of_it() -> list[list[str]]:
        members = GroupMembers(group)
        try:
            return [await shared(members, at) for at in (1, 2)]
        finally:
            await members.end()

    for at, files in enumerate(asyncio.run(all_of_it()), start=1):
        assert (len(files) > 5) is (buffer is not None)
        found = {name: each for file in files for name, each in load_file(tmp_path / file).items()}
        save_file(found, tmp_path / "all.safetensors")
        assert is_same(tmp_path / "all.safetensors", weights(at))
    assert left == [0, 0]


def test_memory_of_a_gpu_that_is_not_seen_is_an_error_that_says_so(
    trainer: GpuTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    trainer.tell("share", weights(), None)
    *call, pickled, sizes = trainer.hear()
    part = sent_part(NAME, *call, handles=read_handles(pickled, sizes))
    members = GroupMembers(TrainerGroup(name=NAME, address="", port=0, ranks=1, backend="ipc"))
    with pytest.raises(Exception, match="does not see"):
        asyncio.run(members.take(part, tmp_path, "a.safetensors", [], WITHIN))
