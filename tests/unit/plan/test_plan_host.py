"""A root on a tmpfs is host memory: what lies there is part of the verdict where somebody says what there is."""

from typing import Any

import pytest

from refitd_client import PlanRefusedError
from refitd_plan.plan import PlannedMemory
from refitd_plan.planner import plan
from support.planning_page import CONFIGS

VERSION = 15.25  # GiB of Qwen3-8B in bf16
SEPARATE = ("sglang:d1+fsdp:d1", 2)
BY_FILES = {"engine_gpus": 1, "trainer_gpus": 1, "shared": True, "mem_fraction_static": 0.3}


def memory(host: float | None, gpu_memory: float = 280, **settings: Any) -> PlannedMemory:
    given = {**BY_FILES, **settings}
    made = plan(
        gpus_per_node=1,
        gpu_memory=gpu_memory,
        nodes=1,
        host_memory=host,
        model=CONFIGS["Qwen3-8B"],
        plugin=False,
        **given,
    )
    assert made.transport == "delta"
    assert made.memory is not None
    return made.memory


def test_it_counts_where_the_host_s_memory_is_known_and_not_where_it_is_not() -> None:
    unknown, large, small = memory(None), memory(1.1 * 9 * VERSION), memory(8 * VERSION)
    assert (unknown.fits, large.fits, small.fits) == (True, True, False)
    assert unknown.host == large.host == small.host == pytest.approx(9 * VERSION, rel=0.01)
    (fault,) = small.faults
    assert (
        "9 versions (3 kept, 2 slots, 1 being written, 2 copies for deltas, 1 that the publisher compares with)"
        in fault
    )
    assert "the host has 122" in fault


@pytest.mark.parametrize(("versions", "says"), [(8, "--keep-last 2 --slots 0' takes 91.5"), (5, "and at least 91.5")])
def test_what_takes_less_is_named_where_it_would_fit(versions: int, says: str) -> None:
    (fault,) = memory((versions + 0.2) * VERSION / 0.95).faults
    assert says in fault


@pytest.mark.parametrize(
    ("allocation", "transport"), [("sglang:d1+fsdp:d1", "nccl"), ("sglang:d1|fsdp:d1", "handover")]
)
def test_files_that_follow_what_refitd_brings_from_memory_count(allocation: str, transport: str) -> None:
    more: dict[str, Any] = {"nodes": 1, "host_memory": 20, "plugin": True, "mem_fraction_static": 0.3}
    made = plan(allocation, gpus_per_node=2, gpu_memory=280, model=CONFIGS["Qwen3-8B"], **more)
    assert made.transport == transport
    assert made.memory is not None
    assert ["a root on a tmpfs" in fault for fault in made.memory.faults] == [True]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"host_memory": "512"}, "--host-memory is '512', which is no number"),
        ({"host_memory": -1}, "--host-memory is -1 GiB"),
        ({"host_memory": 512 * 2**20}, "so 512"),
        ({"host_memory": 512, "nodes": 2}, "this job has 2"),
    ],
)
def test_a_host_that_cannot_be_is_refused_by_name(given: dict[str, Any], names: str) -> None:
    with pytest.raises(PlanRefusedError, match=names):
        plan("sglang:d1+fsdp:d1", gpus_per_node=2, gpu_memory=80, **{"nodes": 1, **given})


def test_what_nobody_said_is_listed() -> None:
    made = plan("sglang:d1+fsdp:d1", gpus_per_node=2, gpu_memory=80, nodes=1, model=CONFIGS["Qwen3-8B"])
    assert any("--host-memory" in text for text in made.assumptions)
