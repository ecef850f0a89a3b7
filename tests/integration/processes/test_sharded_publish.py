"""A version that several ranks write is the one that one process would write of the gathered state dict."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from refitd_client import PublishOptions, WeightPublisher
from refitd_client.contract.manifest import parse_manifest
from support import published
from support.once import made_once
from support.ranks import run_ranks
from support.sharded_cases import Case, cases

CASES = cases()


def _publish_all(rank: int, size: int, root: Path) -> dict[str, tuple[str, str]]:
    """Each case as a run of its own, twice: the second time nothing is laid out anew."""
    digests: dict[str, tuple[str, str]] = {}
    for name, case in CASES.items():
        if case.ranks != size:
            continue
        with WeightPublisher(
            root, name, ranks="all", options=PublishOptions(fingerprints=True, **case.publisher or {})
        ) as publisher:
            sharded = case.sharded(rank, size) if case.sharded else None
            weights = case.local(rank, size)
            first = publisher.publish(weights, step=1, sharded=sharded)
            again = publisher.publish(weights, step=2, sharded=sharded)
        digests[name] = first.digest, again.digest
    return digests


def _publish_on_ranks(folder: Path) -> tuple[Path, list[dict[str, tuple[str, str]]]]:
    told: list[dict[str, tuple[str, str]]] = []
    for size in (2, 4):
        results = run_ranks(size, folder, _publish_all, folder / "root")
        for result in results:
            if isinstance(result, Exception):
                raise result
        told += results
    return folder / "root", told


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, tuple[str, str]]]]:
    """A root with a run for each case, and the digests that each rank was told."""
    return made_once(tmp_path_factory, "sharded-versions", _publish_on_ranks)


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_version_is_byte_by_byte_the_gathered_one(
    sharded: tuple[Path, list[dict[str, tuple[str, str]]]], tmp_path: Path, name: str
) -> None:
    """Files, index and manifest, with the fingerprint of every tensor."""
    root, told = sharded
    gathered = _gathered(tmp_path, name, CASES[name])
    manifest = parse_manifest((gathered / "refit.json").read_bytes())
    assert len(manifest.fingerprints) == manifest.tensors.count
    assert (
        published.files(root / name / "v000001")
        == published.files(root / name / "v000002")
        == published.files(gathered)
    )
    assert _manifest(root / name / "v000001") == _manifest(gathered)
    assert [each[name] for each in told if name in each] == [(manifest.digest, manifest.digest)] * CASES[name].ranks
    assert published.leftovers(root / name) == []


def _gathered(root: Path, name: str, case: Case) -> Path:
    options = {key: value for key, value in (case.publisher or {}).items() if key == "max_shard_bytes"}
    options["fingerprints"] = True
    with WeightPublisher(root, name, options=PublishOptions(**options)) as publisher:
        return publisher.publish(case.gathered(), step=1).path


def _manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = msgspec.json.decode((folder / "refit.json").read_bytes())
    del manifest["created_at"]
    return manifest
