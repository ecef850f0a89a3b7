"""Small models of transformers whose tensors have other names, or another form, than in their checkpoints."""

from typing import Any

from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
)

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


def llava() -> LlavaForConditionalGeneration:
    text = LlamaConfig(vocab_size=32, num_key_value_heads=2, **SIZES)
    vision = CLIPVisionConfig(image_size=28, patch_size=14, projection_dim=16, **SIZES)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=31))


def mixtral() -> MixtralForCausalLM:
    return MixtralForCausalLM(MixtralConfig(vocab_size=32, num_key_value_heads=2, num_local_experts=2, **SIZES))
