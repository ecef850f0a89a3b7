"""`refitd plan`: the same plan for people and for machines, and errors that can be mended."""

import re
from pathlib import Path

import msgspec
import pytest

from refitd.cli.areal_config import read_areal
from refitd_plan.fit import KNOBS
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
    for word in ("disk+delta", "Duplicate GPU detected", "does not fit", "mem_fraction_static", "KV cache", "Assumed"):
        assert word in shown.stdout
    assert "publisher.publish(model, step=step, transport='delta')" in shown.stdout


def test_where_nothing_makes_it_fit_there_are_no_changes_to_speak_of(model: list[str]) -> None:
    assert "SGLang, with the changes" in refitd("plan", "sglang.d1p1t1+d1p1t1", *A40, *model).stdout
    shown = refitd("plan", "sglang:d1|fsdp:d1", "--gpus-per-node", "1", "--gpu-memory", "1", *model).stdout
    assert "No set of the changes" in shown
    assert "with the changes" not in shown


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


AREAL = """
allocation_mode: sglang.d1p1t1+d1p1t1
cluster: {n_nodes: 1, n_gpus_per_node: 1}
gconfig: {n_samples: 4, max_new_tokens: 512}
rollout: {max_concurrent_rollouts: 32}
train_dataset: {batch_size: 8, max_length: 512}
actor:
  path: PATH
  optimizer_dtype: bfloat16
  gradient_checkpointing: false
  mb_spec: {max_tokens_per_mb: 5120}
ref: {path: "${actor.path}"}
sglang: {mem_fraction_static: 0.8, context_length: 4096, attention_backend: flashinfer}
"""


def test_an_areal_configuration_says_all_of_a_job(tmp_path: Path, model: list[str]) -> None:
    """The plan is that of the same flags, and its patch has AReaL's own keys."""
    file = tmp_path / "grpo.yaml"
    file.write_text(AREAL.replace("PATH", model[1]))
    by_file = msgspec.json.decode(refitd("plan", "--areal", str(file), "--gpu-memory", "44.42", "--json").stdout)
    flags = ["--micro-batch-tokens", "5120", "--attention-backend", "flashinfer", "--nodes", "1"]
    by_flags = msgspec.json.decode(refitd("plan", "sglang.d1p1t1+d1p1t1", *A40, *flags, *model, "--json").stdout)
    for process, same in zip(by_file["memory"]["processes"], by_flags["memory"]["processes"], strict=True):
        same["parts"].pop("publish staging", None)  # AReaL hands whole folders over: nobody looks for what changed
        assert process["parts"] == same["parts"]
    assert by_file["areal"] == {"actor": {"weight_update_mode": "disk"}, "sglang": {"mem_fraction_static": 0.55}}
    changed = refitd("plan", "--areal", str(file), "--gpu-memory", "44.42", "--mem-fraction-static", "0.5", "--json")
    assert msgspec.json.decode(changed.stdout)["memory"]["fits"], "flags win"


def test_areal_s_keys_are_named_only_to_whom_has_its_configuration(tmp_path: Path, model: list[str]) -> None:
    """An allocation string is how any trainer's placement is said."""
    file = tmp_path / "grpo.yaml"
    file.write_text(AREAL.replace("PATH", model[1]))
    tiny = ["--gpu-memory", "1"]
    for fits in (["--gpu-memory", "44.42"], tiny):
        of_areal = refitd("plan", "--areal", str(file), *fits).stdout
        of_another = refitd("plan", "sglang.d1p1t1+d1p1t1", "--gpus-per-node", "1", *fits, *model).stdout
        assert ("AReaL's configuration\n  actor:\n" in of_areal, "AReaL's configuration" in of_another) == (True, False)
        assert ("actor.optimizer_dtype" in of_areal, "--optimizer adamw8bit" in of_areal) == (fits is tiny, False)
        assert ("--optimizer adamw8bit" in of_another, "actor." in of_another) == (fits is tiny, False)
    made = answer("plan", "--engine-gpus", "1", "--trainer-gpus", "1", "--gpus-per-node", "2")
    assert "areal" in made


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[", "is not YAML"),
        ("- 1", "no mapping"),
        ("actor: {mb_spec: {max_tokens_per_mb: many}}", "actor.mb_spec.max_tokens_per_mb"),
        ("actor: {gradient_checkpointing: 3}", "actor.gradient_checkpointing"),
        ("gconfig: {n_samples: '${gconfig.n_samples}'}", "refers to itself"),
        ("sglang: {mem_fraction_static: lots}", "sglang.mem_fraction_static"),
        ("actor: {use_lora: true, lora_rank: '32'}", "actor.lora_rank"),
        ("actor: {optimizer_dtype: int8}", "actor.optimizer_dtype"),
    ],
)
def test_a_bad_areal_configuration_is_named(tmp_path: Path, text: str, names: str) -> None:
    (tmp_path / "grpo.yaml").write_text(text)
    shown = refitd("plan", "sglang:d1+d1", "--gpus-per-node", "1", "--areal", str(tmp_path / "grpo.yaml"))
    assert shown.exit_code == 2
    assert names in shown.output


def test_an_areal_configuration_that_is_not_there_is_named(tmp_path: Path) -> None:
    shown = refitd("plan", "--areal", str(tmp_path / "none.yaml"))
    assert shown.exit_code == 2
    assert shown.stderr == f"--areal {tmp_path / 'none.yaml'} cannot be read: No such file or directory\n"


