"""Sharded publishing of weights on GPUs: NCCL for the model, gloo for the commit. One GPU, or two.

The ranks are started once for all cases: a rank takes most of its time to begin (torch, CUDA, NCCL).
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from refitd_client import PublishOptions, WeightPublisher
from refitd_client.contract.manifest import parse_manifest
from refitd_client.contract.plugin import UpdateOutcome
from refitd_client.delta import read_delta
from refitd_client.transport.offer_file import make_secret
from support.inside import in_process
from support.mini_sglang import tiny_weights
from support.tiny_rank import Rank, version

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "sharded_gpu_ranks.py"
LENDING = Path(__file__).parent / "lending_gpu_ranks.py"
CASES = ("fsdp2", "fsdp2-cast", "tensor-parallel", "hsdp", "replicated")
START_SECONDS = 120  # of all ranks, on a machine that has never loaded torch
SHADOWS = ("gpu", "stream")
CASE_SECONDS = 90

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(START_SECONDS + len(CASES) * CASE_SECONDS + 60),  # the first test waits for all cases
]


@pytest.fixture(scope="module", params=[1, 2])
def published(request: pytest.FixtureRequest) -> Generator[Path]:
    """A folder with one for each case: what so many ranks have published, and what gathering gives."""
    ranks: int = request.param
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    limit = START_SECONDS + len(CASES) * CASE_SECONDS
    with tempfile.TemporaryDirectory(prefix="refitd-ranks-", dir="/dev/shm") as root:  # GPUs copy into a tmpfs alone
        call = [*command, str(SCRIPT), root, *CASES]
        done = subprocess.run(call, capture_output=True, text=True, timeout=limit, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        yield Path(root)


@pytest.mark.parametrize("case", CASES)
def test_what_gpu_ranks_publish_is_byte_by_byte_the_gathered_version(published: Path, case: str) -> None:
    """In chunks larger than a pinned buffer, cast, redistributed; with buffers that are there, and into a slot."""
    folder = published / case
    state = torch.load(folder / "full.pt", weights_only=True)
    with WeightPublisher(folder, "gathered", options=PublishOptions(fingerprints=True)) as publisher:
        gathered = publisher.publish(state, step=1).path
    names = sorted(path.name for path in gathered.iterdir() if path.name != "refit.json")
    for name in ("v000002", "v000003"):
        found = folder / "run" / name
        assert sorted(path.name for path in found.iterdir() if path.name != "refit.json") == names
        assert all((found / each).read_bytes() == (gathered / each).read_bytes() for each in names)
        manifests = [parse_manifest((each / "refit.json").read_bytes()) for each in (found, gathered)]
        assert manifests[0].fingerprints == manifests[1].fingerprints != {}


@pytest.mark.parametrize("shadow", SHADOWS)
@pytest.mark.parametrize("case", CASES)
def test_what_gpu_ranks_find_changed_is_what_one_process_finds(published: Path, case: str, shadow: str) -> None:
    """Compared on the GPU, and streamed; with what changed in the step before as well."""
    folder = published / case
    with WeightPublisher(folder, f"whole-{shadow}") as publisher:
        in_process(publisher)._context.deltas._ask_base = lambda: f"whole-{shadow}~v000001"
        for step in (1, 2, 3):
            state = torch.load(folder / f"{shadow}-{step}.pt", weights_only=True)
            whole = publisher.publish(state, step=step, transport="delta")
            found = folder / shadow / whole.path.name
            manifests = [parse_manifest((each / "refit.json").read_bytes()) for each in (found, whole.path)]
            assert manifests[0].fingerprints == manifests[1].fingerprints != {}
            assert manifests[0].delta == manifests[1].delta
            if whole.kind.value == "delta":
                changes, expected = (read_delta(each / "weights.refit-delta").changes for each in (found, whole.path))
                assert changes.keys() == expected.keys() != set()
                for name, change in expected.items():
                    assert (changes[name].base, changes[name].result) == (change.base, change.result)
                    assert (changes[name].indices == change.indices).all()
                    assert (changes[name].values == change.values).all()
        assert whole.kind.value == "delta"


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_gpu_ranks_lend_where_it_lies_is_what_files_give(tmp_path: Path, ranks: int) -> None:
    """By rows, by columns, on one rank alone and on all; the engine is on the first rank's GPU, and knows its plan."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    root, startup = tmp_path / "root", tmp_path / "startup"
    for folder in (root / ".refitd", root / "run", startup):
        folder.mkdir(parents=True)
    make_secret(root)
    save_file(tiny_weights(0), startup / "model.safetensors")
    rank = Rank(startup, device="cuda")
    for step in (1, 2, 3):
        rank.answer(version(root, step))
    os.mkfifo(root / "taken")
    taken = os.open(root / "taken", os.O_RDWR)  # does not wait for a reader
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, LENDING, root, "5"], **pipes) as process:
        assert process.stdout is not None
        offer, path = process.stdout.readline().strip(), root / "run" / "v000005"
        if offer:
            rank.engine.prepare(str(path), offer=offer)
        answer = rank.answer(path) if offer else None
        os.write(taken, b"1")
        _, said = process.communicate(timeout=START_SECONDS)
    os.close(taken)
    assert process.returncode == 0, said[-4000:]
    assert answer is not None
    assert (answer.outcome, answer.how) == (UpdateOutcome.SERVED, "replay"), answer
    assert rank.holds(5)
