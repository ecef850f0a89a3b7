"""What a member process makes of a trainer's broadcasts over Gloo, and what it says where it cannot keep them."""

import sys
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from refitd_client.tensors import DTYPES
from refitd_client.transport.child import (
    ChildLostError,
    GroupChild,
    JoinGroup,
    MemberReady,
    NamedTensor,
    Order,
    OrderFailed,
    TakePatches,
    TakeTensors,
)
from support.areal_trainer import GROUP, LOOPBACK, TrainerRank, trainer_rank
from support.forked_group import forked_members

pytestmark = pytest.mark.timeout(300)
WITHIN = 60.0
Tensors = dict[str, torch.Tensor]


@contextmanager
def in_a_group() -> Generator[tuple[TrainerRank, GroupChild]]:
    """A trainer, and one member of its group."""
    with forked_members(), trainer_rank() as trainer:
        member = GroupChild("join")
        try:
            trainer.make(1)
            order = JoinGroup(
                address=LOOPBACK, port=trainer.port, group=GROUP, rank=1, size=2, backend="gloo", device=0,
                within=WITHIN,
            )  # fmt: skip
            assert member.ask(order, WITHIN) == MemberReady()
            assert trainer.done() == ""
            yield trainer, member
        finally:
            member.end()


def asked(trainer: TrainerRank, member: GroupChild, order: Order, sent: Sequence[torch.Tensor]) -> object:
    """What the member answers, while the trainer sends."""
    trainer.send({str(at): each for at, each in enumerate(sent)})
    answer = member.ask(order, WITHIN)
    assert trainer.done() == ""
    return answer


def named(tensors: Tensors) -> list[NamedTensor]:
    return [(name, DTYPES[str(each.dtype).removeprefix("torch.")], tuple(each.shape)) for name, each in tensors.items()]


def model() -> Tensors:
    """Tensors of several sizes, whose bytes do not end where others may begin, and one of no bytes."""
    made = torch.Generator().manual_seed(1)
    kinds = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64]
    tensors = {f"w{at}": torch.randint(-9, 9, (5 + at, 7), generator=made).to(kinds[at % 4]) for at in range(12)}
    return {"flag": torch.tensor([True]), "none": torch.empty(0, 3), "scalar": torch.tensor(2.5), **tensors}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def is_same(found: Tensors, sent: Tensors) -> bool:
    return found.keys() == sent.keys() and all(
        (found[name].dtype, found[name].shape) == (sent[name].dtype, sent[name].shape)
        and torch.equal(bits(found[name]), bits(sent[name]))
        for name in sent
    )


def packed(tensors: Sequence[torch.Tensor], most: int) -> Iterator[torch.Tensor]:
    """As vLLM's `pack_tensors`; all in one as SGLang's `FlattenedTensorBucket`."""
    together: list[torch.Tensor] = []
    for each in tensors:
        together.append(bits(each))
        if sum(map(len, together)) > most:
            yield torch.cat(together)
            together = []
    if together:
        yield torch.cat(together)


@pytest.mark.parametrize("most", [1, 700, sys.maxsize])
def test_tensors_that_come_side_by_side_are_the_files_to_the_byte(tmp_path: Path, most: int) -> None:
    tensors = model()
    file = tmp_path / "bucket.safetensors"
    with in_a_group() as (trainer, member):
        order = TakeTensors(tensors=named(tensors), file=str(file), within=WITHIN, chunk=most)
        assert asked(trainer, member, order, list(packed(list(tensors.values()), most))) == MemberReady()
    assert is_same(load_file(file), tensors)


def files_of(folder: Path) -> tuple[list[str], Tensors]:
    """A model in two files, of what Gloo sends as it is."""
    tensors = {name: each for name, each in model().items() if each.dtype not in {torch.bool, torch.float8_e4m3fn}}
    names = list(tensors)
    files = [str(folder / f"{at}.safetensors") for at in (1, 2)]
    for file, part in zip(files, (names[:5], names[5:]), strict=True):
        save_file({name: tensors[name] for name in part}, file)
    return files, tensors


