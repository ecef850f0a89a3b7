"""Two steps as OpenRLHF saves them with `--ckpt.save_hf --ckpt.save_steps 1`.

    python examples/openrlhf/save.py ROOT RUN MODEL

The service is started with `--trainers openrlhf`. OpenRLHF wants GPUs, Ray and vLLM, so this stands in for it: the
calls are those of its `DeepspeedStrategy.save_model`, in their order.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

root, run, folder = sys.argv[1:4]
model = AutoModelForCausalLM.from_pretrained(folder)
for step in (1, 2):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    place = Path(root, run, f"global_step{step}_hf")
    model.save_pretrained(place, state_dict=model.state_dict())
    model.config.to_json_file(place / "config.json")
print("saved", step)
