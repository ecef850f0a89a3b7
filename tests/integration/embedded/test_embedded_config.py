"""`config.json` in the forms that transformers has written over the years."""

import subprocess
import sys
from pathlib import Path

import pytest

from refitd_embedded.model import DecoderConfig, UnsupportedModelError, read_eos_ids
from support.embedded_kit import SIZES


def test_the_old_and_the_new_form_of_rope_mean_the_same() -> None:
    old = DecoderConfig.from_hf(SIZES | {"rope_theta": 500000.0})
    new = DecoderConfig.from_hf(SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})
    assert old == new
    assert old.rope_theta == 500000.0


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_has_two_names(key: str) -> None:
    plain = {name: value for name, value in SIZES.items() if name != "dtype"}
    assert DecoderConfig.from_hf(plain | {key: "bfloat16"}).dtype == "bfloat16"


def test_biases_follow_the_family() -> None:
    qwen = DecoderConfig.from_hf(SIZES)
    llama = DecoderConfig.from_hf(SIZES | {"model_type": "llama"})
    biased = DecoderConfig.from_hf(SIZES | {"model_type": "llama", "attention_bias": True, "mlp_bias": True})
    assert (qwen.qkv_bias, qwen.o_bias, qwen.mlp_bias) == (True, False, False)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (False, False, False)
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)


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


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert read_eos_ids(tmp_path) == {2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert read_eos_ids(tmp_path) == {2, 3, 4}


def test_the_package_itself_needs_no_torch() -> None:
    check = "import sys, refitd_embedded, refitd_embedded.demo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
