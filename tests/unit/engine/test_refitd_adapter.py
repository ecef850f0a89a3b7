"""Another refitd behind the port: what becomes of an order, in the answers that a host gives."""

import json
from pathlib import Path
from typing import Any

import pytest

from refitd.engine.connect import connector
from refitd.engine.engines_file import EngineSpec
from refitd.engine.kind import EngineAccess
from refitd.engine.port import Outcome, Reached, Refit, Stage, Target, Unreached, VersionFiles
from refitd.engine.refitd.adapter import RefitdEngine
from refitd_client.contract.hosts import HostEngines
from refitd_client.contract.states import EngineState
from support.scripted_server import Server, Step, answer, problem, serve

V1, V2 = "run~v000001", "run~v000002"


def told(order: str, desired: str | None = V2, **fields: Any) -> Step:
    """An answer of a host that has one engine and served step 1 before."""
    known = {
        "follower": "host-1",
        "upstream": "http://hub",
        "upstreams": ["http://hub"],
        "desired": desired,
        "ordered": V1,
        "serves": V1,
        "process": "p",
        "order": order,
        "configuration": "refitd c",
        "proof": "host:c:1",
        "host": {"follower": "host-1", "states": {"IN_SYNC": 1}, "engines": []},
    }
    return answer(200, known | fields)


BEFORE = told("served", V1)
SERVED = told("served", ordered=V2, serves=V2, proof="host:c:2")

OVERTAKEN = problem(409, "order-overtaken", "another order came in between")


def target(**fields: Any) -> Target:
    files = VersionFiles(version=V2, path="run/v000002", digest="d", signature="s")
    return Target(path="/root/run/v000002", label="2", files=files, **fields)


async def refit(*steps: Step, load_timeout: float = 30, **fields: Any) -> tuple[Refit, Server]:
    with serve(*steps) as server:
        engine = RefitdEngine(server.url, root="/root", load_timeout=load_timeout)
        return await engine.refit(target(**fields), lambda _: None), server


def calls(server: Server) -> list[str]:
    return [f"{seen.method} {seen.path}" for seen in server.seen]


async def test_a_host_that_serves_what_was_ordered_is_proved_by_its_engines_fingerprints() -> None:
    ended, server = await refit(BEFORE, told("comes"), told("comes"), SERVED)
    assert (ended.outcome, ended.fingerprint, ended.resumed) == (Outcome.ACK, "host:c:2", True)
    assert calls(server)[1] == "PUT /v1/follow/desired"
    assert b'"version":"run~v000002"' in server.seen[1].body


async def test_while_it_pulls_its_engines_serve_on_and_what_the_host_says_meanwhile_is_heard() -> None:
    comes = told("comes", pulling=V2, pulled_bytes=7)
    stages: list[Stage] = []
    heard: list[HostEngines] = []
    with serve(BEFORE, comes, told("comes"), told("comes", ordered=V2), SERVED) as server:
        engine = RefitdEngine(server.url, root="/root")
        ended = await engine.refit(target(hears=heard.append), stages.append)
    assert stages == [Stage.PREPARE, Stage.LOAD, Stage.VERIFY]
    assert ended.timings.keys() == {"prepare", "load", "verify"}
    said = [(each.pulling, each.pulled_bytes, each.loading) for each in heard]
    assert list(dict.fromkeys(said)) == [(V2, 7, None), (None, 0, None), (None, 0, V2)]
    assert said[-1] == (None, 0, None), "it serves the version"


async def test_a_host_that_says_little_of_what_it_does_is_waited_for_all_the_same() -> None:
    heard: list[HostEngines] = []
    bare = told("comes", ordered=None, host=None)
    with serve(BEFORE, bare, bare, SERVED) as server:
        ended = await RefitdEngine(server.url, root="/root").refit(target(hears=heard.append), lambda _: None)
    assert ended.outcome is Outcome.ACK
    assert [each.states for each in heard] == [{EngineState.IN_SYNC: 1}] * len(heard) != []


async def test_the_run_that_is_ordered_is_the_version_s_also_where_its_name_has_parts() -> None:
    first, second = "exp~trial-7~v000001", "exp~trial-7~v000002"
    refused = told("refused", second, ordered=first, serves=first, order_reason="torn")
    with serve(told("served", first, ordered=first, serves=first), refused, told("served", first)) as server:
        files = VersionFiles(version=second, path="exp/trial-7/v000002", digest="d", signature="s")
        wanted = Target(path="/root/exp/trial-7/v000002", label="2", files=files)
        await RefitdEngine(server.url, root="/root", load_timeout=30).refit(wanted, lambda _: None)
        ordered = [json.loads(seen.body) for seen in server.seen if seen.method == "PUT"]
    assert [(each["run"], each["version"]) for each in ordered] == [("exp/trial-7", second), ("exp/trial-7", first)]


