"""Which way the weights go, by which rule, and whether refitd goes it itself."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from refitd_client import PlanRefusedError, ways
from refitd_client.transport import choice
from refitd_plan.machine import Gpu
from refitd_plan.planner import plan
from refitd_plan.transport import COSTS, OF_RANKS, WAYS
from support.planning_page import CONFIGS

ONE_GPU: dict[str, Any] = {"gpus_per_node": 1, "gpu_memory": 44.42}
DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("allocation", "situation", "transport"),
    [
        ("sglang.d1p1t1+d1p1t1", ONE_GPU, "delta"),
        ("sglang:d1|fsdp:d1", ONE_GPU, "delta"),
        ("sglang:d4|fsdp:d4", {"gpus_per_node": 4}, "disk"),
        ("sglang:d1|fsdp:d1", {**ONE_GPU, "areal": True}, "disk"),
        ("sglang.d1+d1", {**ONE_GPU, "areal": True, "plugin": True}, "disk"),
        ("sglang:d1|fsdp:d1", {**ONE_GPU, "plugin": True}, "handover"),
        ("sglang.d1+d1", {**ONE_GPU, "plugin": True}, "handover"),
        ("sglang:d1|fsdp:d1", {**ONE_GPU, "plugin": True, "expandable_segments": True}, "delta"),
        ("sglang:d4|fsdp:d4", {"gpus_per_node": 4, "plugin": True}, "handover"),
        ("sglang:d1+fsdp:d1", {"gpus_per_node": 2, "plugin": True}, "nccl"),
        ("sglang:d2+fsdp:d1", {"gpus_per_node": 2, "plugin": True}, "delta"),
        ("sglang:d1+fsdp:d1", {"gpus_per_node": 1, "nodes": 2, "plugin": True}, "nccl"),
        ("sglang:d2+fsdp:d4", {"gpus_per_node": 4, "plugin": True}, "handover"),
        ("sglang:d2+fsdp:d2", {"gpus_per_node": 4, "plugin": True}, "nccl"),
        ("sglang:d1+fsdp:d1", {"gpus_per_node": 2}, "delta"),
        ("sglang:d4t2+fsdp:d8", {"gpus_per_node": 8, "nodes": 2, "plugin": True}, "nccl"),
        ("sglang:d1+fsdp:d1", {"gpus_per_node": 2, "lora_rank": 16, "plugin": True}, "disk"),
        ("sglang:d1+fsdp:d1", {"gpus_per_node": 2, "shared_files": False, "plugin": True}, "delta"),
    ],
)
def test_the_way_is_the_one_that_publish_would_take(allocation: str, situation: dict[str, Any], transport: str) -> None:
    made = plan(allocation, **situation)
    assert (made.transport, [way.transport for way in made.ways if way.chosen]) == (transport, [transport])
    assert made.reason


def test_the_chooser_is_the_publishers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "choose", lambda *_: ways.Choice(transport="gloo", why="it is asked"))
    made = plan("sglang:d1+fsdp:d1", gpus_per_node=2, plugin=True)
    assert (made.transport, made.reason) == ("gloo", "it is asked")


def test_deltas_are_promised_to_no_trainer_whose_publisher_has_none() -> None:
    """Nor is memory taken for them."""
    made = plan("sglang:d8|fsdp:d8", gpus_per_node=8, gpu_memory=79.1, model=CONFIGS["Qwen2.5-7B"], areal=True)
    assert "AReaL hands whole folders over" in made.reason
    assert "full" in str(next(way for way in made.ways if way.transport == "delta").hinders)
    assert made.memory is not None
    assert all("publish staging" not in process.parts for process in made.memory.processes)


def test_a_publisher_that_looks_for_what_changed_takes_memory_for_it() -> None:
    made = plan("sglang:d1|fsdp:d1", gpus_per_node=1, gpu_memory=79.1, model=CONFIGS["Qwen2.5-7B"])
    assert made.memory is not None
    assert sum("publish staging" in process.parts for process in made.memory.processes) == 1


def test_ranks_that_share_a_uuid_rule_nccl_out_and_a_shared_name_does_not() -> None:
    same = [Gpu(uuid="GPU-1"), Gpu(uuid="GPU-1")]
    other = [Gpu(uuid="GPU-1", name="A40"), Gpu(uuid="GPU-2", name="A40")]
    assert plan("sglang:d1+d1", gpus=same, plugin=True).transport == "handover"
    assert plan("sglang:d1+d1", gpus=other, plugin=True).transport == "nccl"


def test_a_hand_over_says_what_it_takes_for_granted_of_the_service() -> None:
    made = plan("sglang:d1|fsdp:d1", gpus_per_node=1, plugin=True)
    assert any("--strategy all" in text for text in made.assumptions)


def test_the_plugin_is_looked_for_where_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refitd_plan.planner.has_plugin", lambda _: True)
    assert plan("sglang:d1|fsdp:d1", gpus_per_node=1).transport == "handover"
    monkeypatch.setattr("refitd_plan.planner.has_plugin", lambda _: False)
    made = plan("sglang:d1|fsdp:d1", gpus_per_node=1)
    assert made.transport == "delta"
    assert any("--plugin" in text for text in made.assumptions)


def test_where_engines_do_not_see_the_trainers_files_a_service_there_follows() -> None:
    made = plan("sglang:d1+fsdp:d1", gpus_per_node=2, plugin=True, shared_files=False)
    assert any("refitd serve --follow" in line for line in made.advice)
    hindered = {way.transport for way in made.ways if way.hinders is not None}
    assert hindered == {"handover", "nccl", "gloo"}


def test_adapters_go_by_files_alone() -> None:
    found = plan("sglang:d1+fsdp:d1", gpus_per_node=2, lora_rank=8, plugin=True).ways
    assert [way.transport for way in found if way.hinders is None] == ["disk"]


def test_nccl_is_kept_out_of_processes_that_do_not_train() -> None:
    assert any("training processes only" in x for x in plan("sglang:d1+fsdp:d1", gpus_per_node=2, plugin=True).advice)
    assert plan("sglang:d1|fsdp:d1", gpus_per_node=1).advice == ()


def test_each_way_says_what_stands_against_it() -> None:
    found = {way.transport: way for way in plan("sglang:d1|fsdp:d1", gpus_per_node=1, plugin=True).ways}
    assert found.keys() == set(WAYS)
    assert "NCCL refuses two ranks on one GPU" in str(found["nccl"].hinders)
    assert found["disk"].hinders is None
    assert "docs/plugin.md" in str(plan("sglang:d1|fsdp:d1", gpus_per_node=1).ways[2].hinders)


def test_nccl_brings_the_environment_that_both_sides_need() -> None:
    environment = plan("sglang:d1+fsdp:d1", gpus_per_node=2, plugin=True).environment
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
        ({"gpus_per_node": 1, "lora_rank": "32"}, "--lora-rank is '32': Expected `int"),
        ({"gpus_per_node": 1, "batch_size": 2.5}, "--batch-size is 2.5: Expected `int`"),
        ({"gpus_per_node": 1, "gradient_checkpointing": "no"}, "Expected `bool`"),
        ({"gpus_per_node": 1, "mem_fraction_static": "0.8"}, "--mem-fraction-static is '0.8': Expected `float"),
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
