"""Which way the weights go, by which rule, and whether refitd goes it itself."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from refitd_client import PlanRefusedError, plan
from refitd_plan import Gpu
from refitd_plan.transport import COSTS, OF_RANKS, RULES, WeightTransport
from support.planning_page import CONFIGS

ONE_GPU: dict[str, Any] = {"gpus_per_node": 1, "gpu_memory": 44.42}
DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("allocation", "situation", "transport", "rule"),
    [
        ("sglang.d1p1t1+d1p1t1", ONE_GPU, "disk+delta", "duplicate-device"),
        ("sglang:d1|fsdp:d1", ONE_GPU, "disk+delta", "colocated"),
        ("sglang:d4|fsdp:d4", {"gpus_per_node": 4}, "disk+delta", "colocated"),
        ("sglang:d2+fsdp:d2", {"gpus_per_node": 2}, "disk+delta", "duplicate-device"),
        ("sglang:d1|fsdp:d1", {**ONE_GPU, "areal": True}, "disk", "in-full"),
        ("sglang.d1+d1", {**ONE_GPU, "areal": True, "plugin": True}, "disk", "in-full"),
        ("sglang:d1|fsdp:d1", {**ONE_GPU, "plugin": True}, "handover", "hand-over"),
        ("sglang.d1+d1", {**ONE_GPU, "plugin": True}, "handover", "hand-over"),
        ("sglang:d1|fsdp:d1", {**ONE_GPU, "plugin": True, "expandable_segments": True}, "disk+delta", "colocated"),
        ("sglang:d4|fsdp:d4", {"gpus_per_node": 4, "plugin": True}, "disk+delta", "colocated"),
        ("sglang:d1+fsdp:d1", {"gpus_per_node": 2, "plugin": True}, "nccl", "separate-devices"),
        ("sglang:d2+fsdp:d1", {"gpus_per_node": 2, "plugin": True}, "disk+delta", "duplicate-device"),
        ("sglang:d1+fsdp:d1", {"gpus_per_node": 1, "nodes": 2, "plugin": True}, "nccl", "separate-devices"),
        ("sglang:d2+fsdp:d4", {"gpus_per_node": 4, "plugin": True}, "nccl", "separate-devices"),
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


def test_deltas_are_promised_to_no_trainer_whose_publisher_has_none() -> None:
    """Nor is memory taken for them."""
    made = plan("sglang:d8|fsdp:d8", gpus_per_node=8, gpu_memory=79.1, model=CONFIGS["Qwen2.5-7B"], areal=True)
    assert "AReaL hands whole folders over" in made.reason
    delta = next(way for way in made.ways if way.transport is WeightTransport.DISK_DELTA)
    assert (delta.carried_out, "full" in str(delta.hinders)) == (False, True)
    assert made.memory is not None
    assert all("publish staging" not in process.parts for process in made.memory.processes)


def test_where_a_trainer_has_several_ranks_each_looks_for_what_changed_and_takes_memory_for_it() -> None:
    made = plan("sglang:d8|fsdp:d8", gpus_per_node=8, gpu_memory=79.1, model=CONFIGS["Qwen2.5-7B"])
    assert plan("sglang:d4+fsdp:d4", gpus_per_node=8).meanwhile is WeightTransport.DISK_DELTA
    assert made.memory is not None
    assert sum("publish staging" in process.parts for process in made.memory.processes) == 8


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


def test_ranks_outside_the_update_group_may_share_gpus() -> None:
    """Ranks 2 and 3 of the trainer begin again at the engines' GPUs, and are in no broadcast."""
    made = plan("sglang:d2+fsdp:d4", gpus_per_node=4)
    assert next(way for way in made.ways if way.transport is WeightTransport.NCCL).hinders is None
    assert "plugin" in str(next(way for way in made.ways if way.transport is WeightTransport.HANDOVER).hinders)