@pytest.mark.parametrize("fields", [{"fingerprint": "host:c:9"}, {"not_fingerprint": "host:c:2"}])
async def test_a_host_whose_engines_have_other_fingerprints_is_not_believed_and_is_loaded_again(
    fields: dict[str, str],
) -> None:
    with serve(BEFORE, SERVED, BEFORE, SERVED) as server:
        engine = RefitdEngine(server.url, root="/root", load_timeout=30)
        assert (await engine.refit(target(**fields), lambda _: None)).outcome is Outcome.TAINTED
        await engine.refit(target(repairs=True), lambda _: None)
        assert [b'"again":true' in seen.body for seen in server.seen if seen.method == "PUT"] == [False, True]


async def test_fingerprints_of_hosts_with_other_configurations_are_not_compared() -> None:
    ended, _ = await refit(BEFORE, SERVED, fingerprint="host:d:9")
    assert ended.outcome is Outcome.ACK


async def test_a_host_that_refuses_is_ordered_back_and_its_sentence_is_the_reason() -> None:
    ended, server = await refit(BEFORE, told("refused", order_reason="the disk is full"), told("served", V1))
    assert (ended.outcome, ended.reason) == (Outcome.NACK, "host-1: the disk is full")
    assert b'"version":"run~v000001"' in server.seen[2].body


async def test_a_host_that_does_not_get_back_to_what_it_served_is_tainted() -> None:
    back = told("doubtful", V1, order_reason="engine a is QUARANTINED")
    ended, _ = await refit(BEFORE, told("refused", order_reason="torn"), back)
    assert ended.outcome is Outcome.TAINTED
    assert "engine a is QUARANTINED" in (ended.reason or "")


async def test_a_host_that_makes_no_progress_is_ordered_back_in_the_end() -> None:
    ended, _ = await refit(BEFORE, told("comes", order_reason="it is pulled"), told("served", V1), load_timeout=0)
    assert ended.outcome is Outcome.NACK
    assert "made no progress" in (ended.reason or "")


WHY = "rollouts are paused there"
PAUSED = {"follower": "host-1", "states": {"IN_SYNC": 1}, "engines": [], "waits": WHY}


async def test_a_host_that_its_operator_has_paused_is_ordered_back_at_once_and_that_is_no_refusal() -> None:
    pulls, held = (told("comes", order_reason=why, host=PAUSED) for why in ("it is pulled", WHY))
    ended, server = await refit(BEFORE, pulls, held, BEFORE)
    assert (ended.outcome, ended.waits, ended.resumed) == (Outcome.NACK, True, True)
    assert ended.reason == f"host-1 does not go to {V2} now: {WHY}"
    assert b'"version":"run~v000001"' in server.seen[3].body, "it was waited for while it pulled"
    ended, _ = await refit(BEFORE, told("refused", order_reason="torn", host=PAUSED), BEFORE)
    assert (ended.outcome, ended.waits) == (Outcome.NACK, False)


async def test_a_host_that_was_paused_when_some_of_its_engines_were_there_is_waited_for() -> None:
    there = {"id": "a", "state": "IN_SYNC", "version": V2}
    held = told("comes", ordered=V2, order_reason=WHY, host=PAUSED | {"engines": [there]})
    ended, _ = await refit(BEFORE, held, SERVED)
    assert ended.outcome is Outcome.ACK


async def test_a_host_whose_contents_are_unknown_is_tainted_and_one_without_engines_that_answer_is_away() -> None:
    assert (await refit(BEFORE, told("doubtful", order_reason="lost")))[0].outcome is Outcome.TAINTED
    assert (await refit(BEFORE, told("away", order_reason="gone")))[0].outcome is Outcome.UNREACHABLE


async def test_a_host_that_is_led_by_another_service_says_so() -> None:
    ended, _ = await refit(BEFORE, problem(409, "order-refused", "the refitd of x leads with epoch 7"))
    assert (ended.outcome, ended.led) == (Outcome.NACK, True)
    assert "the refitd of x leads with epoch 7" in (ended.reason or "")


def ordered_after(server: Server) -> list[Any]:
    """After how many orders each order was made."""
    return [json.loads(seen.body).get("after", "not said") for seen in server.seen if seen.method == "PUT"]


