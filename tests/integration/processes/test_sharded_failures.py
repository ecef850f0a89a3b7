"""Whatever goes wrong on one rank: every rank hears of it, by the rank's number, and nothing becomes visible."""

import errno
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from refitd_client import (
    InvalidWeightsError,
    NoSpaceError,
    PublishError,
    PublishOptions,
    RankLostError,
    Sharded,
    StepConflictError,
    WeightPublisher,
)
from refitd_client.contract.naming import ShardLayout, layout_of, slot_name, slots_path
from refitd_client.files import durable
from refitd_client.sharded.rank_group import RankMessages
from support import published, sharded_cases
from support.once import made_once
from support.ranks import attempted, run_ranks


def _with_nan(rank: int, size: int) -> Any:
    model = sharded_cases.fsdp2(rank, size)
    if rank == 1:
        model.blocks[1].weight.to_local().data.view(-1)[[0, 2]] = float("nan")
    return model


def _plain(*shapes: tuple[int, ...]) -> Callable[[int, int], dict[str, torch.Tensor]]:
    return lambda rank, _: {"w": sharded_cases.numbers(*shapes[rank % len(shapes)])}


def _different(rank: int, _: int) -> dict[str, torch.Tensor]:
    return {"same": torch.ones(3), "w": torch.full((100, 100), float(rank))}


def _partial(_: int, size: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    return {"w": DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (size,)), [Partial()])}


def _missing_on_one(rank: int, size: int) -> dict[str, Any]:
    from torch.distributed.tensor import Shard

    state = sharded_cases.placed(Shard(0))(rank, size)
    if rank == 1:
        del state["uneven"]
    return state


def _plain_on_one(rank: int, size: int) -> dict[str, Any]:
    from torch.distributed.tensor import Shard

    state = sharded_cases.placed(Shard(0))(rank, size)
    if rank == 1:
        state["uneven"] = torch.zeros(7, 9)
    return state


BAD: dict[str, tuple[Callable[[int, int], Any], dict[str, Sharded] | None, str]] = {
    "nan": (_with_nan, None, r"rank 1: tensor blocks\.1\.weight holds 2 values that are NaN"),
    "shapes": (_plain((4, 3), (5, 3)), None, r"w is float32 of shape \[4, 3\] on rank 0 and .* \[5, 3\] on rank 1"),
    "replicas": (_different, None, "tensor w differs between rank 0 and rank 1"),
    "holes": (
        _plain((4, 3)),
        {"w": Sharded(0, 1, 2)},
        r"w of .* is not whole: no rank holds 12 of its 24 elements;",
    ),
    "dimension": (_plain((4, 3)), {"w": Sharded(2, 1, 2)}, "rank 0: tensor w has 2 dimensions"),
    "nobody": (_plain((4, 3)), {"v": Sharded(0, 1, 2)}, "rank 0: tensor v is described as Sharded"),
    "size": (_plain((4, 3)), {"w": Sharded(0, 1, 2, size=5)}, "rank 0: tensor w has a local part of shape"),
    "partial": (_partial, None, "rank 0: tensor w has a pending reduction"),
    "missing": (
        _missing_on_one,
        None,
        r"is not whole: no rank holds 27 of its 63 elements, and rank 1 has none",
    ),
    "plain": (
        _plain_on_one,
        None,
        r"uneven of shape \[7, 9\] is not whole: the parts of ranks 0 and 1 overlap;",
    ),
    "empty": (lambda *_: {}, None, "no tensors to publish"),
    "list": (lambda *_: {"w": [1.0]}, None, r"rank 0: tensor w is a builtins\.list"),
    "folder": (lambda *_: "/a/folder", None, "WeightPublisher on one rank"),
    "meta": (lambda *_: {"w": torch.ones(2, device="meta")}, None, "rank 0: tensor w is on the meta device"),
}


def _refuse_all(rank: int, size: int, root: Path) -> dict[str, Exception | None]:
    """Fail with each, then publish what is good with the same publisher and the same step."""
    good = sharded_cases.fsdp2(rank, size)
    errors: dict[str, Exception | None] = {}
    for name, (weights, sharded, _) in BAD.items():
        bad = weights(rank, size)
        with WeightPublisher(root, name, ranks="all") as publisher:
            errors[name] = attempted(lambda: publisher.publish(bad, step=1, sharded=sharded))  # noqa: B023
            publisher.publish(good, step=1)
    return errors