def test_a_section_that_is_nearly_one_is_asked_about(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("acter: {path: x}\nvalid_dataset: {}\nsaver: {}\nref: {}\n")
    (slip,) = [each for each in read_areal(tmp_path / "grpo.yaml").assumed if "meant" in each]
    assert slip == "grpo.yaml has acter, which says nothing here: is actor meant?"


def test_a_key_that_is_nearly_one_is_asked_about_and_areal_s_own_are_not(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text(
        "actor: {gradient_chekpointing: true, mb_spec: {max_tokens_per_mbs: 7, granularity: 1}}\n"
        "gconfig: {min_new_tokens: 3, max_tokens: 5, greedy: false}\nsglang: {mem_fraction_static: 0.5}\n"
    )
    assert [each for each in read_areal(tmp_path / "grpo.yaml").assumed if "meant" in each] == [
        "grpo.yaml has actor.gradient_chekpointing, which says nothing here: is gradient_checkpointing meant?",
        "grpo.yaml has actor.mb_spec.max_tokens_per_mbs, which says nothing here: is max_tokens_per_mb meant?",
    ]


def test_newer_areal_configurations_name_each_backend(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("rollout: {backend: 'sglang:d4'}\nactor: {backend: 'fsdp:d4'}\n")
    made = answer("plan", "--areal", str(tmp_path / "grpo.yaml"), "--gpus-per-node", "8")
    assert made["allocation"] == "sglang:d4+fsdp:d4"


@pytest.mark.parametrize(("part", "target"), [("actor", "rollout"), ("rollout", "actor")])
def test_a_colocated_areal_is_planned_on_the_same_gpus(part: str, target: str, tmp_path: Path) -> None:
    """AReaL refuses xccl there, and 'refitd areal' does not carry its turns through."""
    strategy = f"scheduling_strategy: {{type: colocation, target: {target}}}"
    lines = {"rollout": "backend: 'sglang:d4'", "actor": "backend: 'fsdp:d4'"}
    lines[part] += f", {strategy}"
    (tmp_path / "grpo.yaml").write_text("\n".join(f"{name}: {{{line}}}" for name, line in lines.items()))
    made = answer("plan", "--areal", str(tmp_path / "grpo.yaml"), "--gpus-per-node", "4")
    assert (made["allocation"], made["transport"]) == ("sglang:d4|fsdp:d4", "disk")
    assert made["areal"]["actor"]["weight_update_mode"] == "disk"
    assert made["areal"][part]["scheduling_strategy"] == {"type": "separation"}
    assert any(f"{part}.scheduling_strategy.type has to be separation" in text for text in made["advice"])
    assert any("colocation" in text for text in made["assumptions"])


def test_what_areal_s_file_does_not_say_is_what_areal_takes(tmp_path: Path) -> None:
    """Defaults of `cli_args.py` in 1.0.4; a parameter takes 16 bytes there, and not refitd's 6."""
    file = tmp_path / "grpo.yaml"
    file.write_text("actor: {use_lora: true}\nref: {path: x}\nsglang: {disable_cuda_graph: true}\n")
    read = read_areal(file)
    assert read.settings == {
        "areal": True,
        "mem_fraction_static": 0.9,
        "context_length": 32768,
        "attention_backend": "fa3",
        "samples": 1,
        "max_new_tokens": 16384,
        "batch_size": 1,
        "gradient_checkpointing": False,
        "concurrent_rollouts": 1,
        "micro_batch_tokens": 2**30,
        "precision": "mixed",
        "optimizer": "adamw",
        "lora_rank": 32,
        "cuda_graphs": False,
    }
    assert any("mem_fraction_static: AReaL takes 0.9" in text for text in read.assumed)
    assert any("has ref" in text and "--reference-model" in text for text in read.assumed)


def test_a_model_s_name_on_the_hub_is_no_plan_without_memory(tmp_path: Path, model: list[str]) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text("actor: {path: Qwen/Qwen2.5-0.5B}\n")
    shown = refitd("plan", "sglang:d1+d1", *A40, "--areal", str(file))
    assert shown.exit_code == 2
    assert "--model" in shown.output
    assert "Qwen/Qwen2.5-0.5B" in shown.output
    assert answer("plan", "sglang:d1+d1", "--gpus-per-node", "2", "--gpu-memory", "140", "--areal", str(file), *model)


def test_the_help_has_the_defaults() -> None:
    shown = " ".join(refitd("plan", "--help").stdout.split())
    for default in ("[bf16]", "[adamw]", "[10240]", "[flashinfer]", "[512]", "[auto]"):
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


def test_what_changes_the_learning_comes_last_and_says_so(model: list[str]) -> None:
    assert [knob.setting for knob in KNOBS][-2:] == ["batch_size", "max_new_tokens"]
    assert ["learns otherwise" in knob.costs for knob in KNOBS] == [False] * (len(KNOBS) - 2) + [True] * 2
    small = ["--gpus-per-node", "1", "--gpu-memory", "12", "--mem-fraction-static", "0.4", "--gradient-checkpointing"]
    rest = ["--context-length", "4096", "--micro-batch-tokens", "8192", "--batch-size", "64", "--samples", "8"]
    made = msgspec.json.decode(refitd("plan", "sglang.d1+d1", *small, *rest, *model, "--json").stdout)
    changed = [each["setting"] for each in made["memory"]["changes"]]
    assert "micro_batch_tokens" in changed
    assert "batch_size" not in changed


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


def test_flags_of_what_does_not_fit_are_not_called_changed(model: list[str]) -> None:
    tiny = ["--gpus-per-node", "1", "--gpu-memory", "2", "--context-length", "4096"]
    shown = refitd("plan", "sglang.d1p1t1+d1p1t1", *tiny, *model)
    assert shown.exit_code == 1
    assert "No set of the changes" in shown.stdout
    assert "with the changes" not in shown.stdout
    assert "adamw8bit" in shown.stdout