async def test_an_order_says_how_many_the_host_had_obeyed_and_the_one_that_takes_it_back_counts_it() -> None:
    refused = told("refused", order_reason="the disk is full", orders=5)
    _, server = await refit(told("served", V1, orders=4), refused, told("served", V1, orders=6))
    assert ordered_after(server) == [4, 5]


async def test_a_host_that_counts_no_orders_hears_of_no_number() -> None:
    _, server = await refit(BEFORE, SERVED)
    assert ordered_after(server) == ["not said"]


async def test_a_host_that_has_obeyed_another_order_meanwhile_is_looked_at_and_ordered_again() -> None:
    late = told("comes", "run~v000009", orders=5)
    ended, server = await refit(told("served", V1, orders=4), OVERTAKEN, late, SERVED)
    assert (ended.outcome, ended.led) == (Outcome.ACK, False)
    assert ordered_after(server) == [4, 5]


async def test_a_host_that_obeys_others_all_the_time_is_looked_at_later_and_that_is_nothing_against_the_version() -> (
    None
):
    ended, _ = await refit(told("served", V1, orders=4), OVERTAKEN, told("comes", V1, orders=5), OVERTAKEN)
    assert (ended.outcome, ended.led, ended.resumed) == (Outcome.UNREACHABLE, False, True)
    assert "another order came in between" in (ended.reason or "")


async def test_where_the_order_that_takes_it_back_was_overtaken_the_host_is_looked_at_again() -> None:
    refused = told("refused", order_reason="the disk is full", orders=5)
    ended, _ = await refit(told("served", V1, orders=4), refused, OVERTAKEN)
    assert (ended.outcome, ended.led) == (Outcome.UNREACHABLE, False)


@pytest.mark.parametrize("order", ["served", "refused", "doubtful", "none"])
async def test_what_a_host_says_of_another_order_is_nothing_against_the_version(order: str) -> None:
    ended, server = await refit(BEFORE, told("comes"), told(order, "run~v000009"))
    assert (ended.outcome, len(calls(server))) == (Outcome.UNREACHABLE, 3)
    assert "another order came in between, to serve run~v000009" in (ended.reason or "")


async def test_a_host_that_cannot_take_orders_now_is_unreachable_and_one_whose_token_is_wrong_refuses() -> None:
    assert (await refit(BEFORE, problem(503, "not-ready")))[0].outcome is Outcome.UNREACHABLE
    assert (await refit(BEFORE, problem(401, "unauthorized")))[0].outcome is Outcome.NACK
    assert (await refit(problem(503, "not-ready")))[0].outcome is Outcome.UNREACHABLE


async def test_a_version_without_a_manifest_is_not_ordered() -> None:
    with serve(BEFORE) as server:
        engine = RefitdEngine(server.url, root="/root")
        ended = await engine.refit(Target(path="/root/run/v000002", label="2"), lambda _: None)
        assert (ended.outcome, server.seen) == (Outcome.NACK, [])


async def test_a_probe_names_what_a_host_serves_as_the_rollout_does_and_shows_its_engines() -> None:
    with serve(BEFORE, told("away", order_reason="none of its engines answers"), problem(404, "not-found")) as server:
        engine = RefitdEngine(server.url, root="/root")
        seen = await engine.probe()
        assert isinstance(seen, Reached)
        assert (seen.model_path, seen.weight_version, seen.pulls) == ("/root/run/v000001", "1", True)
        assert (seen.serves, seen.desires) == (V1, V1)
        assert seen.host is not None
        assert seen.host.count == 1
        away, other = await engine.probe(), await engine.probe()
        assert isinstance(away, Unreached)
        assert away.reason == "the host host-1 answers, and none of its engines answers"
        assert isinstance(other, Unreached)
        assert "follows no upstream" in other.reason


async def test_a_host_whose_kind_is_not_said_is_found_out() -> None:
    access = EngineAccess(root=Path("/root"), load_timeout=1, pause_mode="auto")

    def step(handler: Any) -> None:
        (BEFORE if handler.path == "/v1/follow" else problem(404, "not-found"))(handler)

    with serve(step) as server:
        engine = connector(access, lambda *_: None, lambda _: False)(EngineSpec(url=server.url))
        seen = await engine.probe()
        await engine.aclose()
    assert isinstance(seen, Reached)
    assert seen.server == "refitd"


async def test_whether_orders_are_open_is_asked_without_one() -> None:
    with serve(problem(422, "bad-request"), problem(401, "unauthorized")) as server:
        engine = RefitdEngine(server.url, root="/root")
        assert (await engine.check_changes()).fault is None
        assert (await engine.check_changes()).fault is not None
        assert {seen.body for seen in server.seen} == {b"{}"}
