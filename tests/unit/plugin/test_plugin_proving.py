"""A rank proves its share of a version: fingerprints of the manifest, finite values, and the very files it has open."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from refitd_client.validation.validate import proof_digest, share_of, unprovable
from refitd_plugin.memory.driver import Registry
from refitd_plugin.proof.proving import DeviceReader, HostReader, VersionProver
from support.host_gpu import HOST, HostGpu
from support.provable import NAN, damage, published, weights


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / ".refitd").mkdir()
    return tmp_path


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A root on tmpfs: files are registered nowhere else."""
    root = Path(tempfile.mkdtemp(prefix="refitd-prove-", dir="/dev/shm"))
    (root / ".refitd").mkdir()
    yield root
    shutil.rmtree(root)


def test_a_good_version_is_proved_by_the_fingerprints_of_its_manifest(root: Path) -> None:
    source = published(root, 1, weights())
    proof = VersionProver(HostReader(), 0, 1).prove(source)
    manifest = source.structure.manifest
    assert manifest is not None
    assert (proof.fault, proof.tensors) == ("", len(weights()))
    assert proof.digest == proof_digest(manifest.fingerprints, share_of(source.structure.headers, 0, 1))


def test_a_flipped_bit_is_found_by_the_rank_that_reads_it_and_by_no_other(root: Path) -> None:
    source = published(root, 1, weights())
    damage(source, "e")
    faults = [VersionProver(HostReader(), rank, 2).prove(source).fault for rank in range(2)]
    mine = next(rank for rank in range(2) if "e" in share_of(source.structure.headers, rank, 2))
    assert "tensor e has another fingerprint" in faults[mine]


def test_values_that_are_not_finite_are_no_proof(root: Path) -> None:
    tensors = weights()
    tensors["b"][7] = NAN
    source = published(root, 1, tensors)
    assert VersionProver(HostReader(), 0, 1).prove(source).fault == "tensor b has non-finite values"


def test_files_that_change_while_they_are_read_are_no_proof(root: Path) -> None:
    source = published(root, 1, weights())
    file = source.place.folder / next(iter(source.structure.headers))
    os.utime(file, (1, 1))
    assert VersionProver(HostReader(), 0, 1).prove(source).fault == "the files changed while they were read"


def test_a_version_without_fingerprints_cannot_be_proved(root: Path) -> None:
    source = published(root, 1, weights(), fingerprints=False)
    assert unprovable(source.structure) == "has no fingerprint of each tensor in its manifest"
    assert VersionProver(HostReader(), 0, 1).prove(source).fault.startswith("the version has no fingerprint")


def test_a_gpu_reads_the_share_of_each_rank_in_place(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HostGpu(monkeypatch)
    source = published(in_memory, 1, weights())
    for rank in range(2):
        proof = VersionProver(DeviceReader(HOST, Registry()), rank, 2).prove(source)
        assert (proof.fault, proof.digest) == ("", VersionProver(HostReader(), rank, 2).prove(source).digest)
