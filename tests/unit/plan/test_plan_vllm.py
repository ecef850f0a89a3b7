"""Plans for engines that are vLLM: nothing that was measured with SGLang alone is claimed of them."""

import pytest

from refitd_plan.planner import plan
from support.planning_page import CONFIGS


@pytest.mark.parametrize(
    ("allocation", "transport"),
    [
        ("vllm:d1|fsdp:d1", "handover"),
        ("vllm.d1p1t1+d1p1t1", "handover"),
        ("vllm:d4+fsdp:d4", "nccl"),
    ],
)
def test_an_allocation_may_name_vllm(allocation: str, transport: str) -> None:
    made = plan(allocation, gpus_per_node=8 if "d4" in allocation else 1, plugin=True)
    assert made.transport == transport
    assert "not measured with vLLM" in made.costs_of
    assert made.environment["engine"]["VLLM_SERVER_DEV_MODE"] == "1"


def test_what_stock_servers_cost_is_said_where_refitd_is_not_inside() -> None:
    stock = plan("vllm:d1+fsdp:d1", gpus_per_node=2, plugin=False).advice
    assert any("several ranks is not updated" in line for line in stock)
    inside = plan("vllm:d1+fsdp:d1", gpus_per_node=2, plugin=True).advice
    assert not any("stock" in line for line in inside)


def test_a_vllm_takes_its_share_of_all_of_the_gpu() -> None:
    made = plan("vllm:d1+fsdp:d1", gpus_per_node=2, gpu_memory=80.0, model=CONFIGS["Qwen2.5-7B"], context_length=4096)
    assert made.memory is not None
    engine = next(each for each in made.memory.processes if each.role == "generation")
    assert engine.total == pytest.approx(0.92 * 80.0, abs=0.01)
    assert any("gpu_memory_utilization" in line for line in made.assumptions)