def test_a_hand_over_says_what_it_takes_for_granted_of_the_service() -> None:
    made = plan("sglang:d1|fsdp:d1", gpus_per_node=1, plugin=True)
    assert any("--strategy all" in text for text in made.assumptions)


def test_a_hand_over_on_one_gpu_is_carried_out() -> None:
    made = plan("sglang:d1|fsdp:d1", gpus_per_node=1, plugin=True)
    assert made.transport is WeightTransport.HANDOVER
    assert next(way for way in made.ways if way.chosen).carried_out
    assert made.meanwhile is None


def test_a_hand_over_between_gpus_is_not_chosen_since_no_plan_can_see_whether_they_reach_each_other() -> None:
    """Though the call would be the same, and memory of the other GPU could be opened."""
    made = plan("sglang:d1+fsdp:d1", gpus_per_node=2, plugin=True)
    way = next(way for way in made.ways if way.transport is WeightTransport.HANDOVER)
    assert (way.chosen, way.carried_out) == (False, False)
    assert (way.maybe, "which the first publish(transport='handover') finds out" in str(way.hinders)) == (True, True)


def test_the_plugin_is_looked_for_where_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refitd_plan.planner.has_plugin", lambda _: True)
    assert plan("sglang:d1|fsdp:d1", gpus_per_node=1).rule == "hand-over"
    monkeypatch.setattr("refitd_plan.planner.has_plugin", lambda _: False)
    made = plan("sglang:d1|fsdp:d1", gpus_per_node=1)
    assert made.rule == "colocated"
    assert any("--plugin" in text for text in made.assumptions)


def test_adapters_have_no_way_without_shared_files() -> None:
    with pytest.raises(PlanRefusedError, match="files alone"):
        plan("sglang:d1+fsdp:d1", gpus_per_node=2, lora_rank=8, shared_files=False)
    ways = {way.transport: way for way in plan("sglang:d1+fsdp:d1", gpus_per_node=2, lora_rank=8).ways}
    assert all(ways[way].hinders for way in (WeightTransport.NCCL, WeightTransport.GLOO, WeightTransport.DISK_DELTA))


def test_nccl_is_kept_out_of_processes_that_do_not_train() -> None:
    assert any("training processes only" in text for text in plan("sglang:d1+fsdp:d1", gpus_per_node=2).advice)
    assert plan("sglang:d1|fsdp:d1", gpus_per_node=1).advice == ()


def test_broadcasts_are_left_to_the_trainer_where_refitd_is_not_in_the_engines() -> None:
    made = plan("sglang:d1+fsdp:d1", gpus_per_node=2)
    by_refitd = {way.transport for way in made.ways if way.carried_out}
    assert by_refitd == {WeightTransport.DISK, WeightTransport.DISK_DELTA}
    assert made.meanwhile is WeightTransport.DISK_DELTA
    assert plan("sglang:d1|fsdp:d1", gpus_per_node=1).meanwhile is None


def test_broadcasts_are_carried_out_where_refitd_is_in_the_engines() -> None:
    made = plan("sglang:d1+fsdp:d1", gpus_per_node=2, plugin=True)
    by_refitd = {way.transport for way in made.ways if way.carried_out}
    assert by_refitd == set(WeightTransport) - {WeightTransport.HANDOVER}
    assert (made.transport, made.meanwhile) == (WeightTransport.NCCL, None)
    assert any('transport="nccl"' in sentence for sentence in made.advice)
    of_ranks = plan("sglang:d2+fsdp:d2", gpus_per_node=4, plugin=True)
    assert next(way for way in of_ranks.ways if way.transport is WeightTransport.NCCL).carried_out


