"""What a server says of itself, and the sentence for each thing that is no SGLang server."""

import json
from typing import Any

import pytest

from refitd.engine.http import CallFailure, NoReply, Reply
from refitd.engine.sglang.info import ModelInfo, SglangServerInfo, read_model_info, read_server_info

URL = "http://e:30000"
MODEL_INFO = {"model_path": "/root/v7", "tokenizer_path": "/m", "is_generation": True, "weight_version": "7"}
SERVER_INFO = {
    "version": "0.5.23", "model_path": "/models/base", "dtype": "auto", "quantization": None,
    "tp_size": 2, "pp_size": 1, "dp_size": 1, "ep_size": 1, "internal_states": [{}],
}  # fmt: skip


def ok(data: dict[str, Any] | None, status: int = 200) -> Reply:
    return Reply(status=status, body=json.dumps(data).encode())


def test_what_is_served_is_read_whatever_else_the_server_tells() -> None:
    assert read_model_info(ok(MODEL_INFO), URL) == ModelInfo(model_path="/root/v7", weight_version="7")


def test_a_server_without_labels_is_read_too() -> None:
    assert read_model_info(ok({"model_path": "/m"}), URL) == ModelInfo(model_path="/m", weight_version=None)


def test_how_it_was_started_is_read() -> None:
    info = read_server_info(ok(SERVER_INFO), URL)
    assert isinstance(info, SglangServerInfo)
    assert (info.version, info.model_path, info.release.pause_mode("auto")) == ("0.5.23", "/models/base", "retract")


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"model_path": "/root/v7"}, True),
        ({"internal_states": []}, True),
        ({"version": "0.5.22"}, False),
        ({"dtype": "float16"}, False),
        ({"quantization": "fp8"}, False),
        ({"tp_size": 4}, False),
        ({"pp_size": 2}, False),
        ({"dp_size": 2}, False),
        ({"attn_dp_size": 2}, False),
        ({"ep_size": 2}, False),
        ({"device": "cuda"}, False),
        ({"enable_dp_attention": True}, False),
        ({"enable_dp_lm_head": True}, False),
        ({"moe_dense_tp_size": 1}, False),
        ({"moe_runner_backend": "triton"}, False),
        ({"speculative_algorithm": "EAGLE"}, False),
    ],
)
def test_fingerprints_are_compared_only_between_servers_that_hold_tensors_alike(
    change: dict[str, Any], same: bool
) -> None:
    one, other = read_server_info(ok(SERVER_INFO), URL), read_server_info(ok(SERVER_INFO | change), URL)
    assert isinstance(one, SglangServerInfo)
    assert isinstance(other, SglangServerInfo)
    assert (one.configuration == other.configuration) is same


@pytest.mark.parametrize(
    ("told", "groups", "processes"),
    [
        ({"dp_size": 2}, 2, 4),
        ({"dp_size": 2, "enable_dp_attention": True}, 2, 2),  # before 0.5.23
        ({"dp_size": 1, "attn_dp_size": 2, "enable_dp_attention": True}, 2, 2),  # 0.5.23, also for the older options
        ({"dp_size": 1, "attn_dp_size": 2}, 2, 2),  # once SGLang has dropped the older option
    ],
)
def test_each_group_of_dp_attention_answers_an_update_however_the_release_counts_groups(
    told: dict[str, Any], groups: int, processes: int
) -> None:
    info = read_server_info(ok(SERVER_INFO | told), URL)
    assert isinstance(info, SglangServerInfo)
    assert (info.launch.dp_ranks, info.launch.seats) == (groups, processes)


@pytest.mark.parametrize("read", [read_model_info, read_server_info])
@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (NoReply(CallFailure.NEVER_SENT, f"{URL} cannot be reached: refused"), "cannot be reached: refused"),
        (ok({"error": "Unauthorized"}, 401), "--engine-key-file"),
        (ok({}, 403), "--engine-key-file"),
        (ok({"detail": "Not Found"}, 404), "answered 404: Not Found"),
        (ok({"detail": "loading"}, 503), "answered 503: loading"),
        (Reply(status=200, body=b"<html>"), "no SGLang server"),
        (ok({}), "no SGLang server"),
        (ok({"model_path": 7, "version": 7}), "no SGLang server"),
    ],
)
def test_what_is_no_answer_of_sglang_becomes_a_sentence(read: Any, reply: Reply | NoReply, says: str) -> None:
    sentence = read(reply, URL)
    assert isinstance(sentence, str)
    assert URL in sentence
    assert says in sentence


def test_a_server_whose_workers_have_labels_of_their_own_is_refused_with_the_flag_to_set() -> None:
    sentence = read_server_info(ok(SERVER_INFO | {"tokenizer_worker_num": 2}), URL)
    assert isinstance(sentence, str)
    assert "--tokenizer-worker-num 1" in sentence


def test_a_release_or_a_label_that_fills_a_page_is_no_answer() -> None:
    """Found by the fuzzer: the release stands in the sentence that says which one is too old."""
    read = read_server_info(ok(SERVER_INFO | {"version": "0.5.2" + "[" * 5000}), URL)
    named = read_model_info(ok({"model_path": "/base", "weight_version": "v" * 5000}), URL)
    for refusal in (read, named):
        assert isinstance(refusal, str)
        assert len(refusal) < 500
