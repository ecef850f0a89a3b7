"""Two steps as prime-rl's trainer writes them with `weight_broadcast.type = "filesystem"`.

    python examples/prime-rl/broadcast.py ROOT RUN MODEL

The service is started with `--trainers prime-rl`. prime-rl wants GPUs, so this stands in for it: `step_N/`, in which
the empty file STABLE says that all is there.
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

root, run, model = sys.argv[1:4]
for step in (1, 2):
    folder = Path(root, run, f"step_{step}")
    folder.mkdir(parents=True)
    shutil.copy(Path(model, "config.json"), folder)
    torch.manual_seed(step)
    weights = {name: torch.rand_like(tensor) for name, tensor in load_file(Path(model, "model.safetensors")).items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "STABLE").touch()
print("written", step)
