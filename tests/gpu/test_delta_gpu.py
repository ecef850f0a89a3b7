"""Deltas of weights on a GPU, through the publisher: what is found there is what is in the file, whoever writes when.

PYTHONPATH=client:tests python -m pytest -c /dev/null --rootdir . --noconftest tests/gpu/test_delta_gpu.py -q
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from refitd_client import PublishOptions, WeightPublisher
from refitd_client.checkpoint.header import Entry
from refitd_client.contract.manifest import fitting_fingerprints, parse_manifest
from refitd_client.contract.states import Kind
from refitd_client.delta import apply, compare, device, maker, read_delta, writer
from refitd_client.fingerprint import fingerprints
from refitd_client.publish.options import DeltaRules
from refitd_client.publish.ports import Full
from refitd_client.tensors import DTYPES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

State = dict[str, torch.Tensor]


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="refitd-gpu-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def bases(monkeypatch: pytest.MonkeyPatch) -> list[str | Full]:
    """What engines serve, as the service says it: the last of these."""
    found: list[str | Full] = [Full("nothing yet")]
    monkeypatch.setattr(maker, "ask_base", lambda *_: found[-1])
    monkeypatch.setattr(writer, "_THREADS_FROM", 1)
    return found


def state() -> State:
    """More than a chunk; aligned and not, of several widths, transposed, empty, one in host memory."""
    torch.manual_seed(0)
    made = {f"w{n}": torch.randn(3000, 1777 + n, device="cuda", dtype=torch.bfloat16) for n in range(8)}
    made["f"] = torch.randn(300, 300, device="cuda").T
    made["odd"] = torch.randn(100_001, device="cuda", dtype=torch.float16)[1:]
    made["bytes"] = torch.randint(0, 200, (70_000,), device="cuda", dtype=torch.uint8)
    made["empty"] = torch.empty(0, 3, device="cuda")
    made["here"] = torch.randn(100, 10)
    return made


def step(weights: State, share: float) -> None:
    for tensor in weights.values():
        chosen = torch.rand(tensor.shape, device=tensor.device) < share
        tensor.copy_(torch.where(chosen, tensor + 1, tensor))


def on_host(weights: State) -> dict[str, tuple[Entry, Any]]:
    found: dict[str, tuple[Entry, Any]] = {}
    for name, tensor in weights.items():
        entry = Entry(name=name, dtype=DTYPES[str(tensor.dtype).removeprefix("torch.")], shape=tuple(tensor.shape))
        here = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
        found[name] = entry, here
    return found


@pytest.mark.parametrize("shadow", ["gpu", "stream"])
@pytest.mark.parametrize("share", [0.01, 0.3])
def test_a_chain_of_staged_deltas_leads_to_what_the_trainer_had(
    root: Path, bases: list[str | Full], shadow: Any, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors are overwritten as soon as `publish` returns, and are elsewhere in every other step.

    Engines are two versions behind in the end: then values come from the copy.
    """
    monkeypatch.setattr(device, "CHUNK", 2**23)
    monkeypatch.setattr(compare, "ROOM", 2**20)
    weights = state()
    rules = DeltaRules(threshold=0.9, anchor_every=100)
    with WeightPublisher(root, "run", options=PublishOptions(shadow=shadow, delta_rules=rules)) as opened:
        bases.append(opened.publish(weights, step=1, transport="delta").version_id)
        served = [on_host(weights)]
        for number in range(2, 8):
            if number % 2:
                weights = {name: tensor.clone() for name, tensor in weights.items()}
            step(weights, share)
            then = on_host(weights)
            kept = {name: tensor.clone() for name, tensor in weights.items()}
            staged = opened.publish(weights, step=number, transport="delta", block="staged")
            for tensor in weights.values():
                tensor.zero_()
            done = staged.committed(60)
            weights = kept
            assert (done.kind, done.base, done.why_full) == (Kind.DELTA, bases[-1], None)
            targets = {name: (entry, here.copy()) for name, (entry, here) in served[-1].items()}
            apply(read_delta(done.path / "weights.refit-delta"), targets)
            assert all(np.array_equal(here, then[name][1]) for name, (_, here) in targets.items())
            manifest = parse_manifest((done.path / "refit.json").read_bytes())
            assert manifest.fingerprints == fitting_fingerprints(
                dict(zip(then, fingerprints(list(weights.values())), strict=True))
            )
            if number < 5:
                bases.append(done.version_id)
                served.append(then)
