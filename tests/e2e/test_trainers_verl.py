"""The released verl updates its rollout servers through refitd: its own manager, workers and adapters."""

from pathlib import Path

import pytest
import yaml

from support.trainers import EXAMPLES, PROGRAMS, lines_of, report_of, run_there

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(600)]


def test_verl_s_manager_updates_its_servers_and_waits_until_they_serve_each_step(tmp_path: Path) -> None:
    steps = lines_of(run_there(EXAMPLES / "verl/update.py", tmp_path))
    assert [step["step"] for step in steps] == [0, 1, 2]
    for step in steps:
        first, second = step["servers"]
        assert first == second
        assert (first["serves"], first["global_steps"]) == (str(step["step"]), step["step"])
    assert len({str(step["servers"][0]["tokens"]) for step in steps}) > 1
    assert all(step["refitd/bytes"] > 0 for step in steps)  # in verl's own metrics
    assert max(path.name for path in (tmp_path / "root/grpo/trial").glob("v*")) == "v000002"


def test_verl_waits_for_a_slow_server_and_a_rank_that_dies_leaves_no_version(models: Path, tmp_path: Path) -> None:
    report = report_of(run_there(PROGRAMS / "verl_failures.py", EXAMPLES / "verl", tmp_path, models / "model_a"))
    assert report["slow"] == {"error": None, "serve": ["0", "0"], "versions": ["v000000"]}
    assert "WaitTimeoutError" in report["late"]["error"]
    assert "grpo.trial.verl.sglang_server_" in report["late"]["error"]
    assert (report["again"]["error"], report["again"]["serve"]) == (None, ["1", "1"])
    assert "ActorDiedError" in report["dead"]["error"] or "RankLostError" in report["dead"]["error"]
    assert report["dead"]["serve"] == ["1", "1"]
    assert "v000002" not in report["dead"]["versions"]


def test_verl_s_adapters_for_sglang_and_vllm_write_nothing_and_note_the_step() -> None:
    report = report_of(run_there(PROGRAMS / "verl_adapters.py"))
    assert report == {"sglang": ["set_global_steps(7,)"], "vllm": ["set_global_steps(7,)"]}


def test_verl_takes_the_settings_of_the_command_for_gpus() -> None:
    places = {"ROOT": "/mnt/weights", "MODEL": "/models/m", "DATA": "/data", "ROLLOUT": "vllm"}
    said = yaml.safe_load(run_there(EXAMPLES / "verl/grpo.sh", "--cfg", "job", **places))["actor_rollout_ref"]
    engine = said["rollout"]["checkpoint_engine"]
    assert (engine["backend"], engine["custom_backend_module"]) == ("refitd", "refitd_client.trainers.verl")
    assert engine["engine_kwargs"]["refitd"]["root"] == "/mnt/weights"
    assert (said["rollout"]["free_cache_engine"], said["rollout"]["enable_sleep_mode"]) == (False, False)
    assert (said["rollout"]["name"], said["hybrid_engine"]) == ("vllm", False)
