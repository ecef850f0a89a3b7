"""The calls of a group at the front with real processes: a trainer's, and members in the engines' places."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from refitd_front.assembly import sent_part
from refitd_front.members import TrainerGroup
from refitd_front.sessions import Sessions
from support.areal_trainer import GROUP, LOOPBACK, TrainerRank, named, trainer_rank
from support.forked_group import forked_members

pytestmark = pytest.mark.timeout(300)
Tensors = dict[str, torch.Tensor]
SAID = {"a": torch.ones(6, 4), "b": torch.ones(64, dtype=torch.uint8)}


@pytest.fixture(autouse=True)
def forked() -> Generator[None]:
    with forked_members():
        yield


def weights(seed: int) -> tuple[Tensors, Tensors]:
    """A model in two buckets, with types of different sizes in an order in which a file does not have them."""
    made = torch.Generator().manual_seed(seed)

    def filled(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(-100, 100, shape, generator=made).to(dtype)

    first = {"a": filled(3, 5, dtype=torch.bfloat16), "b": filled(7, dtype=torch.float32)}
    return first, {"c": filled(2, 3, dtype=torch.int64), "d": filled(dtype=torch.bfloat16)}


def read(folder: Path) -> Tensors:
    return {name: each for file in sorted(folder.iterdir()) for name, each in load_file(file).items()}


class Published:
    """What stands in for the publication: the tensors of each version, as they lie in the folder."""

    def __init__(self) -> None:
        self.versions: list[Tensors] = []

    def begin_anew(self) -> None:
        """A trainer has made its group."""

    async def serve_received(self, folder: Path, label: str | None) -> str | None:
        """Read all of it."""
        self.versions.append(read(folder))
        return None


@asynccontextmanager
async def answering(tmp_path: Path, **seconds: float) -> AsyncGenerator[tuple[Sessions, Published]]:
    published = Published()
    async with aclosing(Sessions(cast("Any", published), tmp_path / "spool", **seconds)) as groups:
        groups.open()
        yield groups, published


def members(groups: Sessions) -> list[int | None]:
    return [child.pid for each in groups._groups.values() for child in each.members._children]


async def joined(groups: Sessions, trainer: TrainerRank, engines: int = 2) -> list[str | None]:
    """The calls to all engines for a group, while the trainer makes it."""
    group = TrainerGroup(name=GROUP, address=LOOPBACK, port=trainer.port, ranks=engines, backend="gloo")
    trainer.make(engines)
    calls = [groups.join(f"engine-{each}", group, each + 1, kept=True) for each in range(engines)]
    return await asyncio.gather(*calls)


async def received(groups: Sessions, bucket: Mapping[str, torch.Tensor], engines: int = 2) -> list[str | None]:
    """The calls to all engines for a bucket."""
    call = named(bucket)
    key = sent_part(call["group_name"], call["names"], call["dtypes"], call["shapes"])
    return await asyncio.gather(*(groups.bucket(f"engine-{each}", key) for each in range(engines)))


async def sent(groups: Sessions, trainer: TrainerRank, bucket: Mapping[str, torch.Tensor]) -> list[str | None]:
    trainer.send(bucket)
    answers = await received(groups, bucket)
    assert trainer.done() == ""
    return answers


def files(tmp_path: Path) -> list[Path]:
    """What of an update is still here."""
    return [path for path in (tmp_path / "spool").rglob("*") if path.is_file()]


def is_same(found: Tensors, sent: Tensors) -> bool:
    return found.keys() == sent.keys() and all(torch.equal(found[name], sent[name]) for name in sent)


async def test_what_the_trainer_broadcasts_to_two_engines_is_one_version_after_the_other(tmp_path: Path) -> None:
    async with answering(tmp_path) as (groups, published):
        with trainer_rank() as trainer:
            assert await joined(groups, trainer) == [None, None]
            assert trainer.done() == ""
            for seed in (1, 2):
                groups.begin()
                for bucket in weights(seed):
                    assert await sent(groups, trainer, bucket) == [None, None]
                assert await asyncio.gather(groups.finish(), groups.finish()) == [None, None]
        first, second = ({**a, **b} for a, b in map(weights, (1, 2)))
        assert [is_same(*pair) for pair in zip(published.versions, (first, second), strict=True)] == [True, True]
        assert list((tmp_path / "spool").iterdir()) == []


def silent(trainer: TrainerRank, _: Sessions) -> None:
    trainer.stop()


def dead(trainer: TrainerRank, _: Sessions) -> None:
    trainer.kill()


def dead_between_two_tensors(trainer: TrainerRank, _: Sessions) -> None:
    trainer.send({"c": weights(1)[1]["c"]})
    assert trainer.done() == ""
    trainer.kill()


def without_a_member(_: TrainerRank, groups: Sessions) -> None:
    pid = members(groups)[1]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("fate", [silent, dead, dead_between_two_tensors, without_a_member])
async def test_an_update_that_its_trainer_breaks_off_is_an_error_and_no_version_and_the_next_trainer_can_begin(
    tmp_path: Path, fate: Callable[[TrainerRank, Sessions], None]
) -> None:
    async with answering(tmp_path, part_seconds=8.0) as (groups, published):
        first, second = weights(1)
        with trainer_rank() as trainer:
            await joined(groups, trainer)
            groups.begin()
            assert await sent(groups, trainer, first) == [None, None]
            fate(trainer, groups)
            answers = await received(groups, second)
        assert answers[0] == answers[1]
        assert "bucket 2 has not arrived" in str(answers[0])
        assert files(tmp_path) == []
        assert members(groups) == [None, None]
        assert "has not arrived" in str(await groups.finish())
        assert await groups.finish() == await groups.finish()  # AReaL makes a call that fails again
        assert published.versions == []
        with trainer_rank() as trainer:
            assert await joined(groups, trainer) == [None, None]
            groups.begin()
            for bucket in (first, second):
                assert await sent(groups, trainer, bucket) == [None, None]
            assert await groups.finish() is None
        assert [is_same(each, {**first, **second}) for each in published.versions] == [True]


@pytest.mark.parametrize(
    ("sent_instead", "named_in_it"),
    [
        ({"a": torch.ones(6, 3)}, "less was sent of tensor a than the 96 bytes"),
        ({"a": torch.ones(6, 4).bfloat16()}, "less was sent of tensor a"),
        ({"b": torch.ones(40, dtype=torch.uint8)}, "less was sent of tensor b than the 64 bytes"),
        ({"a": torch.ones(6, 5)}, "sent more bytes than the call has said"),
    ],
)
async def test_a_tensor_that_is_sent_in_another_size_than_its_call_says_is_an_error_and_no_version(
    tmp_path: Path, sent_instead: Tensors, named_in_it: str
) -> None:
    """Gloo takes a shorter one for the whole: the end of the tensor would be what lay there before."""
    async with answering(tmp_path, part_seconds=20.0) as (groups, published):
        with trainer_rank() as trainer:
            await joined(groups, trainer)
            groups.begin()
            trainer.send(SAID | sent_instead)
            answers = await received(groups, SAID)
        assert answers[0] == answers[1]
        assert named_in_it in str(answers[0])
        assert answers[0] == await groups.finish()
        with trainer_rank() as trainer:
            await joined(groups, trainer)
            groups.begin()
            assert await sent(groups, trainer, SAID) == [None, None]
            assert await groups.finish() is None
        assert [is_same(each, SAID) for each in published.versions] == [True]


async def test_a_trainer_that_never_makes_its_group_holds_nothing_up(tmp_path: Path) -> None:
    async with answering(tmp_path, join_seconds=4.0) as (groups, _):
        group = TrainerGroup(name=GROUP, address=LOOPBACK, port=9, ranks=1, backend="gloo")
        assert "was not joined" in str(await groups.join("engine-0", group, 1, kept=True))
        assert members(groups) == [None]
        groups.begin()
        assert "no group" in str(await received(groups, weights(1)[0], engines=1))


async def test_a_trainer_that_is_not_heard_of_after_a_bucket_leaves_no_memory_taken(tmp_path: Path) -> None:
    """It was killed between two: nobody says so."""
    async with answering(tmp_path, silent_seconds=0.2) as (groups, published):
        with trainer_rank() as trainer:
            await joined(groups, trainer)
            groups.begin()
            await sent(groups, trainer, weights(1)[0])
            assert files(tmp_path) != []
        while files(tmp_path):  # noqa: ASYNC110 - the limit has no event for having passed
            await asyncio.sleep(0)
        assert "nothing has come for 0.2 s" in str(await groups.finish())
        assert published.versions == []


async def test_an_update_that_begins_anew_holds_nothing_of_the_one_before(tmp_path: Path) -> None:
    """Its trainer gave up after the first bucket, and pauses again."""
    async with answering(tmp_path) as (groups, published):
        with trainer_rank() as trainer:
            await joined(groups, trainer)
            groups.begin()
            await sent(groups, trainer, weights(1)[0])
            groups.begin()
            for bucket in weights(2):
                assert await sent(groups, trainer, bucket) == [None, None]
            assert await groups.finish() is None
        first, second = weights(2)
        assert [is_same(each, {**first, **second}) for each in published.versions] == [True]


async def test_a_pause_in_the_middle_of_a_bucket_ends_the_members_that_wait_for_it(tmp_path: Path) -> None:
    """Another trainer begins, and the first one is silent."""
    async with answering(tmp_path) as (groups, published):
        with trainer_rank() as trainer:
            await joined(groups, trainer)
            groups.begin()
            waiting = asyncio.create_task(received(groups, weights(1)[0]))
            while not groups._session.is_taking:  # noqa: ASYNC110 - a call has no event for having been made
                await asyncio.sleep(0)
            groups.begin()
            assert "has not arrived" in str((await waiting)[0])
            assert await groups.finish() is None  # there is nothing to publish, and nothing was lost
        assert published.versions == []


async def test_a_restart_in_the_middle_of_an_update_is_no_success(tmp_path: Path) -> None:
    """What had arrived is gone, and AReaL's next call is that generation is to go on."""
    async with answering(tmp_path) as (groups, _):
        with trainer_rank() as trainer:
            await joined(groups, trainer)
            groups.begin()
            for bucket in weights(1):
                await sent(groups, trainer, bucket)
    async with answering(tmp_path) as (groups, published):
        assert "started anew" in str(await groups.finish())
        groups.begin()
        assert await groups.finish() is None
        assert published.versions == []
    assert not (tmp_path / "spool").exists()
