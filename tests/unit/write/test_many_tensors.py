"""Small tensors are read, checked, digested and compared together, and each is published as if it came alone."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from refitd_client import InvalidWeightsError, PublishOptions, WeightPublisher
from refitd_client.checkpoint import header
from refitd_client.contract.manifest import parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.delta import writer
from refitd_client.delta.shadow import Shadows
from refitd_client.fingerprint import bits_of, fingerprint, fingerprints_together, to_text, width_of
from refitd_client.tensors import DTYPES, TensorSource, casts, joins, read_together, torch_source
from refitd_client.write.plan import PIECE, runs_of
from support import published
from support.stand_in_service import make_engine, stand_in

State = dict[str, torch.Tensor]


def state() -> State:
    """Hundreds of small tensors of two dtypes, and what cannot be read with them, in between."""
    made = torch.Generator().manual_seed(0)
    tensors: State = {f"m{at:03d}": torch.randn(3, at + 1, generator=made).bfloat16() for at in range(300)}
    tensors |= {f"n{at:03d}": torch.randn(7, generator=made) for at in range(50)}
    tensors |= {f"m{at:03d}": nn.Parameter(tensors[f"m{at:03d}"]) for at in range(0, 300, 7)}
    return tensors | {
        "m010a": torch.empty(0, 4, dtype=torch.bfloat16),
        "m100a": torch.randn(200, 300, generator=made).bfloat16(),  # larger than is read with others
        "m150a": torch.randn(6, 4, generator=made).bfloat16().T,
        "m200a": torch.randn(6, dtype=torch.complex64, generator=made).conj().imag,  # a view that is negated when read
        "n020a": torch.randn(5, generator=made).double(),
    }


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def expected(state: State) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name, tensor in state.items():
        width = {torch.bfloat16: 2, torch.float32: 4, torch.float64: 8}[tensor.dtype]
        texts[name] = to_text(fingerprint(bits_of(np.frombuffer(raw(tensor), np.uint8), width)))
    return texts


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[WeightPublisher]:
    with (
        stand_in() as service,
        WeightPublisher(tmp_path, "run", service.url, options=PublishOptions(max_shard_bytes=2**17)) as publisher,
    ):
        service.engines = [make_engine(version="run~v000001", step=1, run="run")]
        yield publisher


@pytest.mark.parametrize("is_staged", [False, True])
def test_each_comes_back_with_its_bytes_and_its_fingerprint(tmp_path: Path, *, is_staged: bool) -> None:
    with WeightPublisher(tmp_path, "run", options=PublishOptions(fingerprints=True)) as publisher:
        if is_staged:
            path = publisher.publish(state(), step=1, block="staged").committed().path
        else:
            path = publisher.publish(state(), step=1).path
    found = {name: tensor for shard in published.shards(path) for name, tensor in load_file(shard).items()}
    assert {name: raw(tensor) for name, tensor in found.items()} == {name: raw(each) for name, each in state().items()}
    assert parse_manifest((path / MANIFEST_NAME).read_bytes()).fingerprints == expected(state())


def test_a_tensor_that_is_not_finite_is_named_among_its_neighbours(tmp_path: Path) -> None:
    tensors = state()
    tensors["m123"].view(-1)[4:6] = torch.tensor([torch.nan, torch.inf])
    why = "tensor m123 holds 2 values that are NaN or infinite"
    with WeightPublisher(tmp_path, "run") as publisher:
        with pytest.raises(InvalidWeightsError, match=why):
            publisher.publish(tensors, step=1)
        with pytest.raises(InvalidWeightsError, match=why):
            publisher.publish(tensors, step=1, block="staged").committed()


def test_many_small_tensors_are_few_runs() -> None:
    """A call a tensor takes longer than its bytes do."""
    sources = [torch_source(f"t{at:04d}", torch.ones(64), casts(None)) for at in range(5000)]
    runs = runs_of(sources, offset=8)
    assert len(runs) == 5
    assert [run.offset for run in runs] == [8 + sum(each.size for each in runs[:at]) for at in range(len(runs))]
    assert max(run.size for run in runs) <= PIECE
    assert [entry for run in runs for entry in run.entries] == [source.entry for source in sources]


def test_changes_are_found_in_each_of_them_and_their_fingerprints_follow() -> None:
    """Also when the trainer's next tensors are others, some of which cannot be read together any more."""
    tensors = state()
    shadows = Shadows(sources(tensors), stream=False)
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    tensors["m020"] = tensors["m020"].T.contiguous().T
    for number, tensor in enumerate(each for each in tensors.values() if each.numel()):
        if tensor.is_contiguous():
            tensor.view(-1)[number % tensor.numel()] += 1
    before, after = expected(state()), expected(tensors)
    wanted = {name: found for name, found in after.items() if found != before[name]}
    diff = shadows.find(sources(tensors), most=10**6)
    assert diff.found.keys() == wanted.keys()
    assert len(wanted) > 340
    assert {name: to_text(each) for name, each in shadows.fingerprints.items()} == after
    for name, found in diff.found.items():
        bits = bits_of(np.frombuffer(raw(tensors[name]), np.uint8), found.values.itemsize)
        assert (bits[found.indices] == found.values).all()
        assert (shadows.gather({name: found.indices})[name] == found.values).all()


def sources(tensors: State) -> list[TensorSource]:
    return [torch_source(name, tensor, casts(None)) for name, tensor in tensors.items()]


def test_a_step_that_changes_too_many_tensors_for_a_deltas_header_goes_out_in_full(
    publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header of a full version names each tensor once, and that of a delta three times."""
    tensors = state()
    for module in (header, writer):
        monkeypatch.setattr(module, "MAX_HEADER_BYTES", 60_000)
    publisher.publish(tensors, step=1, transport="delta")
    for tensor in tensors.values():
        if tensor.is_contiguous():
            tensor.detach().view(-1)[:1] += 1
    publication = publisher.publish(tensors, step=2, transport="delta")
    assert publication.why_full is not None
    assert "may be larger than readers take" in publication.why_full


def test_a_large_tensor_of_which_all_has_changed_takes_little_memory_beside_its_changes() -> None:
    """Indices, values and old values are 8 bytes an element; what fingerprints are computed with comes in blocks."""
    tensor = torch.zeros(2**22, dtype=torch.bfloat16)
    shadows = Shadows(sources({"w": tensor}), stream=False)
    tensor += 1
    tracemalloc.start()
    shadows.find(sources({"w": tensor}), most=2**22)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak / 2**22 < 20
    assert {name: to_text(each) for name, each in shadows.fingerprints.items()} == expected({"w": tensor})


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_every_dtype_are_read_together_as_each_by_itself(name: str) -> None:
    values = (torch.arange(64) % 2).to(torch.uint8).view(getattr(torch, name))
    one, other = (torch_source(each, values.clone(), casts(None)) for each in ("a", "b"))
    assert joins(one, other)
    assert read_together([one, other]).tobytes() == one.read().tobytes() + other.read().tobytes()


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "F64"])
def test_fingerprints_that_are_computed_together_are_those_of_each(dtype: str) -> None:
    """Also of tensors of more elements than share a key."""
    made, width = np.random.default_rng(0), width_of(dtype)
    sizes = np.array([1, 5, 4095, 4096, 4097, 1, 9000])
    bits = bits_of(made.integers(0, 256, int(sizes.sum()) * width, dtype=np.uint8), width)
    ends = np.cumsum(sizes)
    assert fingerprints_together(bits, sizes) == [
        fingerprint(bits[end - size : end]) for end, size in zip(ends, sizes, strict=True)
    ]