@pytest.mark.parametrize(
    ("allocation", "situation", "why"),
    [
        ("sglang:d1+fsdp:d1", {}, "not inside the engines"),
        ("sglang:d1+fsdp:d1", {"plugin": True, "shared_files": False}, "do not see the trainer's files"),
        ("sglang:d1+fsdp:d1", {"plugin": True, "areal": True}, "weight_update_mode: xccl"),
        ("sglang:d2+fsdp:d4", {"plugin": True}, "shares a GPU"),
    ],
)
def test_a_broadcast_that_is_left_to_the_trainer_says_why(allocation: str, situation: dict[str, Any], why: str) -> None:
    made = plan(allocation, gpus_per_node=4, **situation)
    nccl = next(way for way in made.ways if way.transport is WeightTransport.NCCL)
    assert (nccl.hinders, nccl.carried_out) == (None, False)
    assert why in str(nccl.left_to_trainer)


def test_each_way_says_what_stands_against_it() -> None:
    ways = {way.transport: way for way in plan("sglang:d1|fsdp:d1", gpus_per_node=1).ways}
    assert ways.keys() == set(WeightTransport)
    assert "plugin" in str(ways[WeightTransport.HANDOVER].hinders)
    assert "Duplicate GPU" in str(ways[WeightTransport.NCCL].hinders)
    assert ways[WeightTransport.DISK].hinders is None


def test_nccl_brings_the_environment_that_both_sides_need() -> None:
    environment = plan("sglang:d1+fsdp:d1", gpus_per_node=2).environment
    for side in ("trainer", "engine"):
        assert environment[side]["NCCL_CUMEM_ENABLE"] == "0"
        assert environment[side]["NCCL_DEBUG"] != "INFO"
    assert "NCCL_CUMEM_ENABLE" not in plan("sglang:d1|fsdp:d1", gpus_per_node=1).environment["trainer"]
    assert environment["engine"]["HF_HUB_OFFLINE"] == "1"


def test_every_figure_of_a_cost_stands_in_the_measurements() -> None:
    page = (DOCS / "measurements.md").read_text()
    for transport, cost in COSTS.items():
        assert [figure for figure in asdict(cost).values() if str(figure) not in page] == [], transport


def test_a_trainer_of_several_ranks_is_told_that_the_times_are_of_one_process() -> None:
    several, one = plan("sglang:d2|fsdp:d2", gpus_per_node=2), plan("sglang:d1|fsdp:d1", gpus_per_node=1)
    assert OF_RANKS in several.assumptions
    assert OF_RANKS not in one.assumptions
    measured = json.loads((DOCS / "benchmarks/gpu2-sharded.json").read_text())["3.09 GB"]
    figures = [round(measured[f"{way}: answered ms"]["p50"]) for way in ("disk", "delta", "handover")]
    assert "versions took {} ms, deltas {}, hand-overs {} ".format(*figures) in OF_RANKS


def test_the_page_has_the_rules_in_their_order() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|.*\| `([a-z+]+)` \|$", (DOCS / "planning.md").read_text(), re.MULTILINE)
    assert rows == [(rule.name, rule.transport) for rule in RULES]


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
        ({"gpus_per_node": 1, "precision": "fp4"}, "--precision is 'fp4': it is bf16, mixed, fp32"),
        ({"gpus_per_node": 1, "optimizer": "lion"}, "--optimizer is 'lion': it is adamw, adamw8bit, sgd"),
        ({"gpus_per_node": 1, "lora_rank": "32"}, "--lora-rank is '32', which is no whole number"),
        ({"gpus_per_node": 1, "batch_size": 2.5}, "--batch-size is 2.5, which is no whole number"),
        ({"gpus_per_node": 1, "gradient_checkpointing": "no"}, "neither true nor false"),
        ({"gpus_per_node": 1, "mem_fraction_static": "0.8"}, "--mem-fraction-static is '0.8', which is no number"),
        ({"gpus_per_node": "1"}, "--gpus-per-node is '1', which is no whole number"),
        ({"gpus_per_node": 1, "gpu_memory": "80"}, "--gpu-memory is '80', which is no number"),
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
    told = plan("sglang:d1|fsdp:d1", gpus=[Gpu(uuid="GPU-1", memory=80.0)], nodes=1, plugin=False).assumptions
    assert told == ("no model was given: memory is not planned",)
