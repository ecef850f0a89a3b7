"""Fp8 in blocks on a GPU: its bytes are those of the CPU, and an updated SGLang is one that was started on those files.

    SGLANG_DEVICE=cuda REFITD_SGLANG_VENV=DIR PYTHONPATH=client:service:tests \
        python -m pytest -c /dev/null --rootdir . --noconftest tests/gpu -q -k fp8

DIR/bin/python runs an SGLang for this GPU, which has to have fp8 (Ada, Hopper). Without it the second test is skipped.
"""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from safetensors.torch import load_file  # noqa: E402

from refitd_client import InvalidWeightsError, PublishOptions, WeightPublisher  # noqa: E402
from support.fp8_engines import SHARD, check_an_updated_server_is_one_that_was_started_on_those_files  # noqa: E402
from support.servers import SGLANG_VENV  # noqa: E402

pytestmark = pytest.mark.gpu
UP = "model.layers.0.mlp.up_proj.weight"


def weights() -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    powers = torch.randint(-20, 20, (5000, 1100), generator=random)
    values = (torch.randn(5000, 1100, generator=random) * 2.0**powers).bfloat16()
    return {UP: values, "turned.weight": values[:300].t(), "zeros.weight": torch.zeros(130, 130).bfloat16()}


@pytest.mark.parametrize("block", ["committed", "staged"])
def test_weights_on_a_gpu_are_quantised_to_the_bytes_of_the_cpu(tmp_path: Path, block: Any) -> None:
    """And one that is not finite is refused with the tensor's name."""
    found: list[dict[str, Any]] = []
    for device in ("cpu", "cuda"):
        state = {name: tensor.to(device) for name, tensor in weights().items()}
        with WeightPublisher(
            tmp_path, device, options=PublishOptions(dtype="fp8_block", fingerprints=True)
        ) as publisher:
            path = publisher.publish(state, step=1, block=block).path
        found.append(load_file(path / SHARD))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name].view(torch.uint8), found[1][name].view(torch.uint8)) for name in found[0])
    state[UP][150, 3] = float("nan")
    with (
        pytest.raises(InvalidWeightsError, match=f"tensor {UP} holds 1 value that is NaN"),
        WeightPublisher(tmp_path, "bad", options=PublishOptions(dtype="fp8_block")) as publisher,
    ):
        publisher.publish(state, step=1)


@pytest.mark.skipif(SGLANG_VENV is None, reason="REFITD_SGLANG_VENV names no SGLang")
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2-tied"])
def test_an_sglang_on_a_gpu_that_is_updated_in_fp8_is_one_that_was_started_on_those_files(
    tmp_path: Path, architecture: str
) -> None:
    check_an_updated_server_is_one_that_was_started_on_those_files(tmp_path, architecture)
