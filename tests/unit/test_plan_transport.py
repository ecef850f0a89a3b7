"""Which way the weights go, by which rule, and whether refitd goes it itself."""

import re
from pathlib import Path
from typing import Any

import pytest

from refitd_client import PlanRefusedError, plan
from refitd_client.planning import Gpu
from refitd_client.planning.transport import COSTS, UNMEASURED, Transport

ONE_GPU: dict[str, Any] = {"gpus_per_node": 1, "gpu_memory": 44.42}
BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks.md"


@pytest.mark.parametrize(
    ("allocation", "situation", "transport", "rule"),
    [
        ("sglang.d1p1t1+d1p1t1", ONE_GPU, "disk+delta", "duplicate-device"),
        ("sglang.d1p1t1+d1p1t1", {**ONE_GPU, "deltas": False}, "disk", "duplicate-device"),
        ("sglang:d1|fsdp:d1", ONE_GPU, "disk+delta", "colocated"),
        ("sglang:d4|fsdp:d4", {"gpus_per_node": 4}, "disk+delta", "colocated"),
        ("sglang:d1|fsdp:d1", {**ONE_GPU, "plugin": True}, "handover", "hand-over"),
        ("sglang.d1+d1", {**ONE_GPU, "plugin": True}, "handover", "hand-over"),
        ("sglang:d1|fsdp:d1", {**ONE_GPU, "plugin": True, "expandable_segments": True}, "disk+delta", "colocated"),
        ("sglang:d4|fsdp:d4", {"gpus_per_node": 4, "plugin": True}, "disk+delta", "colocated"),
        ("sglang:d1+fsdp:d1", {"gpus_per_node": 2}, "nccl", "separate-devices"),
        ("sglang:d4t2+fsdp:d8", {"gpus_per_node": 8, "nodes": 2}, "nccl", "separate-devices"),
        ("sglang:d1+fsdp:d1", {"gpus_per_node": 2, "lora_rank": 16}, "disk", "lora"),
        ("sglang:d1+fsdp:d1", {"gpus_per_node": 2, "shared_files": False}, "nccl", "no-shared-files"),
        ("sglang:d1|fsdp:d1", {**ONE_GPU, "shared_files": False}, "gloo", "no-shared-files-one-device"),
    ],
)
def test_the_rule_decides(allocation: str, situation: dict[str, Any], transport: str, rule: str) -> None:
    made = plan(allocation, **situation)
    assert (made.transport, made.rule) == (transport, rule)
    assert made.reason


def test_the_group_of_a_broadcast_has_one_rank_more_than_generate() -> None:
    assert plan("sglang:d4t2+fsdp:d8", gpus_per_node=8, nodes=2).update_group == 9
    assert "2 ranks" in plan("sglang.d1p1t1+d1p1t1", gpus_per_node=1).reason


def test_the_reason_names_the_error_that_people_see() -> None:
    assert "Duplicate GPU detected" in plan("sglang.d1p1t1+d1p1t1", gpus_per_node=1).reason


def test_ranks_that_share_a_uuid_rule_nccl_out_and_a_shared_name_does_not() -> None:
    same = [Gpu(uuid="GPU-1"), Gpu(uuid="GPU-1")]
    other = [Gpu(uuid="GPU-1", name="A40"), Gpu(uuid="GPU-2", name="A40")]
    assert plan("sglang:d1+d1", gpus=same).rule == "duplicate-device"
    assert plan("sglang:d1+d1", gpus=other).rule == "separate-devices"


def test_broadcasts_are_advised_and_never_claimed() -> None:
    made = plan("sglang:d1+fsdp:d1", gpus_per_node=2)
    by_refitd = {way.transport for way in made.ways if way.carried_out}
    assert by_refitd == {Transport.DISK, Transport.DISK_DELTA}
    assert made.meanwhile is Transport.DISK_DELTA
    assert plan("sglang:d1|fsdp:d1", gpus_per_node=1).meanwhile is None


def test_each_way_says_what_stands_against_it() -> None:
    ways = {way.transport: way for way in plan("sglang:d1|fsdp:d1", gpus_per_node=1).ways}
    assert ways.keys() == set(Transport)
    assert "plugin" in str(ways[Transport.HANDOVER].hinders)
    assert "Duplicate GPU" in str(ways[Transport.NCCL].hinders)
    assert ways[Transport.DISK].hinders is None


def test_nccl_brings_the_environment_that_both_sides_need() -> None:
    environment = plan("sglang:d1+fsdp:d1", gpus_per_node=2).environment
    for side in ("trainer", "engine"):
        assert environment[side]["NCCL_CUMEM_ENABLE"] == "0"
        assert environment[side]["NCCL_DEBUG"] != "INFO"
    assert "NCCL_CUMEM_ENABLE" not in plan("sglang:d1|fsdp:d1", gpus_per_node=1).environment["trainer"]
    assert environment["engine"]["HF_HUB_OFFLINE"] == "1"


def test_every_figure_of_a_cost_stands_in_the_benchmarks() -> None:
    page = BENCHMARKS.read_text()
    for transport, cost in COSTS.items():
        figures = re.findall(r"\d+(?:\.\d+)?", cost)
        assert cost == UNMEASURED or figures, transport
        assert [figure for figure in figures if figure not in page] == [], transport


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, "--gpus-per-node"),
        ({"gpus_per_node": 0}, "--gpus-per-node is 0"),
        ({"gpus_per_node": -1}, "--gpus-per-node is -1"),
        ({"gpus_per_node": 10**9}, "cannot be meant"),
        ({"gpus_per_node": 1, "nodes": 0}, "--nodes is 0"),
        ({"gpus_per_node": 1, "gpu_memory": 80_000}, "80 and not 80000"),
        ({"gpus_per_node": 1, "gpu_memory": float("nan")}, "--gpu-memory"),
        ({"gpus_per_node": 1, "engine_gpus": 1}, "twice"),
        ({"gpus_per_node": 1, "batch_size": 0}, "--batch-size is 0"),
        ({"gpus_per_node": 1, "micro_batch_tokens": -5}, "--micro-batch-tokens is -5"),
        ({"gpus_per_node": 1, "mem_fraction_static": 1.5}, "--mem-fraction-static is 1.5"),
        ({"gpus_per_node": 1, "precision": "fp4"}, "fp4"),
        ({"gpus_per_node": 1, "kv_cache_bytes": 3}, "kv_cache_bytes is 3"),
        ({"gpus_per_node": 1, "bach_size": 1}, "bach_size is no setting"),
    ],
)
def test_bad_input_is_named(given: dict[str, Any], names: str) -> None:
    with pytest.raises(PlanRefusedError, match=re.escape(names)):
        plan("sglang:d1|fsdp:d1", **{"gpus": [], **given})


def test_counts_need_both_sides() -> None:
    with pytest.raises(PlanRefusedError, match="--engine-gpus and --trainer-gpus"):
        plan(engine_gpus=4, gpus_per_node=8)
    with pytest.raises(PlanRefusedError, match="engines of 3"):
        plan(engine_gpus=4, trainer_gpus=4, engine_tp=3, gpus_per_node=8)


def test_what_was_assumed_is_listed_and_what_was_said_is_not() -> None:
    assert any("one node" in text for text in plan("sglang:d1|fsdp:d1", gpus_per_node=1).assumptions)
    told = plan("sglang:d1|fsdp:d1", gpus=[Gpu(uuid="GPU-1", memory=80.0)], nodes=1).assumptions
    assert told == ("no model was given: memory is not planned",)
