"""A GPU proves versions as processors do, where they lie in host memory.

    PYTHONPATH=client:service:tests python -m pytest -c /dev/null --rootdir . --noconftest tests/gpu -q -k proving

Skipped without CUDA.
"""

import shutil
import tempfile
from collections.abc import Iterator
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


def test_a_gpu_finds_what_the_processors_find(root: Path) -> None:
    reader = DeviceReader(torch.device("cuda:0"), Registry())
    for step in range(1, 4):
        source = published(root, step, weights(step))
        for rank, ranks in ((0, 1), (0, 2), (1, 2)):
            assert VersionProver(reader, rank, ranks).prove(source) == VersionProver(HostReader(), rank, ranks).prove(
                source
            )


def test_a_gpu_finds_damage_and_nan(root: Path) -> None:
    proves = VersionProver(DeviceReader(torch.device("cuda:0"), Registry()), 0, 1)
    source = published(root, 1, weights())
    assert proves.prove(source).fault == ""
    damage(source, "e")
    assert "tensor e has another fingerprint" in proves.prove(source).fault
    tensors = weights()
    tensors["a"][3, 5] = NAN
    assert proves.prove(published(root, 2, tensors)).fault == "tensor a has non-finite values"
