"""`refitd plan`: the same plan for people and for machines, and errors that can be mended."""

from pathlib import Path

import msgspec
import pytest

from support.command_line import answer, refitd
from support.planning_page import CONFIGS

A40 = ["--gpus-per-node", "1", "--gpu-memory", "44.42", "--mem-fraction-static", "0.8", "--context-length", "4096"]


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(CONFIGS["Qwen2.5-0.5B"]))
    return ["--model", str(tmp_path)]


def test_one_gpu_gets_a_plan_with_reasons(model: list[str]) -> None:
    shown = refitd("plan", "sglang.d1p1t1+d1p1t1", *A40, *model)
    assert shown.exit_code == 1, "it does not fit"
    for word in ("disk+delta", "Duplicate GPU detected", "does not fit", "mem_fraction_static", "KV cache", "Assumed"):
        assert word in shown.stdout


def test_it_is_one_json_document(model: list[str]) -> None:
    shown = refitd("plan", "sglang.d1p1t1+d1p1t1", *A40, *model, "--json")
    document = msgspec.json.decode(shown.stdout)
    assert document.keys() >= {"transport", "rule", "reason", "memory", "assumptions", "sglang_flags", "environment"}
    assert document["memory"].keys() >= {"fits", "processes", "changes"}
    assert document["areal"]["sglang"]["mem_fraction_static"] == document["memory"]["changes"][0]["value"]
    assert all(process["total"] > 0 for process in document["memory"]["processes"])


def test_it_ends_well_where_the_job_fits(model: list[str]) -> None:
    fitting = ["--gpus-per-node", "2", "--gpu-memory", "80", "--gradient-checkpointing"]
    made = answer("plan", "sglang:d1+fsdp:d1", *fitting, *model)
    assert made["memory"]["fits"]
    assert made["meanwhile"] == "disk+delta"
    assert "export NCCL_CUMEM_ENABLE=0" in refitd("plan", "sglang:d1+fsdp:d1", *fitting, *model).stdout


def test_counts_do_in_place_of_a_string() -> None:
    made = answer("plan", "--engine-gpus", "4", "--engine-tp", "2", "--trainer-gpus", "4", "--gpus-per-node", "8")
    assert made["allocation"] == "sglang:d2t2+fsdp:d4"
    assert made["update_group"] == 5
    assert made["memory"] is None


def test_an_error_points_at_the_character() -> None:
    shown = refitd("plan", "sglang-d1", "--gpus-per-node", "1")
    assert shown.exit_code == 2
    assert "  sglang-d1\n        ^" in shown.output
    problem = msgspec.json.decode(refitd("plan", "sglang-d1", "--gpus-per-node", "1", "--json").stdout)
    assert problem["status"] == 400
    assert "character 7" in problem["detail"]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--gpus-per-node", "0"], "--gpus-per-node"),
        (["--gpus-per-node", "1", "--kv-cache-dtype", "int4"], "--kv-cache-dtype"),
        (["--gpus-per-node", "1", "--model", "/nowhere"], "/nowhere"),
        (["--gpus-per-node", "1", "--optimizer", "lion"], "lion"),
    ],
)
def test_bad_input_is_named(flags: list[str], names: str) -> None:
    shown = refitd("plan", "sglang:d1|fsdp:d1", *flags)
    assert shown.exit_code == 2
    assert names in shown.output
