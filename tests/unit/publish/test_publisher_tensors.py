"""Tensors of every kind come back from a version as they went in, or are refused by name before anything is visible."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from refitd_client import InvalidWeightsError, Progress, PublishOptions, WeightPublisher
from refitd_client.tensors import DTYPES
from support import published


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[WeightPublisher]:
    """One that takes tensors of several shards."""
    with WeightPublisher(tmp_path / "root", "run", options=PublishOptions(max_shard_bytes=2**16)) as publisher:
        yield publisher


def _loaded(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for shard in published.shards(folder)
        for name, tensor in safetensors.torch.load_file(shard).items()
    }


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)

    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def _assert_published(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    got = _loaded(folder)
    assert got.keys() == expected.keys()
    wrong = [name for name in expected if not _same_bits(got[name], expected[name])]
    assert not wrong


def _random(name: str) -> torch.Tensor:
    """Finite values of any dtype."""
    dtype = getattr(torch, name)
    numbers = torch.arange(24).reshape(4, 6)
    if name == "float4_e2m1fn_x2":
        return numbers.to(torch.uint8).view(dtype)
    return (numbers % 2).bool() if dtype is torch.bool else numbers.to(torch.float32).to(dtype)


def test_every_dtype_of_the_format_is_read_back_by_its_own_library(publisher: WeightPublisher) -> None:
    """Bit by bit, with every shape that is easy to get wrong."""
    state = {name: _random(name) for name in DTYPES}
    state |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 7), "one": torch.ones(1, dtype=torch.int8)}
    publication = publisher.publish(state, step=1)
    _assert_published(publication.path, state)
    manifest = published_manifest(publication.path)
    assert manifest["tensors"]["count"] == len(state)
    assert manifest["tensors"]["bytes"] == sum(tensor.nbytes for tensor in state.values())
    assert manifest["tensors"]["dtypes"]["F32"] == 3


def published_manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "refit.json").read_bytes())


def test_numpy_arrays_are_published_in_the_formats_byte_order(publisher: WeightPublisher) -> None:
    """Big-endian, Fortran-ordered, read-only and scalar ones."""
    readonly = np.arange(4, dtype=np.uint32)
    readonly.flags.writeable = False
    state = {
        "big": np.arange(6, dtype=">f4").reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "reversed": np.arange(6, dtype=np.int16)[::-1],
        "readonly": readonly,
        "scalar": np.array(2.5, np.float16),
        "flags": np.array([True, False]),
    }
    got = published.tensors(publisher.publish(state, step=1).path)
    assert got.keys() == state.keys()
    assert all(np.array_equal(got[name], state[name]) and got[name].shape == state[name].shape for name in state)
    assert got["big"].dtype == np.dtype("<f4")


def test_shards_are_cut_by_size_and_the_index_finds_every_tensor(publisher: WeightPublisher) -> None:
    """A tensor above the limit has a shard to itself; none is split."""
    sizes = [100, 30_000, 30_000, 30_000, 200_000, 10]
    state = {f"t{number}": torch.full((size,), number, dtype=torch.int8) for number, size in enumerate(sizes)}
    publication = publisher.publish(state, step=1)
    names = [shard.name for shard in published.shards(publication.path)]
    assert names == [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    assert sum(published.check(publication.path).files[name].size for name in names) > sum(sizes)
    index = json.loads((publication.path / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert index["weight_map"]["t4"] == "model-00003-of-00004.safetensors"


def test_a_mapped_file_gives_aligned_tensors(publisher: WeightPublisher) -> None:
    """Each to the size of its elements, whatever the names' order."""
    state = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(3), "c": torch.ones(3, dtype=torch.float64)}
    (shard,) = published.shards(publisher.publish(state, step=1).path)
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert all(header[name]["data_offsets"][0] % state[name].element_size() == 0 for name in state)
    with safe_open(shard, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_non_finite_weights_never_become_visible(
    publisher: WeightPublisher, tmp_path: Path, bad: float, dtype: torch.dtype
) -> None:
    """The error names the tensor and how many; also in the last element of a later chunk."""
    weight = torch.ones(2**20 + 7, dtype=dtype)
    weight[[5, -1]] = bad
    with pytest.raises(InvalidWeightsError, match=r"tensor w holds 2 values") as caught:
        publisher.publish({"fine": torch.ones(3), "w": weight}, step=1)
    assert caught.value.tensor == "w"
    assert published.versions(tmp_path / "root" / "run") == published.leftovers(tmp_path / "root" / "run") == []


def test_non_finite_weights_are_published_when_asked_for(tmp_path: Path) -> None:
    state = {"mask": torch.tensor([0.0, float("-inf")])}
    with WeightPublisher(tmp_path, "run", options=PublishOptions(check_finite=False)) as publisher:
        _assert_published(publisher.publish(state, step=1).path, state)


def test_a_distributed_tensor_is_refused_with_the_way_to_gather_it(publisher: WeightPublisher, tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(InvalidWeightsError, match="full_state_dict=True"):
            publisher.publish({"w": tensor}, step=1)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["a" * 1025, "a\nb", "a\u202eb"])
def test_a_name_that_the_service_would_reject_is_refused(publisher: WeightPublisher, name: str) -> None:
    with pytest.raises(InvalidWeightsError, match="empty, longer than 1024 or not printable: rename it"):
        publisher.publish({name: torch.ones(1), "w": torch.ones(1)}, step=1)


@pytest.mark.parametrize("weights", [{}, {1: torch.ones(1)}, {"__metadata__": torch.ones(1)}, 3, None])
def test_what_is_no_state_dict_is_refused(publisher: WeightPublisher, weights: Any) -> None:
    with pytest.raises(InvalidWeightsError):
        publisher.publish(weights, step=1)


class Tied(nn.Module):
    """A model with an embedding that is its head, a buffer to keep and one not to keep."""

    _tied_weights_keys: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.lm_head = nn.Linear(4, 8, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("cache", torch.ones(1), persistent=False)


def test_a_module_is_its_parameters_and_persistent_buffers(publisher: WeightPublisher) -> None:
    """Both names of a tied weight where nobody says which the model expects."""
    model = Tied()
    _assert_published(publisher.publish(model, step=1).path, dict(model.state_dict()))
    assert "cache" not in model.state_dict()


@pytest.mark.parametrize("declared", [["lm_head.weight"], {"lm_head.weight": "embed.weight"}])
def test_a_modules_declared_second_names_are_left_out(publisher: WeightPublisher, declared: Any) -> None:
    """As transformers 4 (a list) and 5 (a mapping) declare them, also within a wrapper."""
    model = Tied()
    model._tied_weights_keys = declared
    assert _loaded(publisher.publish(model, step=1).path).keys() == {"embed.weight", "scale"}
    wrapped = _loaded(publisher.publish(nn.Sequential(model), step=2).path)
    assert wrapped.keys() == {"0.embed.weight", "0.scale"}


def test_a_declared_second_name_with_weights_of_its_own_is_written(publisher: WeightPublisher) -> None:
    model = Tied()
    model._tied_weights_keys = ["lm_head.weight"]
    model.lm_head.weight = nn.Parameter(torch.ones(8, 4))
    assert "lm_head.weight" in _loaded(publisher.publish(model, step=1).path)


def _base(folder: Path, *names: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    safetensors.torch.save_file({name: torch.ones(8, 4) for name in names}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (["embed.weight", "scale"], {"embed.weight", "scale"}),
        (["lm_head.weight", "scale"], {"lm_head.weight", "scale"}),
        (["embed.weight", "lm_head.weight", "scale"], {"embed.weight", "lm_head.weight", "scale"}),
        (["something.else"], {"embed.weight", "lm_head.weight", "scale"}),
    ],
)
def test_the_base_models_names_decide_which_names_of_a_tied_weight_are_written(
    tmp_path: Path, base: list[str], expected: set[str]
) -> None:
    """Over what the module declares, for a state dict as for a module; a name is left out only beside another."""
    model = Tied()
    model._tied_weights_keys = ["lm_head.weight"]
    with WeightPublisher(
        tmp_path / "root", "run", options=PublishOptions(base_model=_base(tmp_path / "base", *base))
    ) as publisher:
        for step, weights in enumerate([model, model.state_dict()]):
            assert _loaded(publisher.publish(weights, step=step).path).keys() == expected


def test_progress_ends_at_the_total(publisher: WeightPublisher) -> None:
    seen: list[Progress] = []
    state = {"a": torch.ones(2**20), "b": torch.ones(3)}
    publication = publisher.publish(state, step=1, progress=seen.append)
    assert [each.written for each in seen] == sorted(each.written for each in seen)
    assert seen[-1] == Progress(written=publication.bytes, total=publication.bytes)
    assert len(seen) > 4


def test_a_hook_that_raises_stops_the_publication(publisher: WeightPublisher, tmp_path: Path) -> None:
    class CancelledError(Exception):
        pass

    def cancel(_: Progress) -> None:
        raise CancelledError

    with pytest.raises(CancelledError):
        publisher.publish({"a": torch.ones(3)}, step=1, progress=cancel)
    assert published.versions(tmp_path / "root" / "run") == published.leftovers(tmp_path / "root" / "run") == []


def test_a_model_that_peft_wraps_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Its names are no engine's. Whoever renames them knows that."""
    model = torch.nn.Linear(2, 2)
    model.peft_config = {}  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    with (
        WeightPublisher(tmp_path, "run") as publisher,
        pytest.raises(InvalidWeightsError, match=r"save_pretrained\(DIR\).*merge_and_unload"),
    ):
        publisher.publish(model, step=1)
    with WeightPublisher(tmp_path, "run", options=PublishOptions(rename=lambda name: f"model.{name}")) as publisher:
        assert publisher.publish(model, step=1).path.is_dir()


class Wrapper(torch.Tensor):
    """As torchao's quantised tensors are."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


ODD = {
    "transposed": torch.arange(60.0).reshape(6, 10).T,
    "sliced": torch.arange(60.0).reshape(6, 10)[1:4, 2:5],
    "parameter": nn.Parameter(torch.arange(60.0)),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every second": torch.arange(10.0)[::2],
    "every second, large": torch.arange(200000.0)[::2],
    "every second int8": torch.arange(100, dtype=torch.int8)[::2],
    "every second bool": (torch.arange(100) % 3 == 0)[::2],
    "every second fp8": torch.arange(100.0).to(torch.float8_e4m3fn)[::2],
    "column": torch.arange(25.0).reshape(5, 5)[:, 2],
    "column of fp8": torch.arange(900.0).reshape(300, 3).to(torch.float8_e5m2)[:, 1:2],
    "diagonal": torch.arange(25.0).reshape(5, 5).diagonal(),
    "expanded": torch.ones(1).expand(5, 5),
    "one element with a stride": torch.arange(10.0).as_strided((1,), (7,)),
    "one element of two dimensions": torch.arange(10.0).as_strided((1, 1), (3, 5)),
    "one of a column": torch.arange(12.0).reshape(4, 3).t()[1, 2],
    "empty with strides": torch.arange(12.0).reshape(4, 3)[:0, ::2],
    "negated": torch.view_as_complex(torch.arange(8.0).reshape(4, 2)).conj().imag,
}


@pytest.mark.parametrize("way", ["committed", "staged", "delta"])
def test_tensors_with_any_strides_come_back_element_by_element(publisher: WeightPublisher, way: str) -> None:
    state = {**ODD, "plain": torch.arange(6.0)}
    if way == "delta":
        folder = publisher.publish(state, step=1, transport="delta").path
    elif way == "staged":
        folder = publisher.publish(state, step=1, block="staged").committed().path
    else:
        folder = publisher.publish(state, step=1).path
    _assert_published(folder, state)


def test_arrays_with_any_strides_come_back_element_by_element(publisher: WeightPublisher) -> None:
    numbers = np.arange(12, dtype=np.float32).reshape(4, 3)
    arrays = {
        "reversed": numbers[::-1],
        "column": numbers[:, 1],
        "big-endian": numbers.astype(">f4"),
        "transposed": numbers.T,
        "broadcast": np.broadcast_to(numbers[:1], (5, 3)),
        "empty": numbers[:0, ::2],
    }
    folder = publisher.publish(arrays, step=1).path
    _assert_published(folder, {name: torch.tensor(array.astype("<f4")) for name, array in arrays.items()})


@pytest.mark.filterwarnings("ignore")  # torch's own, for what is deprecated and refused here
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: np.ma.masked_array(np.ones(3), [True, False, False]), "masked array"),
        (lambda: np.array([object()]), "dtype object"),
        (lambda: np.array(["a"]), "dtype str"),
        (lambda: np.ones(3, dtype=np.complex64), "dtype complex64"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "dtype complex64"),
        (lambda: torch.ones(3).to_sparse(), "to_dense"),
        (lambda: torch.ones(2, 2).to_sparse_csr(), "to_dense"),
        (lambda: torch.ones(3, device="meta"), "meta device"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "layout"),
        (lambda: torch.Tensor._make_wrapper_subclass(Wrapper, (2, 2)), "wrapper around other tensors"),
        (lambda: [1.0, 2.0], "builtins.list"),
        (lambda: None, "NoneType"),
    ],
)
def test_what_has_no_plain_bytes_is_refused_by_its_name(publisher: WeightPublisher, make: Any, named: str) -> None:
    with pytest.raises(InvalidWeightsError, match=f"tensor the.one .*{named}") as refused:
        publisher.publish({"fine": torch.ones(2), "the.one": make()}, step=1)
    assert refused.value.tensor == "the.one"
