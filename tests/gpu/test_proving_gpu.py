"""A GPU proves versions as processors do: where they lie in host memory, and copied to it.

    PYTHONPATH=client:service:tests python -m pytest -c /dev/null --rootdir . --noconftest tests/gpu -q -k proving

Skipped without CUDA.
"""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytest.importorskip("triton")

from refitd_plugin.memory.driver import Registry  # noqa: E402
from refitd_plugin.proof.proving import DeviceReader, HostReader, VersionProver  # noqa: E402
from support.provable import NAN, damage, published, weights  # noqa: E402

pytestmark = pytest.mark.gpu
torch.zeros(1, device="cuda:0")  # files are registered where there is a context, as that of an engine's model


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    (path / ".refitd").mkdir()
    yield path
    shutil.rmtree(path)


def prover(*, stage: bool) -> VersionProver:
    return VersionProver(DeviceReader(torch.device("cuda:0"), Registry(), stage=stage), 0, 1)


@pytest.mark.parametrize("stage", [False, True])
def test_a_gpu_finds_what_the_processors_find(root: Path, stage: bool) -> None:
    proves = prover(stage=stage)
    for step in range(1, 4):
        source = published(root, step, weights(step))
        expected, _ = VersionProver(HostReader(), 0, 1).prove(source)
        proof, staged = proves.prove(source)
        assert (proof.digest, proof.fault, proof.staged) == (expected.digest, "", stage)
        assert (staged is not None) == stage
        del staged  # the buffer is free for the next one


@pytest.mark.parametrize("stage", [False, True])
def test_a_gpu_finds_damage_and_nan(root: Path, stage: bool) -> None:
    proves = prover(stage=stage)
    source = published(root, 1, weights())
    source = replace(source, held=source._open_files())  # as a prefetch worker hands them over
    assert proves.prove(source)[0].fault == ""
    damage(source, "e")
    proof, staged = proves.prove(source)
    assert ("tensor e has another fingerprint" in proof.fault, proof.staged, staged) == (True, False, None)
    tensors = weights()
    tensors["a"][3, 5] = NAN
    assert proves.prove(published(root, 2, tensors))[0].fault == "tensor a has non-finite values"


def test_a_buffer_that_a_load_still_copies_from_is_not_written(root: Path) -> None:
    proves = prover(stage=True)
    first, second = published(root, 1, weights(1)), published(root, 2, weights(2))
    _, kept = proves.prove(first)
    assert kept is not None
    proof, staged = proves.prove(second)
    assert (proof.fault, staged) == ("", None)
    del kept
    assert proves.prove(second)[1] is not None
