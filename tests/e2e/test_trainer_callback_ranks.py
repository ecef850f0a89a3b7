"""The callback on several ranks: one publishes whole weights, all publish sharded ones, flattened ones are refused.

accelerate shards nothing on CPUs, so the events that a Trainer would send come from transformers' own handler.
"""

from pathlib import Path
from typing import Any

import pytest

from refitd_client.errors import RefitError
from support.ranks import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

WAYS = ("ddp", "fsdp2", "flat")


def train(rank: int, size: int, root: Path, how: str) -> list[str]:
    """Two steps of what a Trainer does around its callbacks; the folders that are there afterwards."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler

    from refitd_client.trainers.transformers import RefitCallback

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    if how == "fsdp2":
        model = fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    if how == "ddp":
        model = DistributedDataParallel(model)
    if how == "flat":
        model.get_parameter("0.weight").ds_status = "NOT_AVAILABLE"
    callback = RefitCallback(root, "exp/trial", errors="raise")
    handler = CallbackHandler([callback], model, None, None, None)
    args = TrainingArguments(output_dir=str(root / "out"), use_cpu=True, report_to="none")
    state, control = TrainerState(is_world_process_zero=rank == 0), TrainerControl()
    handler.on_train_begin(args, state, control)
    for state.global_step in (1, 2):
        handler.on_step_end(args, state, control)
        handler.on_save(args, state, control)  # of the same step: once is enough
    handler.on_train_end(args, state, control)
    torch.distributed.barrier()
    return sorted(path.name for path in (root / "exp/trial").glob("v*"))


def train_each_way(rank: int, size: int, root: Path) -> dict[str, object]:
    """What each of `WAYS` came to, one after the other in ranks that import transformers once, for seconds."""
    came = dict[str, object]()
    for how in WAYS:
        try:
            came[how] = train(rank, size, root / how, how)
        except RefitError as error:
            came[how] = f"{type(error).__name__}: {error}"
    return came


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ways")


@pytest.fixture(scope="module")
def came(root: Path) -> list[dict[str, object]]:
    """What each way came to, on each rank."""
    return run_ranks(2, root, train_each_way, root)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_ranks_publish_one_version_a_step(how: str, root: Path, came: list[dict[str, object]]) -> None:
    from safetensors.numpy import load_file

    assert [each[how] for each in came] == [["v000001", "v000002"]] * 2
    whole: dict[str, tuple[int, ...]] = {}
    for path in (root / how / "exp/trial/v000002").glob("*.safetensors"):
        whole |= {name: tensor.shape for name, tensor in load_file(path).items()}
    assert whole == {"0.weight": (8, 8), "0.bias": (8,), "1.weight": (4, 8), "1.bias": (4,)}


@pytest.mark.filterwarnings("default")  # peft's own: it looks for a config on a hub
def test_of_a_model_that_peft_wraps_the_adapter_is_published(models: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, TrainerControl, TrainerState, TrainingArguments

    from refitd_client.trainers.transformers import RefitCallback
    from refitd_client.validation.examine import structure
    from refitd_client.validation.lora import adapter_faults
    from refitd_client.validation.reference import read_reference

    base = AutoModelForCausalLM.from_pretrained(models / "model_a", dtype="auto")
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    callback = RefitCallback(tmp_path, "exp/trial", errors="raise")
    args = TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, report_to="none")
    state, control = TrainerState(is_world_process_zero=True, global_step=1), TrainerControl()
    callback.on_train_begin(args, state, control, model=model)
    callback.on_step_end(args, state, control, model=model)
    callback.on_train_end(args, state, control, model=model)
    seen = structure(tmp_path, "exp/trial/v000001")
    assert seen.adapter is not None
    assert seen.faults == ()
    assert list(adapter_faults(seen.adapter, seen.inventory, read_reference(models / "model_a"))) == []
