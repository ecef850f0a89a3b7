"""`refitd plan`: the same plan for people and for machines, and errors that can be mended."""

import re
from pathlib import Path

import msgspec
import pytest

from support.command_line import answer, refitd
from support.planning_page import CASES, CONFIGS, PAGE

A40 = ["--gpus-per-node", "1", "--gpu-memory", "44.42", "--mem-fraction-static", "0.8", "--context-length", "4096"]


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(CONFIGS["Qwen2.5-0.5B"]))
    return ["--model", str(tmp_path)]


def test_one_gpu_gets_a_plan_with_reasons(model: list[str]) -> None:
    shown = refitd("plan", "sglang.d1p1t1+d1p1t1", *A40, *model)
    assert shown.exit_code == 1, "it does not fit"
    for word in ("delta", "files go everywhere", "does not fit", "mem_fraction_static", "KV cache", "Assumed"):
        assert word in shown.stdout
    assert "publisher.publish(model, step=step, transport='delta')" in shown.stdout


def test_into_a_pipe_it_is_a_page_that_can_be_read(model: list[str]) -> None:
    narrow = refitd("plan", "sglang.d1p1t1+d1p1t1", *A40, *model, env={"COLUMNS": "80"}).stdout.splitlines()
    assert max(map(len, narrow)) <= 80
    lines = refitd("plan", "sglang.d1p1t1+d1p1t1", *A40, *model).stdout.splitlines()
    rules = [line for line in lines if set(line) == {"─"}]
    assert rules
    assert max(map(len, rules)) <= 100, "tables"
    made = msgspec.json.decode(refitd("plan", "sglang.d1p1t1+d1p1t1", *A40, *model, "--json").stdout)
    assert f"  {made['reason']}" in lines, "a sentence is one line"
    assert {f"  - {assumption}" for assumption in made["assumptions"]} <= set(lines)


def test_it_is_one_json_document(model: list[str]) -> None:
    shown = refitd("plan", "sglang.d1p1t1+d1p1t1", *A40, *model, "--json")
    document = msgspec.json.decode(shown.stdout)
    assert document.keys() >= {"transport", "reason", "memory", "assumptions", "environment"}
    assert document["memory"].keys() >= {"fits", "processes", "changes"}
    assert all(process["total"] > 0 for process in document["memory"]["processes"])


def test_it_ends_well_where_the_job_fits(model: list[str]) -> None:
    fitting = ["--gpus-per-node", "2", "--gpu-memory", "80", "--gradient-checkpointing"]
    made = answer("plan", "sglang:d1+fsdp:d1", *fitting, *model)
    assert made["memory"]["fits"]
    assert "export NCCL_CUMEM_ENABLE=0" in refitd("plan", "sglang:d1+fsdp:d1", *fitting, *model, "--plugin").stdout


def test_the_help_has_the_defaults() -> None:
    shown = " ".join(refitd("plan", "--help").stdout.split())
    for default in ("[bf16]", "[adamw]", "[10240]", "[512]"):
        assert default in shown


def test_the_page_has_the_command_of_a_row(tmp_path: Path) -> None:
    """As it stands there, but for the model's place: it gives what the row says."""
    command = re.search(r"^refitd (plan .*?--max.*?)$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert command is not None
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(CONFIGS["Qwen2.5-1.5B"]))
    words = command[1].replace("\\\n", " ").replace("/models/Qwen2.5-1.5B", str(tmp_path)).split()
    row = next(case for case in CASES if (case.gpu, case.model) == ("RTX 4090", "Qwen2.5-1.5B")).plan()
    made = msgspec.json.decode(refitd(*words, "--json").stdout)
    assert row.memory is not None
    assert row.memory.changes is not None
    assert made["memory"]["processes"] == [msgspec.to_builtins(each) for each in row.memory.processes]
    assert made["memory"]["changes"] == [msgspec.to_builtins(each) for each in row.memory.changes]


def test_a_plan_says_of_what_its_costs_are_and_how_the_service_is_started(model: list[str]) -> None:
    shown = " ".join(refitd("plan", "sglang.d1p1t1+d1p1t1", *A40, *model).stdout.split())
    assert "refitd inside the engine, as it is not in this job: engines without it are paused for longer" in shown
    assert "; a version of this job has 0.988 GB: about 0.32 times that" in shown
    assert answer("plan", "sglang:d1+d1", "--gpus-per-node", "2")["costs_of"].startswith(
        "3.09 GB in bf16, trainer and engine on an H200 each"
    )
    assert "refitd serve --root DIR --engine URL --base-model MODEL" in shown
    sent = " ".join(refitd("plan", "sglang:d1+d1", "--gpus-per-node", "2", "--plugin").stdout.split())
    assert "Transport: nccl" in sent
    assert "refitd serve --root DIR" in sent