def test_patches_change_the_elements_that_they_name_and_no_others(tmp_path: Path) -> None:
    files, tensors = files_of(tmp_path)
    changes = {"w8": [0, 90, 7], "w0": [34], "w11": [], "scalar": [0]}
    sent: list[torch.Tensor] = []
    for name, indices in changes.items():
        values = torch.arange(1, len(indices) + 1).to(tensors[name].dtype)
        sent += [torch.tensor(indices, dtype=torch.int32), values]
        whole = bits(tensors[name]).view(-1, tensors[name].element_size())
        whole[indices] = bits(values).view(-1, values.element_size())
    with in_a_group() as (trainer, member):
        order = TakePatches(
            tensors=named({name: tensors[name] for name in changes}), counts=[len(each) for each in changes.values()],
            files=files, within=WITHIN,
        )  # fmt: skip
        assert asked(trainer, member, order, sent) == MemberReady()
    found = load_file(files[0]) | load_file(files[1])
    assert is_same({name: found[name] for name in tensors}, tensors)


@pytest.mark.parametrize(
    ("kind", "indices", "reason"),
    [
        (("w9", "F32", (14, 7)), [98], "index beyond its 98 elements"),
        (("w9", "F32", (14, 7)), [3, -1], "index beyond its 98 elements"),
        (("w9", "F32", (7, 14)), [0], r"is F32 \[7, 14\], and engines serve float32 \[14, 7\]"),
        (("w9", "BF16", (14, 7)), [0], r"is BF16 \[14, 7\], and engines serve float32"),
        (("w99", "F32", (14, 7)), [0], "tensor w99 is to change"),
    ],
)
def test_a_patch_that_fits_nothing_is_an_error_that_says_so_and_the_group_goes_on(
    tmp_path: Path, kind: NamedTensor, indices: list[int], reason: str
) -> None:
    files, tensors = files_of(tmp_path)
    values = torch.ones(len(indices), dtype=torch.bfloat16 if kind[1] == "BF16" else torch.float32)
    sent = [torch.tensor(indices, dtype=torch.int32), values]
    with in_a_group() as (trainer, member):
        order = TakePatches(tensors=[kind], counts=[len(indices)], files=files, within=WITHIN)
        answer = asked(trainer, member, order, sent)
        assert isinstance(answer, OrderFailed)
        assert answer.in_step
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(answer.reason)
        file = tmp_path / "bucket.safetensors"
        whole = TakeTensors(tensors=named(tensors), file=str(file), within=WITHIN)
        assert asked(trainer, member, whole, list(tensors.values())) == MemberReady()
    assert is_same(load_file(files[0]) | load_file(files[1]), tensors)
    assert is_same(load_file(file), tensors)


@pytest.mark.parametrize("count", [80, 101])
def test_bytes_side_by_side_that_are_fewer_or_more_than_the_call_says_are_no_file(tmp_path: Path, count: int) -> None:
    with in_a_group() as (trainer, member):
        file = str(tmp_path / "bucket.safetensors")
        order = TakeTensors(tensors=[("w", "U8", (100,))], file=file, within=WITHIN, chunk=sys.maxsize)
        trainer.send({"0": torch.ones(count, dtype=torch.uint8)})
        try:
            answer = member.ask(order, WITHIN)
        except ChildLostError:
            return
        assert isinstance(answer, OrderFailed)
        assert not answer.in_step


def test_a_trainer_that_dies_between_indices_and_values_is_an_error(tmp_path: Path) -> None:
    files, _ = files_of(tmp_path)
    with in_a_group() as (trainer, member):
        trainer.send({"indices": torch.zeros(1, dtype=torch.int32)})
        order = TakePatches(tensors=[("w9", "F32", (14, 7))], counts=[1], files=files, within=WITHIN)
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(member.ask, order, WITHIN)
            assert trainer.done() == ""
            trainer.kill()
            answer = asking.result()
        assert isinstance(answer, OrderFailed)
        assert not answer.in_step
