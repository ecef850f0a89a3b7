"""Rollouts of TRL from engines that fail: requests go on to those that serve, and no prompt is lost or doubled.

`test_examples.py` has the trainer and an engine. TRL is imported in a process of its own, where the folder `tests/vllm`
is not taken for vLLM.
"""

from pathlib import Path

import pytest

from support.scripts import script_ended

pytestmark = [pytest.mark.e2e, pytest.mark.thorough, pytest.mark.timeout(300)]

SCRIPT = """
import json, sys
from types import SimpleNamespace as Plain
import httpx, torch
from refitd_client.errors import RefitError
from refitd_client.trainers import trl_rollouts
from refitd_client.trainers.trl_rollouts import RefitRollouts

root, asked = sys.argv[1], []
trl_rollouts._ASK_PAUSE = 0.01
def answer(ids, kind="stop", label="4"):
    pairs = [[-0.5, ids[0], None], [None, 9, None]]
    return {"meta_info": {"finish_reason": {"type": kind}, "output_token_logprobs": pairs, "weight_version": label}}
def ready(handler, **more):
    more = {"engine_urls": ["http://one", "http://two"]} | more
    refit = RefitRollouts(root, "exp/trial", "http://127.0.0.1:9", **more)
    refit._http = httpx.Client(transport=httpx.MockTransport(handler))
    refit._published, refit._version_id = 4, "exp~trial~v000004"
    return refit
class Tokenizer:
    def __call__(self, text):
        return {"input_ids": [[int(word)] for word in text]}
settings = dict(max_completion_length=2, temperature=1.0, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0)
trainer = Plain(
    tools=[], state=Plain(global_step=4, is_world_process_zero=True), model=None, processing_class=Tokenizer(),
    args=Plain(**settings, generation_kwargs=None), eos_token_ids=[3],
)
def refused(refit, *arguments):
    try:
        refit(*arguments)
    except RefitError as error:
        return str(error)
    raise SystemExit("it was taken")
"""
FAILING = """
def handler(request):
    ids = json.loads(request.content)["input_ids"]
    asked.append((request.url.host, [one[0] for one in ids]))
    if len(asked) <= 2 and request.url.host == "one":
        raise httpx.ConnectError("gone")
    return httpx.Response(200, json=[answer(one, "abort" if len(asked) <= 2 and one == [2] else "stop") for one in ids])
got = ready(handler)(["1", "2", "3", "4", "5"], trainer)
assert got["prompt_ids"] == [[1], [2], [3], [4], [5]], got
assert [ids[0] for ids in got["completion_ids"]] == [1, 2, 3, 4, 5], got
assert got["logprobs"] == [[-0.5, None]] * 5
assert got["weight_version"] == ["4"] * 5
assert sorted(asked[:2]) == [("one", [1, 3, 5]), ("two", [2, 4])], asked
assert sorted(sum((prompts for _, prompts in asked[2:]), [])) == [1, 2, 3, 5], asked
"""
DEAD = """
def handler(request):
    ids = json.loads(request.content)["input_ids"]
    asked.append((request.url.host, [one[0] for one in ids]))
    if request.url.host == "one":
        raise httpx.ConnectError("gone")
    return httpx.Response(200, json=[answer(one) for one in ids])
got = ready(handler)(["1", "2", "3"], trainer)
assert [ids[0] for ids in got["completion_ids"]] == [1, 2, 3], got
assert sorted(asked[:2]) == [("one", [1, 3]), ("two", [2])] and asked[2:] == [("two", [1, 3])], asked
"""
RESTARTED = """
def handler(request):
    ids = json.loads(request.content)["input_ids"]
    asked.append((request.url.host, [one[0] for one in ids]))
    return httpx.Response(200, json=[answer(one, label="default" if request.url.host == "one" else "4") for one in ids])
got = ready(handler)(["1", "2", "3"], trainer)
assert got["weight_version"] == ["4"] * 3, got
assert asked[2:] == [("two", [1, 3])], asked
told = refused(ready(handler, engine_urls=["http://one"], timeout=0.05), ["1"], trainer)
assert "labelled default, and the version is 4" in told, told
"""
AWAY = """
def engine(host, state, version="exp~trial~v000004"):
    return Plain(url=f"http://{host}", state=state, version=version)
def handler(request):
    asked.append(request.url.host)
    return httpx.Response(200, json=[answer(one) for one in json.loads(request.content)["input_ids"]])
refit = ready(handler, engine_urls=None)
found = [engine("away", "UNREACHABLE"), engine("doubted", "TAINTED"), engine("new", "BEHIND", None)]
found += [engine("good", "IN_SYNC"), engine("older", "IN_SYNC", "exp~trial~v000003")]
refit._service = Plain(engines=lambda: Plain(items=found))
refit(["1", "2", "3"], trainer)
assert asked == ["good"], asked
"""
REFUSED = """
def bad(request):
    return httpx.Response(400, json={"error": {"message": "temperature must be finite"}})
assert "temperature must be finite" in refused(ready(bad), ["1"], trainer)
def gone(request):
    raise httpx.ConnectError("gone")
assert "2 of 2 completions" in refused(ready(gone, timeout=0.05), ["1", "2"], trainer)
refit = ready(bad)
refit._published = 3
assert "step 4 is not published" in refused(refit, ["1"], trainer)
trainer.tools = [print]
assert "no turns with tools" in refused(ready(bad), ["1"], trainer)
try:
    refit.on_train_begin(None, None, None, model=Plain(peft_config={}))
except RefitError as error:
    assert "peft wraps this one" in str(error)
else:
    raise SystemExit("an adapter was taken")
"""


OTHER_FORM = """
bodies = [b"<html>", b"[" * 5000, b"[]", b'[{"meta_info": {}}]', b"[" + b" " * 2**20 + b"]"]
trl_rollouts._ANSWER_BYTES = 2**20
for body in bodies:
    def handler(request):
        asked.append(request.url.host)
        if request.url.host == "one":
            return httpx.Response(200, content=body)
        return httpx.Response(200, json=[answer(one) for one in json.loads(request.content)["input_ids"]])
    got = ready(handler)(["1", "2"], trainer)
    assert [ids[0] for ids in got["completion_ids"]] == [1, 2], got
"""


BODIES = {
    "an-engine-that-answers-in-another-form-or-without-end-is-asked-no-more": OTHER_FORM,
    "what-fails-or-is-aborted-is-asked-for-again-and-nothing-else": FAILING,
    "what-an-engine-that-is-gone-does-not-answer-is-asked-of-another-at-once": DEAD,
    "completions-of-an-engine-that-has-come-back-on-other-weights-are-not-used": RESTARTED,
    "engines-that-are-away-or-in-doubt-are-not-asked": AWAY,
    "what-no-engine-answers-ends-the-training-with-the-reason": REFUSED,
}


@pytest.mark.parametrize("name", BODIES)
def test_rollouts_from_engines_that_fail(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + BODIES[name])
    status, said = script_ended(script, tmp_path / "root")
    assert status == 0, said
