"""`dtype="fp8_block"`: the bytes are those of an independent reference, and the checkpoint is one that engines know."""

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from refitd_client import InvalidWeightsError, PublishError, PublishOptions, WeightPublisher
from refitd_client.checkpoint.fault import Code
from refitd_client.checkpoint.header import Entry
from refitd_client.checkpoint.opening import Folder
from refitd_client.contract.manifest import parse_manifest
from refitd_client.contract.naming import DELTA_NAME, MANIFEST_NAME
from refitd_client.contract.states import Kind
from refitd_client.delta import apply, read_delta
from refitd_client.delta.checks import DeltaReading, content_faults
from refitd_client.publish.options import DeltaRules
from refitd_client.validation.base import Base
from refitd_client.validation.examine import examine
from refitd_client.validation.reference import read_reference
from refitd_client.validation.validate import Invalid, Options, Valid, validate
from refitd_client.write import fp8_blocks
from refitd_client.write.fp8_blocks import elements_of, scales_of
from support.forged import write_delta
from support.stand_in_service import StandIn, make_engine, stand_in

UP, SCALES, GATE = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_scale_inv", "mlp.gate.weight"
SHARD = "model-00001-of-00001.safetensors"
EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
CODES = np.arange(127)  # of the finite values that are not negative
VALUES = np.where(CODES < 8, CODES * 2.0**-9, (1 + CODES % 8 / 8) * 2.0 ** (CODES // 8 - 7))
Tensors = dict[str, torch.Tensor]
Arrays = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]


def reference(weight: torch.Tensor) -> Arrays:
    """The bytes of the elements, and the scales: block by block, by the table of all values that fp8 has."""
    matrix = weight.float().numpy()
    elements = np.zeros(matrix.shape, np.uint8)
    scales = np.zeros([-(-size // 128) for size in matrix.shape], np.float32)
    for row, column in np.ndindex(*scales.shape):
        place = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
        scale = np.float32(np.abs(matrix[place]).max() / np.float32(448)) or np.float32(1)
        scales[row, column] = scale
        exact = np.minimum(np.abs(matrix[place] / scale), np.float32(448)).astype(np.float64)
        above = np.searchsorted(VALUES, exact).clip(1)
        up, down = VALUES[above] - exact, exact - VALUES[above - 1]
        nearest = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
        elements[place] = nearest + np.where(np.signbit(matrix[place]), 128, 0)
    return elements, scales


def quantised(weight: torch.Tensor) -> Arrays:
    return elements_of(weight).view(torch.uint8).numpy(), scales_of(weight).numpy()


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Magnitudes from 2^-20 to 2^20, in bf16."""
    random = torch.Generator().manual_seed(seed)
    powers = torch.randint(-20, 20, (rows, columns), generator=random)
    return (torch.randn(rows, columns, generator=random) * 2.0**powers).bfloat16()


def model(seed: int = 0) -> Tensors:
    state = {UP: matrix(200, 256, seed), GATE: matrix(4, 256), EMBED: matrix(16, 256), HEAD: matrix(16, 256)}
    return {**state, NORM: torch.ones(256, dtype=torch.bfloat16)}


def base(folder: Path, quantisation: dict[str, Any] | None = None, weights: Tensors | None = None) -> Path:
    """A base model's folder: in bf16, or with what is given as its quantisation."""
    folder.mkdir(parents=True)
    told = {"quantization_config": quantisation} if quantisation else {}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": False} | told))
    if weights is not None:
        save_file(weights, folder / "model.safetensors")
    return folder


def published(root: Path, state: Any, dtype: Any = "fp8_block", base_model: Path | None = None) -> Tensors:
    with WeightPublisher(root, "run", options=PublishOptions(dtype=dtype, base_model=base_model)) as publisher:
        return load_file(publisher.publish(state, step=1).path / SHARD)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    "weight",
    [
        matrix(128, 128),
        matrix(300, 200),
        matrix(1, 1),
        matrix(129, 5),
        matrix(256, 300).t(),
        torch.randn(130, 130, generator=torch.Generator().manual_seed(1)),
        torch.cat([torch.zeros(128, 4), torch.full((1, 4), -0.0)]).bfloat16(),
        torch.full((2, 2), 1e-45),
        torch.tensor([[3e-43, 1e-42, -1e-44]]),
        torch.tensor([[3.0e38, -3.3e38, 1.0]]),
    ],
    ids=["block", "edges", "one", "narrow", "turned", "float32", "zeros", "too small", "denormal", "largest"],
)
def test_elements_and_scales_are_those_of_the_reference_bit_for_bit(
    weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(weight)
    for at_once in (fp8_blocks._SCALED_AT_ONCE, 1):  # all of it, and one row of blocks after the other
        monkeypatch.setattr(fp8_blocks, "_SCALED_AT_ONCE", at_once)
        for found, wanted in zip(quantised(weight), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
    scales = expected[1]
    assert (np.isfinite(scales) & (scales > 0)).all()


def test_linear_layers_are_quantised_and_the_rest_is_as_it_was(tmp_path: Path) -> None:
    state = model()
    found = published(tmp_path, state)
    assert found.keys() == {*state, SCALES}
    assert all(torch.equal(found[name], state[name]) for name in (GATE, EMBED, HEAD, NORM))
    assert (found[UP].dtype, found[SCALES].dtype, found[SCALES].shape) == (torch.float8_e4m3fn, torch.float32, (2, 2))
    elements, scales = reference(state[UP])
    np.testing.assert_array_equal(found[UP].view(torch.uint8).numpy(), elements)
    np.testing.assert_array_equal(found[SCALES].numpy(), scales)


def test_a_version_on_a_base_in_bf16_is_a_model_that_an_engine_can_be_started_on(tmp_path: Path) -> None:
    """Its config names the quantisation and what has none, and it is valid beside itself."""
    with WeightPublisher(
        tmp_path, "run", options=PublishOptions(base_model=base(tmp_path / "base"), dtype="fp8_block")
    ) as publisher:
        folders = [publisher.publish(model(seed), step=seed).path for seed in (1, 2)]
    config = json.loads((folders[0] / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"] == {
        **FP8, "fmt": "e4m3", "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head", "mlp.gate", "model.embed_tokens"],
    }  # fmt: skip
    served = read_reference(folders[0])
    assert isinstance(validate(examine(tmp_path, "run/v000002", served, Options()), served, Options()), Valid)


def test_what_a_base_in_fp8_has_scales_for_is_quantised_and_nothing_else(tmp_path: Path) -> None:
    weights = published(tmp_path / "first", {**model(), "x.weight": matrix(128, 128), "y.weight": matrix(128, 128)})
    weights["x.weight"] = matrix(128, 128)
    del weights["x.weight_scale_inv"]
    folder = base(tmp_path / "base", FP8, weights)
    state = {**model(), "x.weight": matrix(128, 128), "y.weight": matrix(128, 128)}
    found = published(tmp_path / "second", state, base_model=folder)
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: tensor.dtype for n, tensor in weights.items()}
    copied = tmp_path / "second/run/v000001/config.json"
    assert copied.read_bytes() == (folder / "config.json").read_bytes()


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_what_the_base_s_config_lists_is_not_quantised(tmp_path: Path, key: str) -> None:
    folder = base(tmp_path / "base", {**FP8, key: ["model.layers.0.mlp"]})
    assert SCALES not in published(tmp_path, model(), base_model=folder)


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "'awq'"),
        ({"quant_method": "fp8"}, "'weight_block_size': None"),
        ({**FP8, "scale_fmt": "ue8m0"}, "'ue8m0'"),
    ],
    ids=["awq", "one scale for a tensor", "scales that are powers of two"],
)
def test_a_base_that_is_quantised_in_another_way_is_refused_by_name(
    tmp_path: Path, told: dict[str, Any], named: str
) -> None:
    with pytest.raises(PublishError, match=f"is quantised otherwise than by dtype fp8_block: .*{named}"):
        WeightPublisher(
            tmp_path, "run", options=PublishOptions(base_model=base(tmp_path / "base", told), dtype="fp8_block")
        )


def test_patterns_choose_what_is_quantised_and_the_dtype_of_the_rest(tmp_path: Path) -> None:
    masters = {name: tensor.float() for name, tensor in model().items()}
    found = published(tmp_path, masters, dtype={"*_proj.weight": "fp8_block", "*": torch.bfloat16})
    assert {str(tensor.dtype) for name, tensor in found.items() if name not in {UP, SCALES}} == {"torch.bfloat16"}
    assert (found[UP].dtype, SCALES in found) == (torch.float8_e4m3fn, True)


def test_weights_that_are_in_fp8_already_are_published_as_they_are(tmp_path: Path) -> None:
    once = published(tmp_path / "once", model())
    again = published(tmp_path / "again", once)
    assert all(torch.equal(again[name].view(torch.uint8), once[name].view(torch.uint8)) for name in once | again)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_refused_with_the_tensor_s_name(tmp_path: Path, bad: float) -> None:
    state = model()
    state[UP][150, 3] = bad
    says = f"tensor {UP}.* holds 1 value that is NaN or infinite"
    with WeightPublisher(tmp_path, "run", options=PublishOptions(dtype="fp8_block")) as publisher:
        with pytest.raises(InvalidWeightsError, match=says):
            publisher.publish(state, step=1)
        staged = publisher.publish(state, step=1, block="staged")
        with pytest.raises(InvalidWeightsError, match=says):
            staged.committed()


def test_what_cannot_be_quantised_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidWeightsError, match=f"{UP} is a numpy array, which is not quantised"):
        published(tmp_path, {UP: np.ones((2, 2), np.float32)})


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_a_scale_that_is_not_above_zero_is_rejected_in_a_full_version_and_in_a_delta(
    tmp_path: Path, bad: float
) -> None:
    weights = published(tmp_path, model())
    served = read_reference(tmp_path / "run/v000001")
    wrong = {**weights, SCALES: weights[SCALES].clone()}
    wrong[SCALES][1, 0] = bad
    with WeightPublisher(tmp_path, "run") as publisher:
        publisher.publish(wrong, step=2)
    found = validate(examine(tmp_path, "run/v000002", served, Options()), served, Options())
    assert isinstance(found, Invalid)
    assert (found.code, SCALES in found.reason, "not above 0" in found.reason) == (Code.NON_FINITE, True, True)
    write_delta(tmp_path / "run/v000003", "run", 3, 1, weights, wrong)
    base = Base("run~v000001", served.inventory, {})
    with Folder(tmp_path, "run/v000003") as folder:
        read = DeltaReading(folder, folder.list()[DELTA_NAME], base).contents(Event())
    manifest = parse_manifest((tmp_path / "run/v000003" / MANIFEST_NAME).read_bytes())
    (fault,) = content_faults(manifest, read, base)
    assert (fault.code, SCALES in fault.reason, "not above 0" in fault.reason) == (Code.NON_FINITE, True, True)


