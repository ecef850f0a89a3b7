"""The manifest that the service keeps of a folder without one: for the sealed files alone, and never in the folder."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from refitd_client.checkpoint.opening import ChangedError
from refitd_client.contract.manifest import Manifest, TensorsSummary
from refitd_client.validation.examine import signature, structure
from refitd_client.validation.foreign import (
    described,
    forget_manifests,
    has_kept_manifest,
    keep_manifest,
    lacks_manifest,
    sign_manifest,
)

PATH = "run/checkpoint-10"
WEIGHTS = {"a": torch.randn(3, 5), "b": torch.randn(2_500_001).bfloat16(), "empty": torch.zeros(0, 4)}
MANIFEST = Manifest(
    run="run", generation=1, step=10, files={}, tensors=TensorsSummary(count=0, bytes=0, dtypes={}), created_at="now"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / PATH).mkdir(parents=True)
    save_file(WEIGHTS, tmp_path / PATH / "model.safetensors")
    return tmp_path


def test_a_sealed_folder_is_described_and_nothing_is_written_to_it(root: Path) -> None:
    seen = structure(root, PATH)
    assert lacks_manifest(seen)
    assert described(root, seen).manifest is None
    keep_manifest(root, seen, MANIFEST)
    assert has_kept_manifest(root, PATH)
    assert described(root, structure(root, PATH)).manifest == MANIFEST
    assert os.listdir(root / PATH) == ["model.safetensors"]


def test_files_that_are_not_those_that_were_sealed_are_refused(root: Path) -> None:
    keep_manifest(root, structure(root, PATH), MANIFEST)
    os.utime(root / PATH / "model.safetensors", (1, 1))
    with pytest.raises(ChangedError, match="not those that the service has sealed"):
        described(root, structure(root, PATH))
    sign_manifest(root, PATH, signature(root, PATH))  # they were read again, and have the same bytes
    assert described(root, structure(root, PATH)).manifest == MANIFEST


def test_a_damaged_manifest_describes_nothing(root: Path) -> None:
    keep_manifest(root, structure(root, PATH), MANIFEST)
    (kept,) = (root / ".refitd/manifests").iterdir()
    kept.write_bytes(kept.read_bytes()[:-20])
    with pytest.raises(ChangedError, match="does not parse"):
        described(root, structure(root, PATH))


def test_no_link_is_followed_to_a_manifest(root: Path, tmp_path: Path) -> None:
    keep_manifest(root, structure(root, PATH), MANIFEST)
    folder = root / ".refitd/manifests"
    folder.rename(root / "elsewhere")
    folder.symlink_to(root / "elsewhere")
    with pytest.raises(OSError, match="Not a directory"):
        described(root, structure(root, PATH))


def test_manifests_of_versions_that_are_gone_go_and_the_others_stay(root: Path) -> None:
    seen = structure(root, PATH)
    keep_manifest(root, seen, MANIFEST)
    top = os.open(root, os.O_RDONLY)
    try:
        forget_manifests(top, [PATH, "run/other"])
        assert has_kept_manifest(root, PATH)
        forget_manifests(top, [])
    finally:
        os.close(top)
    assert not has_kept_manifest(root, PATH)