def _refuse_on_ranks(folder: Path) -> tuple[Path, list[dict[str, Exception | None]]]:
    return folder / "root", run_ranks(2, folder, _refuse_all, folder / "root")


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Exception | None]]]:
    """A root with a run for each bad weights, and what each rank was told."""
    return made_once(tmp_path_factory, "refused-weights", _refuse_on_ranks)


@pytest.mark.parametrize("name", BAD)
def test_weights_that_are_no_version_are_refused_on_every_rank_and_the_publisher_stays_usable(
    refused: tuple[Path, list[dict[str, Exception | None]]], name: str
) -> None:
    """Also while the other ranks are in a collective."""
    root, told = refused
    one, other = (errors[name] for errors in told)
    assert isinstance(one, InvalidWeightsError)
    assert isinstance(other, InvalidWeightsError)
    assert re.search(BAD[name][2], str(one))
    assert (str(one), one.tensor) == (str(other), other.tensor)
    assert published.whole(root / name) == ["v000001"]
    assert published.leftovers(root / name) == []


def _at_step(rank: int, size: int, root: Path) -> list[Exception | None]:
    model = sharded_cases.fsdp2(rank, size)
    with WeightPublisher(root, "run", ranks="all") as publisher:
        errors = [attempted(lambda: publisher.publish(model, step=1 + rank))]
        publisher.publish(model, step=5)
        errors += [attempted(lambda: publisher.publish(model, step=5))]
        publisher.publish(model, step=6)
    return errors


def test_ranks_at_different_steps_publish_nothing(tmp_path: Path) -> None:
    """Nor is a step published twice."""
    for errors in run_ranks(2, tmp_path, _at_step, tmp_path):
        assert [type(error) for error in errors] == [StepConflictError] * 2
        assert "rank 1 publishes step 2 and rank 0 step 1" in str(errors[0])
        assert str(errors[1]).endswith("after a restart of the trainer, open a new publisher")
    assert published.whole(tmp_path / "run") == ["v000005", "v000006"]


MISTAKES: list[tuple[int, dict[str, Any], type[Exception], str]] = [
    (1, {"block": "later"}, ValueError, "rank 1: block is 'later': it is 'committed' or 'staged'"),
    (1, {"transport": []}, ValueError, r"rank 1: transport is \[\]: it is one of"),
    (1, {"step": 1.5}, TypeError, r"rank 1: step is 1\.5: it is a whole number"),
    (0, {"step": "1"}, TypeError, "rank 0: step is '1': it is a whole number"),
    (
        1,
        {"metadata": {"lr": 1e-5}},
        TypeError,
        r"rank 1: metadata\['lr'\] is 1e-05, of the type float: values are texts",
    ),
    (1, {"transport": "mail"}, ValueError, "rank 1: transport is 'mail': it is one of"),
    (0, {"transport": "handover"}, ValueError, "rank 0: transport='handover' needs the service_url"),
    (1, {"sharded": torch.ones(2)}, PublishError, "rank 1 failed with RuntimeError: Boolean value"),
]


def _mistaken(rank: int, size: int, root: Path) -> list[Exception | None]:
    """One rank after the other calls with arguments that cannot be; after each mistake all publish the same step."""
    part, told = torch.arange(8.0).chunk(size)[rank], list[Exception | None]()
    with WeightPublisher(root, "run", ranks="all", options=PublishOptions(rank_timeout=5)) as publisher:
        for step, (mistaken, arguments, *_) in enumerate(MISTAKES, 1):
            good: dict[str, Any] = {"step": step, "sharded": {"w": Sharded(0, rank, size)}}
            asked = good | arguments if rank == mistaken else good
            told.append(attempted(lambda: publisher.publish({"w": part}, **asked)))  # noqa: B023
            publisher.publish({"w": part}, **good)
    return told


def test_a_rank_with_arguments_that_cannot_be_is_named_on_every_rank_and_they_stay_in_step(tmp_path: Path) -> None:
    for told in run_ranks(2, tmp_path, _mistaken, tmp_path):
        assert isinstance(told, list), told
        for error, (_, _, kind, said) in zip(told, MISTAKES, strict=True):
            assert type(error) is kind, error
            assert re.match(said, str(error)), error
    assert published.whole(tmp_path / "run") == [f"v{step:06}" for step in range(1, len(MISTAKES) + 1)]
    assert published.leftovers(tmp_path / "run") == []


