"""The callback in the place of TRL's broadcast, without a trainer: what it refuses, and what it leaves behind.

`test_vllm_trl.py` has the trainer and a real vLLM. TRL is imported in a process of its own, where the folder
`tests/vllm` is not taken for vLLM.
"""

from pathlib import Path

import pytest

from support.scripts import script_ended

pytestmark = [pytest.mark.e2e, pytest.mark.thorough, pytest.mark.timeout(300)]

SCRIPT = """
import sys, torch
from pathlib import Path
from types import SimpleNamespace as Plain
from refitd_client.errors import RefitError, ServiceUnreachableError
from refitd_client.trainers.trl import RefitServerCallback

root, state = Path(sys.argv[1]), Plain(is_world_process_zero=True, global_step=0)
def refused(kind, call, *arguments):
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    raise SystemExit(f"{call} was taken")
def callback(**arguments):
    return RefitServerCallback(root, "exp/trial", "http://127.0.0.1:9", **arguments)
"""
REFUSED = """
for settings in ({}, {"use_vllm": False}, {"use_vllm": True, "vllm_mode": "colocate"}):
    assert "vllm_mode='server'" in refused(ValueError, callback().on_init_end, Plain(**settings), state, None)
refit = callback()
refit.on_init_end(Plain(use_vllm=True, vllm_mode="server"), state, None)
assert "does not make the client" in refused(RefitError, refit.on_train_begin, None, state, None)
"""
MISSPELT = """
assert "no option 'token_fil': did you mean 'token_file'?" in refused(TypeError, lambda: callback(token_fil="t"))
callback(token_file="t")
"""
MERGED = """
merged = []
def named():
    merged.append(True)
    yield "lm_head.weight", torch.zeros(2, 2)
    merged.append(False)
refit = callback(wait=0.01)
refused(ServiceUnreachableError, refit.update, 1, named())
assert merged == [True, False], merged
assert [path.name for path in (root / "exp/trial").glob("v*")] == ["v000000"]
"""
REVERTED = """
from safetensors import safe_open
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
vision = CLIPVisionConfig(image_size=28, patch_size=14, projection_dim=16, **sizes)
text = LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes)
model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=31))
model.save_pretrained(root / "saved")
refit = callback(wait=0.01)
refit.on_init_end(Plain(use_vllm=True, vllm_mode="server"), state, None, model=model)
named = [(name, tensor.data) for name, tensor in model.named_parameters()]
refused(ServiceUnreachableError, refit.update, len(named), iter(named))
def names_in(folder):
    return {name for file in folder.glob("*.safetensors") for name in safe_open(file, "pt").keys()}
assert names_in(root / "exp/trial/v000000") == names_in(root / "saved") != {name for name, _ in named}
"""


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(REFUSED, id="a-trainer-that-does-not-ask-a-server-for-rollouts-is-refused"),
        pytest.param(MISSPELT, id="a-misspelt-option-is-refused-before-the-trainer-is-made"),
        pytest.param(MERGED, id="adapters-leave-the-weights-again-also-where-publishing-fails"),
        pytest.param(REVERTED, id="the-names-are-those-of-the-model's-checkpoint"),
    ],
)
def test_what_stands_in_for_the_broadcast(body: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + body)
    status, said = script_ended(script, tmp_path / "root")
    assert status == 0, said
