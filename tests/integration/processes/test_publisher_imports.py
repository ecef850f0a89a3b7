"""The SDK loads no framework that its caller has not loaded, and creates no CUDA context."""

import subprocess
import sys
from pathlib import Path


def _run(script: str, *args: str | Path) -> None:
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_imports_neither_torch_nor_the_service() -> None:
    """Nor what belongs to the service alone."""
    _run("""
import sys
import refitd_client
assert all(hasattr(refitd_client, name) for name in refitd_client.__all__)
loaded = {name.partition(".")[0] for name in sys.modules}
foreign = loaded & {"torch", "transformers", "fastapi", "pydantic", "sqlalchemy", "refitd", "uvicorn", "structlog"}
assert not foreign, foreign
""")


def test_publishing_cpu_tensors_and_modules_never_calls_torch_cuda(tmp_path: Path) -> None:
    """Every function of torch.cuda raises here, so that this shows without a GPU, too."""
    script = """
import sys
import torch

def refuse(*_, **__):
    raise AssertionError("torch.cuda was called")

is_initialized = torch.cuda.is_initialized
for name, value in list(vars(torch.cuda).items()):
    if callable(value) and not isinstance(value, type) and not name.startswith("__"):
        setattr(torch.cuda, name, refuse)
torch._C._cuda_init = refuse

from refitd_client import WeightPublisher
with WeightPublisher(sys.argv[1], "run") as publisher:
    state = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(3, 4).T}
    publisher.publish(state, step=1)
    publisher.publish(torch.nn.Linear(3, 3), step=2)
assert not is_initialized()
"""
    _run(script, tmp_path)