def _no_room(rank: int, size: int, root: Path) -> Exception | None:
    model = sharded_cases.fsdp2(rank, size)
    original = durable.write_at

    def full(fd: int, data: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with WeightPublisher(root, "run", ranks="all") as publisher:
        if rank == 1:
            durable.write_at = full
        error = attempted(lambda: publisher.publish(model, step=1))
        durable.write_at = original
        publisher.publish(model, step=1)
    return error


def test_a_rank_without_room_is_named_on_every_rank(tmp_path: Path) -> None:
    """And the step can be published when there is some."""
    for error in run_ranks(2, tmp_path, _no_room, tmp_path):
        assert isinstance(error, NoSpaceError)
        assert "rank 1: " in str(error)
    assert published.whole(tmp_path / "run") == ["v000001"]


def _go_on(rank: int, size: int, root: Path) -> None:
    with WeightPublisher(root, "run", ranks="all") as publisher:
        publisher.publish(sharded_cases.fsdp2(rank, size), step=2)


def _late(rank: int, size: int, root: Path) -> Exception | None:
    publisher = WeightPublisher(root, "run", ranks="all", options=PublishOptions(rank_timeout=0.5))
    if rank == 1:
        time.sleep(1.5)
    return attempted(lambda: publisher.publish(sharded_cases.full_state(), step=1))


def test_a_rank_that_does_not_come_is_given_up_by_name(tmp_path: Path) -> None:
    """And hears of it when it comes."""
    first, second = run_ranks(2, tmp_path, _late, tmp_path)
    assert isinstance(first, RankLostError)
    assert "rank 1 is gone, or did not come to publish step 1 within 0.5 s" in str(first)
    assert isinstance(second, RankLostError)
    assert second.rank == 0
    assert published.whole(tmp_path / "run") == []


def _deaf(rank: int, size: int, root: Path) -> Exception | None:
    """Rank 1 comes, and does not listen before rank 0 has given up."""
    publisher = WeightPublisher(root, "run", ranks="all", options=PublishOptions(rank_timeout=0.5))
    receive = RankMessages.receive

    def late(*args: Any) -> Any:
        while not (root / "given up").exists():
            time.sleep(0.01)
        return receive(*args)

    if rank == 1:
        RankMessages.receive = late
    error = attempted(lambda: publisher.publish(sharded_cases.full_state(), step=1))
    (root / "given up").touch()
    return error


def test_a_rank_that_does_not_listen_is_given_up_by_name(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, _deaf, tmp_path)
    assert isinstance(first, RankLostError)
    assert "rank 1 is gone, or did not listen within 0.5 s" in str(first)
    assert isinstance(second, RankLostError)
    assert published.whole(tmp_path / "run") == []


def _hand_back(root: Path, version: Path) -> None:
    """As the service does."""
    shards = [ShardLayout(name=path.name, header=_header(path), size=path.stat().st_size) for path in _shards(version)]
    slot = root / slots_path("run") / slot_name(layout_of(shards), "0" * 32)
    slot.mkdir(parents=True)
    for path in _shards(version):
        path.rename(slot / path.name)
    shutil.rmtree(version)


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _header(path: Path) -> bytes:
    data = path.read_bytes()
    return data[: 8 + int.from_bytes(data[:8], "little")]


def _fail_in_a_slot(rank: int, size: int, root: Path) -> list[Exception | None]:
    """Rank 1 is late with its part of step 2, and writes it when rank 0 has given the version up."""
    publisher = WeightPublisher(root, "run", ranks="all", options=PublishOptions(rank_timeout=1.0))
    publisher.publish({"w": torch.full((300, 300), 1.0)}, step=1)
    write_at = durable.write_at

    def late(fd: int, data: memoryview, offset: int) -> None:
        write_at(fd, data, offset)
        if rank == 1:
            while any((root / "run").glob(".incoming-*")):
                time.sleep(0.01)
            write_at(fd, data, offset)  # what rank 0 has thrown away

    if rank == 0:
        _hand_back(root, root / "run" / "v000001")
    durable.write_at = late
    error = attempted(lambda: publisher.publish({"w": torch.full((300, 300), 2.0)}, step=2))
    publisher.close()
    return [error]


def test_a_slot_that_a_late_rank_may_still_write_to_is_nobody_s_any_more(tmp_path: Path) -> None:
    """It is thrown away and never handed back: the next version lies in other files."""
    first, _ = run_ranks(2, tmp_path, _fail_in_a_slot, tmp_path)
    assert isinstance(first[0], RankLostError)
    assert "write its part" in str(first[0])
    assert (published.whole(tmp_path / "run"), published.leftovers(tmp_path / "run")) == ([], [])
    assert list((tmp_path / slots_path("run")).iterdir()) == []
    assert run_ranks(2, tmp_path, _go_on, tmp_path) == [None, None]
    assert published.whole(tmp_path / "run") == ["v000002"]