def bits(weights: Tensors) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in weights.items()}


def applied(delta: Path, weights: Tensors) -> dict[str, bytes]:
    """The bytes of some weights after a version that is a delta."""
    dtypes = {torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}
    targets = {
        name: (
            Entry(name=name, dtype=dtypes[each.dtype], shape=tuple(each.shape)),
            each.view(-1).view(torch.uint8).numpy(),
        )
        for name, each in weights.items()
    }
    apply(read_delta(delta / DELTA_NAME), targets)
    return bits(weights)


@pytest.fixture
def service() -> Iterator[StandIn]:
    with stand_in() as service:
        service.engines = [make_engine(version=None, run="run")]
        yield service


def test_a_delta_lists_the_elements_and_the_scales_that_changed(tmp_path: Path, service: StandIn) -> None:
    """A block whose largest value changed gets another scale, and with it other elements; the others stay."""
    state = {UP: matrix(256, 256), NORM: torch.ones(256)}
    options: dict[str, Any] = {"dtype": "fp8_block", "delta_rules": DeltaRules(threshold=0.3)}
    with WeightPublisher(tmp_path, "run", service.url, options=PublishOptions(**options)) as publisher:
        first = publisher.publish(state, step=1, transport="delta")
        service.engines = [make_engine("e", version=first.version_id, step=1, run="run")]
        before = quantised(state[UP])
        state[UP][:128, :128] = matrix(128, 128, seed=5)
        after = quantised(state[UP])
        second = publisher.publish(state, step=2, transport="delta")
        changed = [int((old != new).sum()) for old, new in zip(before, after, strict=True)]
        assert (second.kind, changed[1]) == (Kind.DELTA, 1)
        assert second.density == sum(changed) / (256 * 256 + 4 + 256)
        assert applied(second.path, load_file(first.path / SHARD)) == bits(published(tmp_path / "whole", state))
        state[UP][:] = torch.randn(256, 256)
        third = publisher.publish(state, step=3, transport="delta")
    assert third.why_full is not None
    assert "of all elements changed since" in third.why_full
