"""The SDK loads no framework that its caller has not loaded, and creates no CUDA context."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


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


def test_publishing_a_folder_or_arrays_does_not_import_torch(tmp_path: Path) -> None:
    """Also with a base model."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    save_file({"w": np.ones(3)}, base / "model.safetensors")
    script = """
import sys
import numpy as np
from refitd_client import PublishOptions, WeightPublisher
with WeightPublisher(sys.argv[1], "run", options=PublishOptions(base_model=sys.argv[2])) as publisher:
    publisher.publish(sys.argv[2], step=1)
    w = np.ones(3)
    publisher.publish({"w": w, "tied": w}, step=2)
assert not {"torch", "opentelemetry"} & {name.partition(".")[0] for name in sys.modules}
"""
    _run(script, tmp_path / "root", base)


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


def test_publishing_sharded_cpu_tensors_never_calls_torch_cuda(tmp_path: Path) -> None:
    """Nor does making a group for it."""
    script = """
import sys
import torch
import torch.distributed as distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
sharded = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(1)])

def refuse(*_, **__):
    raise AssertionError("torch.cuda was called")

is_initialized = torch.cuda.is_initialized
torch.cuda.init = torch.cuda._lazy_init = torch.cuda.current_stream = torch.cuda.Event = refuse
torch._C._cuda_init = refuse

from refitd_client import PublishOptions, WeightPublisher
with WeightPublisher(sys.argv[1], "run", ranks="all", options=PublishOptions(dtype="bfloat16")) as publisher:
    publisher.publish({"sharded": sharded, "plain": torch.ones(3)}, step=1)
assert not is_initialized()
"""
    _run(script, tmp_path)
