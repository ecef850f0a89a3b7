"""Weights on a GPU into slots: the same bytes as from host memory, registered once, at no cost of GPU memory.

PYTHONPATH=client:tests python -m pytest -c /dev/null --rootdir . --noconftest tests/gpu/test_slots_gpu.py -q
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from refitd_client import Publication, PublishOptions, WeightPublisher
from refitd_client.contract.naming import slots_path
from refitd_client.write import cuda
from support.handed_back import hand_back

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

State = dict[str, torch.Tensor]


@pytest.fixture
def root() -> Iterator[Path]:
    """On a tmpfs, where files can be registered."""
    folder = Path(tempfile.mkdtemp(prefix="refitd-gpu-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def publisher(root: Path) -> Iterator[WeightPublisher]:
    with WeightPublisher(root, "run", options=PublishOptions(max_shard_bytes=64 * 2**20)) as opened:
        yield opened


def state(seed: int) -> State:
    """Large and small, contiguous and not, of several dtypes; one in host memory, one empty, one without dimensions."""
    torch.manual_seed(seed)
    big = torch.randn(5000, 9000, device="cuda")
    return {
        "big": big.to(torch.bfloat16),
        "transposed": torch.randn(300, 700, device="cuda").t(),
        "slice": torch.randn(64, 64, device="cuda")[3:40, 5:50],
        "bytes": torch.randint(0, 255, (1001,), dtype=torch.uint8, device="cuda"),
        "scalar": torch.tensor(3.5 + seed, device="cuda"),
        "nothing": torch.empty(0, 4, device="cuda"),
        "here": torch.randn(100, 10),
        "eights": torch.randn(64, 64, device="cuda").to(torch.float8_e4m3fn),
    }


def expect(version: Path, weights: State) -> None:
    got: State = {}
    for shard in version.glob("*.safetensors"):
        got |= load_file(shard)
    assert got.keys() == weights.keys()
    for name, tensor in weights.items():
        here = tensor.detach().cpu().contiguous()
        assert torch.equal(got[name].view(-1).view(torch.uint8), here.view(-1).view(torch.uint8)), name


def _publish(publisher: WeightPublisher, weights: State, step: int, block: Any) -> Publication:
    done: Any = publisher.publish(weights, step=step, block=block)
    return done.committed() if block == "staged" else done


@pytest.mark.parametrize("block", ["committed", "staged"])
def test_bytes_and_digests_are_those_from_host_memory(root: Path, publisher: WeightPublisher, block: Any) -> None:
    with WeightPublisher(root, "twin", options=PublishOptions(max_shard_bytes=64 * 2**20)) as twin:
        for step in range(1, 5):
            weights = state(step)
            done = _publish(publisher, weights, step, block)
            here = {name: tensor.cpu() for name, tensor in weights.items()}
            assert done.digest == twin.publish(here, step=step).digest
            expect(done.path, weights)
            hand_back(root, done.path)


def test_a_file_is_registered_once_and_unregistered_when_it_has_gone(
    root: Path, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made, undone = cuda.register, [], []

    def counted(memory: Any, device: Any) -> Any:
        done = real(memory, device)
        assert done is not None, "registering was refused"
        made.append(memory)
        tensor, undo = done
        return tensor, lambda: (undone.append(memory), undo())

    monkeypatch.setattr(cuda, "register", counted)
    hand_back(root, publisher.publish(state(0), step=1).path)
    for step in (2, 3, 4):
        path = publisher.publish(state(step), step=step).path
        expect(path, state(step))
        hand_back(root, path)
    shards = len(made)
    assert shards == len({id(memory) for memory in made}) >= 2
    shutil.rmtree(root / slots_path("run"))
    publisher.publish(state(5), step=5)
    assert len(undone) == len(made) == shards


def test_tensors_may_change_on_the_gpu_as_soon_as_staging_returns(root: Path, publisher: WeightPublisher) -> None:
    hand_back(root, publisher.publish(state(1), step=1).path)
    weights = state(2)
    publication = publisher.publish(weights, step=2, block="staged")
    for tensor in weights.values():
        tensor.zero_()
    expect(publication.committed().path, state(2))
