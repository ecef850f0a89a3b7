"""A vLLM that was started with refitd's extension class alone: the service has the extension open its channel."""

import json
from collections.abc import Callable
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from refitd.engine.plugin import Leads
from refitd.engine.port import Outcome, Reached, Target
from refitd.engine.transaction import ServerEngine
from refitd_client.contract.plugin import Owner
from refitd_plugin.channel import Channel
from support.engines import vllm_engine
from support.scripted_server import Step, answer, hang_up
from support.scripted_vllm import SHAPE, ScriptedVllm, config, error, scripted_vllm

OURS = config(worker_extension_cls="refitd_vllm.Worker")
TWO = config(worker_extension_cls="refitd_vllm.Worker", tensor_parallel_size=2)
LEADS = Leads(owner=Owner(service="one", root="/root", host="here", pid=1))
TARGET = Target(path="/root/v7", label="7")
HELLO: dict[str, Any] = {
    "ok": True, "protocol": 1, "plugin": "0.1.0", "state": "on", "host": "a", "port": 0, "rank": 0, "ranks": 1,
    "dp_rank": None,
}  # fmt: skip


def speaking_to(vllm: ScriptedVllm, root: Path, **options: Any) -> aclosing[ServerEngine]:
    return aclosing(vllm_engine(vllm.url, **({"root": root, "leads": LEADS} | options)))


def opens(vllm: ScriptedVllm) -> Step:
    """Answers as a rank whose channel is open now, for the server that the call names and in the root that it names."""

    def step(handler: BaseHTTPRequestHandler) -> None:
        asked = json.loads(vllm.server.seen[-1].body)
        assert set(asked) == {"method", "kwargs"}, "a timeout that expires kills the engine"
        channel = Channel(Path(asked["kwargs"]["root"]), 0, hello(int(asked["kwargs"]["instance"])))
        channel.open()
        assert channel.is_open(10.0)
        answer(200, {"results": [{"ok": True, "reason": ""}]})(handler)

    return step


def hello(seed: int) -> Callable[..., dict[str, Any]]:
    return lambda _: HELLO | {"seed": seed}


async def test_it_is_opened_at_the_first_probe_of_each_process_of_the_server(root: Path) -> None:
    with scripted_vllm(told=OURS) as vllm:
        async with speaking_to(vllm, root) as engine:
            vllm.on("refitd_open", opens(vllm))
            seen = [await engine.probe() for _ in range(2)]
            assert vllm.changes == ["refitd_open"]
            vllm.told = config(worker_extension_cls="refitd_vllm.Worker")
            vllm.told["vllm_config"]["instance_id"] = "17"
            vllm.on("/weight_info", hang_up)
            vllm.on("refitd_open", opens(vllm))
            await engine.probe()
            seen.append(await engine.probe())
    assert [isinstance(each, Reached) and each.plugin for each in seen] == ["0.1.0"] * 3
    assert vllm.changes == ["refitd_open"] * 2


async def test_the_root_that_it_names_is_that_which_the_server_sees(root: Path, tmp_path: Path) -> None:
    (tmp_path / "there").symlink_to(root)
    with scripted_vllm(told=OURS) as vllm:
        async with speaking_to(vllm, root, root_there=str(tmp_path / "there")) as engine:
            vllm.on("refitd_open", opens(vllm))
            seen = await engine.probe()
    assert isinstance(seen, Reached)
    assert seen.plugin == "0.1.0"
    (asked,) = [json.loads(each.body)["kwargs"] for each in vllm.server.seen if b"refitd_open" in each.body]
    assert asked["root"] == str(tmp_path / "there")


REFUSES = answer(200, {"results": [{"ok": False, "reason": "this server sees no root of refitd at /root"}]})
FAULTS = [
    (REFUSES, "rank 0 says: this server sees no root"),
    (answer(200, {"results": []}), "did not answer as the extension"),
    (answer(200, {"results": [["generate"]]}), "did not answer as the extension"),
    (error(500, SHAPE), "did not answer as the extension"),
    (answer(404, {"detail": "Not Found"}), "VLLM_SERVER_DEV_MODE=1"),
    (hang_up, "broke off"),
]


@pytest.mark.parametrize(("reply", "reason"), FAULTS)
async def test_one_that_is_not_opened_is_said_and_updated_as_stock(root: Path, reply: Step, reason: str) -> None:
    with scripted_vllm(told=OURS) as vllm:
        async with speaking_to(vllm, root) as engine:
            vllm.on("refitd_open", reply)
            seen = [await engine.probe() for _ in range(2)]
            done = await engine.refit(TARGET, lambda _: None)
    for each in seen:
        assert isinstance(each, Reached)
        assert each.plugin is None
        assert reason in (each.stock_reason or "")
        assert "--worker-extension-cls refitd_vllm.Worker" in (each.stock_reason or "")
    assert done.outcome is Outcome.ACK
    assert vllm.changes.count("refitd_open") == 1


async def test_several_ranks_of_which_one_has_none_are_refused_as_stock_ones_are(root: Path) -> None:
    said = [{"ok": True, "reason": ""}, {"ok": False, "reason": "it could not make its socket"}]
    with scripted_vllm(told=TWO, ranks=2) as vllm:
        async with speaking_to(vllm, root) as engine:
            vllm.on("refitd_open", answer(200, {"results": said}))
            seen = await engine.probe()
            done = await engine.refit(TARGET, lambda _: None)
    assert isinstance(seen, Reached)
    assert "rank 1 says: it could not make its socket" in (seen.stock_reason or "")
    assert (done.outcome, done.resumed) == (Outcome.NACK, True)


@pytest.mark.parametrize("reply", [error(500, SHAPE), answer(200, {"results": [None, None]})])
async def test_several_ranks_that_answer_another_call_are_told_nothing_more(root: Path, reply: Step) -> None:
    with scripted_vllm(told=TWO, ranks=2) as vllm:
        async with speaking_to(vllm, root) as engine:
            vllm.on("refitd_open", reply)
            await engine.probe()
            done = await engine.refit(TARGET, lambda _: None)
    assert done.outcome is Outcome.TAINTED
    assert "restart it" in (done.reason or "")
    assert vllm.loads == []


async def test_a_command_that_only_looks_opens_none_and_says_who_does(root: Path) -> None:
    with scripted_vllm(told=OURS) as vllm:
        async with speaking_to(vllm, root, leads=None) as engine:
            seen = await engine.probe()
    assert isinstance(seen, Reached)
    assert "the service has its channel opened" in (seen.stock_reason or "")
    assert vllm.changes == []


@pytest.mark.parametrize("told", [config(), config(worker_extension_cls="theirs.Worker")])
async def test_a_server_that_names_no_class_of_refitd_is_not_asked(root: Path, told: dict[str, Any]) -> None:
    with scripted_vllm(told=told) as vllm:
        async with speaking_to(vllm, root) as engine:
            await engine.probe()
    assert vllm.changes == []
