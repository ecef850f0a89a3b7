"""Names and dtypes of a trainer become those of a version, the same for one process as for many."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from refitd_client import InvalidWeightsError, PublishOptions, WeightPublisher
from refitd_client.tensors import casts
from refitd_client.write.plan import published_names
from support import sharded_cases


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("_orig_mod.model.layers.0.w", "model.layers.0.w"),
        ("model._fsdp_wrapped_module.layers.0._fsdp_wrapped_module.w", "model.layers.0.w"),
        ("model.layers.0._checkpoint_wrapped_module._orig_mod.w", "model.layers.0.w"),
        ("module._orig_mod.w", "w"),
        ("module.module.w", "module.w"),
        ("model.module.w", "model.module.w"),
    ],
)
def test_the_marks_of_wrappers_are_taken_off(name: str, plain: str) -> None:
    assert published_names([name]) == {name: plain}
    assert published_names(["module.a", "b"]) == {"module.a": "module.a", "b": "b"}


def test_rename_gets_plain_names_and_none_leaves_out() -> None:
    names = ["module.a", "module.b", "module.c"]
    assert published_names(names, {"a": "x", "b": None}) == {"module.a": "x", "module.c": "c"}
    assert published_names(names, lambda name: f"model.{name}")["module.b"] == "model.b"


@pytest.mark.parametrize("rename", [{"a": "b"}, lambda _: "same", {"a": ""}, lambda _: 3])
def test_two_tensors_of_one_name_or_none_are_refused(rename: Any) -> None:
    with pytest.raises(InvalidWeightsError, match="a"):
        published_names(["a", "b"], rename)


def test_the_first_pattern_decides_and_only_wide_floats_are_cast() -> None:
    rules = casts({"*.router.*": "float32", "*": torch.bfloat16})
    assert rules.target("layers.0.router.weight", "float64") == "float32"
    assert rules.target("layers.0.up.weight", "float32") == "bfloat16"
    assert rules.target("steps", "int64") == "int64"
    assert rules.target("up.weight", "float8_e4m3fn") == "float8_e4m3fn"
    assert casts(None).target("w", "float32") == "float32"


@pytest.mark.parametrize("dtype", ["int8", torch.float8_e4m3fn, "bf16", 16])
def test_a_dtype_that_weights_are_not_cast_to_is_refused(tmp_path: Path, dtype: Any) -> None:
    """When the publisher is made, before it takes the run."""
    with pytest.raises(ValueError, match="weights are cast to"):
        WeightPublisher(tmp_path, "run", options=PublishOptions(dtype=dtype))
    WeightPublisher(tmp_path, "run").close()


def test_one_process_casts_and_renames_as_many_do(tmp_path: Path) -> None:
    """Second names of tied weights are told by the trainer's names."""
    with WeightPublisher(
        tmp_path, "run", options=PublishOptions(dtype=torch.bfloat16, rename=sharded_cases.rename)
    ) as publisher:
        path = publisher.publish(sharded_cases.compiled(), step=1).path
    got = safetensors.torch.load_file(path / "model-00001-of-00001.safetensors")
    expected = sharded_cases.renamed_model()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) and got[name].dtype == torch.bfloat16 for name in got)


def test_an_overflow_of_a_cast_is_refused(tmp_path: Path) -> None:
    with (
        WeightPublisher(tmp_path, "run", options=PublishOptions(dtype=torch.float16)) as publisher,
        pytest.raises(InvalidWeightsError, match="tensor w holds 1 value"),
    ):
        publisher.publish({"w": torch.tensor([1.0, 1e6])}, step=1)


def test_numpy_arrays_are_not_cast_in_silence(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path, "run", options=PublishOptions(dtype="bfloat16")) as publisher:
        with pytest.raises(InvalidWeightsError, match="numpy array"):
            publisher.publish({"w": np.ones(3, np.float32)}, step=1)
        publisher.publish({"w": np.ones(3, np.int64)}, step=1)
