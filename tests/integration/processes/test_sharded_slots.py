"""Ranks whose GPUs copy into a slot: the version is the one that one process would write, whatever the sharding."""

import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refitd_client import PublishError, PublishOptions, RankLostError, WeightPublisher
from refitd_client.contract.manifest import parse_manifest
from refitd_client.sharded import rank_slot
from refitd_client.sharded.rank_group import RankMessages
from refitd_client.sharded.rank_slot import SlotGpu
from support import published, sharded_cases
from support.handed_back import hand_back
from support.host_gpu import driver_copies, trainer_gpu
from support.once import made_once
from support.ranks import attempted, run_ranks
from support.sharded_cases import cases

CASES = cases()
KILLED = [(0, "copy"), (1, "copy"), (1, "mark"), (2, "digest_of_block")]


def _publish_all(rank: int, size: int, root: Path) -> dict[str, list[int]]:
    """Each case three times: into new files, then into their slot by the driver's copies, and by torch's."""
    from torch import distributed

    copied: dict[str, list[int]] = {}
    for name, case in CASES.items():
        if case.ranks != size:
            continue
        sharded = case.sharded(rank, size) if case.sharded else None
        weights = case.local(rank, size)
        with (
            pytest.MonkeyPatch.context() as patch,
            WeightPublisher(
                root / name, "run", ranks="all", options=PublishOptions(fingerprints=True, **case.publisher or {})
            ) as publisher,
        ):
            trainer_gpu(patch)
            publication = publisher.publish(weights, step=1, sharded=sharded)
            for step in (2, 3):
                if rank == 0:
                    hand_back(root / name, publication.path)
                distributed.barrier()
                with pytest.MonkeyPatch.context() as driver:
                    made = driver_copies(driver) if step == 2 else []
                    publication = publisher.publish(weights, step=step, sharded=sharded)
                if step == 2:
                    copied[name] = made
                    if rank == 0:
                        shutil.copytree(publication.path, root / name / "second")
    return copied


def _publish_on_ranks(folder: Path) -> tuple[Path, dict[str, int]]:
    copied: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="refitd-slots-", dir="/dev/shm") as root:
        for size in (2, 4):
            for result in run_ranks(size, folder, _publish_all, Path(root)):
                if isinstance(result, Exception):
                    raise result
                for name, made in result.items():
                    copied[name] = copied.get(name, 0) + sum(made)
        shutil.copytree(root, folder / "root")
    return folder / "root", copied


@pytest.fixture(scope="module")
def in_slots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """A root with a run for each case, and the bytes that GPUs have copied of each."""
    return made_once(tmp_path_factory, "sharded-slots", _publish_on_ranks)


@pytest.mark.parametrize("name", CASES)
def test_what_gpus_of_ranks_copy_into_a_slot_is_byte_by_byte_the_gathered_version(
    in_slots: tuple[Path, dict[str, int]], tmp_path: Path, name: str
) -> None:
    """Files, index and manifest, with the fingerprint of every tensor; and each byte is copied once."""
    root, copied = in_slots
    case = CASES[name]
    options: dict[str, Any] = {key: value for key, value in (case.publisher or {}).items() if key == "max_shard_bytes"}
    with WeightPublisher(tmp_path, "run", options=PublishOptions(fingerprints=True, **options)) as publisher:
        gathered = publisher.publish(case.gathered(), step=2)
    for version in (root / name / "second", root / name / "run" / "v000003"):
        assert published.files(version) == published.files(gathered.path)
        assert _manifest(version) == _manifest(gathered.path)
    tensors = parse_manifest((gathered.path / "refit.json").read_bytes()).tensors
    assert copied[name] == tensors.bytes
    assert published.leftovers(root / name / "run") == []


def _manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = msgspec.json.decode((folder / "refit.json").read_bytes())
    for key in ("created_at", "step"):
        del manifest[key]
    return manifest


@pytest.fixture
def root() -> Generator[Path]:
    """A root on tmpfs."""
    with tempfile.TemporaryDirectory(prefix="refitd-slots-", dir="/dev/shm") as folder:
        yield Path(folder)


@contextmanager
def _second_in_a_slot(rank: int, size: int, root: Path) -> Generator[tuple[WeightPublisher, Any]]:
    """A publisher that has published step 1, whose files are a slot by now, and its weights."""
    from torch import distributed

    model = sharded_cases.fsdp2(rank, size)
    with pytest.MonkeyPatch.context() as patch:
        trainer_gpu(patch)
        driver_copies(patch)
        publisher = WeightPublisher(
            root, "run", ranks="all", options=PublishOptions(rank_timeout=20, max_shard_bytes=300)
        )
        first = publisher.publish(model, step=1)
        if rank == 0:
            hand_back(root, first.path)
        distributed.barrier()
        yield publisher, model
        publisher.close()


def _die(rank: int, size: int, root: Path, who: int, where: str) -> list[Exception | None]:
    with _second_in_a_slot(rank, size, root) as (publisher, model):
        if rank == who:
            place = SlotGpu if hasattr(SlotGpu, where) else rank_slot
            setattr(place, where, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        return [attempted(partial(publisher.publish, model, step=step)) for step in (2, 3)]


def _die_while_it_is_told(rank: int, size: int, root: Path) -> Exception | None:
    """The last rank has heard how long its order is, and never what: the others carry out theirs."""

    def dies(_: object, expected: tuple[Any, Any], *__: object) -> None:
        expected[1].wait()
        os.kill(os.getpid(), signal.SIGKILL)

    with _second_in_a_slot(rank, size, root) as (publisher, model), pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(RankMessages, "receive", dies)
        return attempted(partial(publisher.publish, model, step=2))


def test_a_rank_that_is_killed_while_it_is_told_its_order_ends_in_an_error_on_those_that_carry_out_theirs(
    tmp_path: Path, root: Path
) -> None:
    """They answer rank 0, which says meanwhile that nothing is published: each waited until the other listened."""
    *others, killed = run_ranks(3, tmp_path, _die_while_it_is_told, root)
    assert killed is None
    for error in others:
        assert isinstance(error, RankLostError), error
        assert error.rank == 2


@pytest.mark.parametrize(("who", "where"), KILLED)
def test_a_rank_that_is_killed_while_gpus_copy_into_a_slot_ends_in_an_error_on_the_others_and_no_version(
    tmp_path: Path, root: Path, who: int, where: str
) -> None:
    """Those whose blocks it was to fill do not wait for it."""
    results = run_ranks(3, tmp_path, _die, root, who, where)
    assert results[who] is None
    for errors in (errors for rank, errors in enumerate(results) if rank != who):
        assert isinstance(errors[0], RankLostError), errors
        assert errors[0].rank == who
        assert isinstance(errors[1], PublishError)
    assert published.whole(root / "run") == []
    assert (published.leftovers(root / "run") == []) == (who != 0)  # what rank 0 left the service finds
