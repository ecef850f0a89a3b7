"""Sharded publishing of weights on GPUs: NCCL for the model, gloo for the commit. One GPU, or two."""

import subprocess
import sys
from pathlib import Path

import pytest

from refitd_client import WeightPublisher

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "sharded_gpu_ranks.py"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", ["fsdp2", "fsdp2-cast", "tensor-parallel", "hsdp", "replicated"])
def test_what_gpu_ranks_publish_is_byte_by_byte_the_gathered_version(tmp_path: Path, case: str, ranks: int) -> None:
    """In chunks larger than a pinned buffer, cast, redistributed; the second time with buffers that are there."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run([*command, SCRIPT, case, tmp_path], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    state = torch.load(tmp_path / "full.pt", weights_only=True)
    with WeightPublisher(tmp_path, "gathered") as publisher:
        gathered = publisher.publish(state, step=1).path
    for version in ("v000001", "v000002"):
        folder = tmp_path / "run" / version
        names = sorted(path.name for path in gathered.iterdir() if path.name != "refit.json")
        assert sorted(path.name for path in folder.iterdir() if path.name != "refit.json") == names
        assert all((folder / name).read_bytes() == (gathered / name).read_bytes() for name in names)
