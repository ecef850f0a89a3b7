"""NaN and infinity are found by their bits, in every dtype that has them."""

import numpy as np
import pytest
import torch

from refitd_client.checkpoint.finite import any_nonfinite, count_nonfinite, kind_of
from refitd_client.checkpoint.header import BITS
from refitd_client.tensors import DTYPES

FLOATS = [name for name in DTYPES if name.startswith(("float", "bfloat")) and DTYPES[name] != "F4"]


@pytest.mark.parametrize("name", [name for name in FLOATS if BITS[DTYPES[name]] <= 16])
def test_every_pattern_of_a_small_type_is_judged_as_torch_does(name: str) -> None:
    bits = BITS[DTYPES[name]]
    patterns = np.arange(2**bits, dtype=np.uint8 if bits == 8 else np.uint16)
    values = torch.from_numpy(patterns.view(np.uint8)).view(getattr(torch, name)).to(torch.float32)
    expected = ~torch.isfinite(values).numpy()
    got = [count_nonfinite(DTYPES[name], one.view(np.uint8)) for one in patterns.reshape(-1, 1)]
    assert np.array_equal(np.array(got), expected)
    assert count_nonfinite(DTYPES[name], patterns.view(np.uint8)) == expected.sum() > 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_types_are_judged_at_their_edges(dtype: type[np.floating]) -> None:
    """The largest finite value is finite; every sign of NaN and infinity is not."""
    edges = [
        0.0,
        -0.0,
        np.finfo(dtype).max,
        np.finfo(dtype).min,
        np.finfo(dtype).tiny,
        np.finfo(dtype).smallest_subnormal,
    ]
    bad = np.array([np.nan, -np.nan, np.inf, -np.inf], dtype)
    name = DTYPES[np.dtype(dtype).name]
    assert count_nonfinite(name, np.array(edges, dtype).view(np.uint8)) == 0
    assert count_nonfinite(name, np.concatenate([bad, np.array(edges, dtype)]).view(np.uint8)) == 4


def test_of_scales_zero_and_negative_values_count_too() -> None:
    good = np.array([np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal, 1.0], np.float32)
    bad = np.array([0.0, -0.0, -1.0, np.finfo(np.float32).min, np.nan, -np.nan, np.inf, -np.inf], np.float32)
    kind = kind_of("mlp.up_proj.weight_scale_inv", "F32")
    assert not any_nonfinite(kind, good.view(np.uint8))
    assert all(any_nonfinite(kind, np.append(good, each).view(np.uint8)) for each in bad)
    assert count_nonfinite(kind, np.append(bad, good).view(np.uint8)) == len(bad)
    assert (kind_of("mlp.up_proj.weight", "F32"), kind_of("weight_scale_inv", "F8_E8M0")) == ("F32", "F8_E8M0")


def test_integers_are_always_finite() -> None:
    assert count_nonfinite("I16", np.full(64, 0xFF, np.uint8)) == 0
