"""Ranks whose GPUs copy into a slot: the version is the one that one process would write, whatever the sharding."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refitd_client import ShardedPublisher, WeightPublisher
from refitd_client.contract.manifest import parse_manifest
from support import published
from support.handed_back import hand_back
from support.host_gpu import driver_copies, trainer_gpu
from support.once import made_once
from support.ranks import run_ranks
from support.sharded_cases import cases

CASES = cases()


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
            ShardedPublisher(root / name, "run", fingerprints=True, **(case.publisher or {})) as publisher,
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
    with WeightPublisher(tmp_path, "run", fingerprints=True, **options) as publisher:
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
