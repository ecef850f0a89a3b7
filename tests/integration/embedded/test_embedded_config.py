"""`config.json` in the forms that transformers has written over the years."""

import pytest

from refitd_embedded.model import DecoderConfig, UnsupportedModelError
from support.embedded_kit import SIZES


def test_the_old_and_the_new_form_of_rope_mean_the_same() -> None:
    old = DecoderConfig.from_hf(SIZES | {"rope_theta": 500000.0})
    new = DecoderConfig.from_hf(SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})
    assert old == new
    assert old.rope_theta == 500000.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mistral"}, "mistral"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        DecoderConfig.from_hf(SIZES | change)
