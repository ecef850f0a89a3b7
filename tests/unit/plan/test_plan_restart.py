"""What the plan says of a restart where not each version gets files."""

import pytest

from refitd_client import PlanRefusedError, plan
from refitd_plan.plan import Plan

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151_936,
}


def made(durable: str, **more: object) -> Plan:
    return plan("sglang:d1|fsdp:d1", gpus_per_node=1, gpu_memory=80.0, plugin=True, durable=durable, **more)  # type: ignore[arg-type]


def test_it_says_how_far_an_engine_goes_back_and_what_it_loads() -> None:
    assert made("every=10", model=MODEL).restart == (
        "durable=every=10: an engine that restarts, and a rollback, go back by at most 9 versions, to the newest with "
        "files, and load 3.09 GB"
    )
    assert "by at most 1 version, to the newest with files, and load a whole version" in str(made("every=2").restart)
    assert "an engine stays on its start-up weights" in str(made("never").restart)


@pytest.mark.parametrize("durable", ["always", "every=1"])
def test_it_says_nothing_where_each_version_has_files(durable: str) -> None:
    assert made(durable).restart is None


def test_a_way_by_files_is_not_changed_by_it() -> None:
    found = plan("sglang:d1|fsdp:d1", gpus_per_node=1, plugin=False, durable="never")
    assert found.restart == "durable=never changes nothing: over disk+delta each version has files"


def test_a_policy_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(PlanRefusedError, match=r"--durable is 'often': it is 'always', 'never', or 'every=10'"):
        made("often")
