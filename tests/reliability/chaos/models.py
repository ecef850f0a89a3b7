"""Models of one shape whose greedy answers differ, so that an answer tells which weights gave it.

They are in float32: in bfloat16 the two best tokens tie now and then, and which of them wins depends on what else is in
the batch. Nobody could tell such an answer from a wrong one.
"""

import runpy
from pathlib import Path
from typing import Any

from support.servers import KIT

NAMES = [f"m{number}" for number in range(8)]
START_UP = NAMES[0]  # what engines are started on
SEED = 100
WIDTH = 128  # vLLM takes heads of 32 elements and more on the CPU


def make(folder: Path) -> Path:
    """Write all models."""
    import torch
    from transformers import Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    kit: dict[str, Any] = runpy.run_path(str(KIT / "make-models"), run_name="make_models")
    config, tokenizer = kit["make_config"](WIDTH), kit["make_tokenizer"]()
    config.dtype = "float32"
    for number, name in enumerate(NAMES):
        torch.manual_seed(SEED + number)
        Qwen2ForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder
