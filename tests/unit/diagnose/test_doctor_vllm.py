"""Doctor names what a vLLM server lacks, and the flag or variable to start it with."""

import json
from pathlib import Path
from typing import Any

import pytest

from refitd.engine.vllm.info import NEEDED
from support.checkpoints import publish, tensors, write_model
from support.command_line import refitd
from support.scripted_vllm import ScriptedVllm, config, scripted_vllm

WEIGHTS = frozenset({*NEEDED, "/weight_info", "/server_info", "/is_paused"})
LABELS = frozenset({"/weight_info", "/update_weight_version"})


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    root = tmp_path / "root"
    publish(root, "run", 1, tensors(1))
    base = write_model(tmp_path / "base")
    return ["--root", str(root), "--state", str(tmp_path / "state"), "--base-model", str(base)]


def found(job: list[str], vllm: ScriptedVllm, *flags: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What doctor says of the engine, by check and verdict."""
    run = refitd("doctor", *job, "--engine", vllm.url, *flags, "--json")
    listed = json.loads(run.stdout)["findings"]
    return {(each["check"], each["verdict"]): each for each in listed if each["subject"] in vllm.url}


def changed(part: str, **values: Any) -> dict[str, Any]:
    told = config()
    told["vllm_config"][part].update(values)
    return told


def test_a_stock_server_is_called_vllm_and_what_gets_refitd_inside_is_said(job: list[str]) -> None:
    with scripted_vllm() as vllm:
        said = found(job, vllm)
    assert said["engines", "ok"]["text"].startswith("vLLM 0.32.0, cuda bfloat16")
    for word in ("vLLM's own", "--worker-extension-cls refitd_vllm.Worker", "REFITD_VLLM_ROOT"):
        assert word in said["plugin", "ok"]["text"]
    assert not any(check == "updates" for check, _ in said)


@pytest.mark.parametrize(
    ("state", "fix"),
    [
        ({"absent": WEIGHTS}, "start vLLM with VLLM_SERVER_DEV_MODE=1"),
        ({"absent": LABELS, "version": "0.20.0"}, "install vLLM 0.27.1 or newer"),
    ],
)
def test_a_server_that_cannot_be_driven_is_told_as_vllm_though_no_kind_was_named(
    job: list[str], state: dict[str, Any], fix: str
) -> None:
    with scripted_vllm(**state) as vllm:
        said = found(job, vllm)["engines", "failed"]
    assert f"is vLLM {vllm.version}" in said["text"]
    assert "SGLang" not in said["text"] + said["fix"]
    assert fix in said["fix"]


@pytest.mark.parametrize(
    ("told", "verdict", "what", "fix"),
    [
        (config(tensor_parallel_size=2), "failed", "2 processes", "--worker-extension-cls refitd_vllm.Worker"),
        (config(pipeline_parallel_size=2), "failed", "2 pipeline stages", "--pipeline-parallel-size"),
        (config(data_parallel_size=2), "failed", "2 data-parallel replicas", "--data-parallel-size"),
        (config(enable_eplb=True), "failed", "--enable-eplb", "without --enable-eplb"),
        (changed("model_config", enable_sleep_mode=True), "warning", "--enable-sleep-mode", "/wake_up"),
    ],
)
def test_what_is_in_the_way_of_updates_is_named_with_the_flag_that_ends_it(
    job: list[str], told: dict[str, Any], verdict: str, what: str, fix: str
) -> None:
    with scripted_vllm(told=told) as vllm:
        said = found(job, vllm)["updates", verdict]
    assert (what in said["text"], fix in said["fix"]) == (True, True), said


@pytest.mark.parametrize(
    ("lora", "absent", "verdict", "fix"),
    [
        (None, frozenset[str](), ("engines", "failed"), "--enable-lora"),
        ({"max_loras": 1}, {"/v1/load_lora_adapter"}, ("engines", "failed"), "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"max_loras": 1}, frozenset[str](), ("updates", "warning"), "--max-cpu-loras 3"),
    ],
)
def test_what_a_server_lacks_for_adapters_is_named(
    job: list[str], lora: Any, absent: frozenset[str], verdict: tuple[str, str], fix: str
) -> None:
    told = config()
    told["vllm_config"]["lora_config"] = lora
    with scripted_vllm(told=told, absent=absent) as vllm:
        said = found(job, vllm, "--lora", "actor")[verdict]
    assert fix in said["fix"]
