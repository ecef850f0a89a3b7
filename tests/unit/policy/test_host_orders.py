"""A host as its hub sees it: which orders it obeys, how far it is with one, and what it proves."""

from dataclasses import replace
from typing import Any

import pytest

from refitd.engine.fingerprints import ANSWERED, NOT_COMPARED, proof_by, what_was_compared
from refitd.policy.hosts import (
    engines_of_host,
    is_late,
    order_state,
    overtaken,
    proof_of_host,
    refusal_of,
    what_it_does,
    why_it_waits,
)
from refitd.state.records import AttemptRecord, EngineRecord, HostLead, RolloutRecord
from refitd_client.contract.follow import HostOrder
from refitd_client.contract.hosts import MAX_HOST_ENGINES, HostEngines, OrderState
from refitd_client.contract.states import EngineState, VersionState
from support.records import engine, version

V1, V2 = version(1).id, version(2).id
LED = HostLead(leads=True, leader="hub", fence=5, told_by="the refitd of new")


def order(**fields: object) -> HostOrder:
    return HostOrder(**({"run": "run", "version": V2, "leader": "hub", "told_by": "the refitd of old"} | fields))  # pyright: ignore[reportArgumentType]


def test_an_order_of_an_older_lead_is_refused_by_name_and_one_of_the_same_or_a_newer_lead_obeyed() -> None:
    why = refusal_of(order(fence=4), LED, "hub", "http://hub")
    assert why is not None
    assert "the refitd of old, by its epoch 4; the refitd of new leads with epoch 5" in why
    assert refusal_of(order(fence=4, leader=""), LED, "hub", "http://hub") is not None
    assert refusal_of(order(fence=5), LED, "hub", "http://hub") is None
    assert refusal_of(order(fence=6), LED, "", "http://hub") is None


def test_an_order_of_another_service_than_the_one_that_is_followed_is_refused() -> None:
    why = refusal_of(order(leader="stranger", fence=9), LED, "hub", "http://hub")
    assert why is not None
    assert "this host follows http://hub" in why


def test_an_order_that_was_made_before_another_one_was_obeyed_is_late_and_the_sentence_says_so() -> None:
    known = HostLead(leads=True, leader="hub", orders=7)
    why = overtaken(order(after=6), known, is_desired=False)
    assert why is not None
    assert f"the order to serve {V2} comes from the refitd of old, and another order came in between" in why
    assert overtaken(order(after=8), known, is_desired=False) is not None  # the host has lost its journal since
    assert overtaken(order(after=7), known, is_desired=False) is None


def test_a_late_order_of_what_is_desired_already_is_no_fault_unless_it_is_to_be_loaded_again() -> None:
    known = HostLead(leads=True, leader="hub", orders=7)
    assert overtaken(order(after=6), known, is_desired=True) is None
    assert overtaken(order(after=6, again=True), known, is_desired=True) is not None


def test_an_order_of_a_hub_that_knows_of_no_number_is_never_late() -> None:
    assert not is_late(order(), HostLead(leads=True, orders=7))


def state_of(*engines: EngineRecord, ordered: str | None = V2, refused: str | None = None) -> tuple[OrderState, str]:
    state, why = order_state(V2, ordered, version(2), engines, quorum=1, refused=refused)
    return state, why or ""


def failed(**fields: object) -> EngineRecord:
    """An engine that serves step 1 and has refused step 2."""
    last = AttemptRecord(id="1", engine="a", version=V2, started_at="", outcome="NACK")
    return engine(state=EngineState.NACKED, serving=V1, last_attempt=last, reason="no room", failures=1, **fields)


def test_an_order_comes_until_all_engines_serve_it() -> None:
    assert order_state(None, V1, None, [], quorum=1) == (OrderState.NONE, None)
    assert state_of(engine(serving=V1), ordered=V1)[0] is OrderState.COMES
    assert state_of(engine(serving=V2), engine("b", serving=V1, state=EngineState.UPDATING))[0] is OrderState.COMES
    assert state_of(engine(serving=V2), engine("b", serving=V2)) == (OrderState.SERVED, "")


def test_an_order_that_waits_for_a_pause_of_the_host_says_so() -> None:
    held = engine(serving=V1)
    rollout = RolloutRecord(number=1, run="run", version=V1, cause="", started_at="", paused_since="2026-01-01")
    paused = why_it_waits(rollout)

    def why(ordered: str, here: VersionState = VersionState.SEALED) -> tuple[OrderState, str | None]:
        return order_state(V2, ordered, version(2, state=here), [held], quorum=1, paused=paused)

    waits = (OrderState.COMES, "rollouts of run are paused on that host since 2026-01-01: refitd resume run there")
    assert why(V1) == why(V2) == waits
    assert why(V1, VersionState.VALIDATING) == (OrderState.COMES, f"{V2} is pulled and checked there")
    served = order_state(V2, V2, version(2), [engine(serving=V2)], quorum=1, paused=paused)
    back = order_state(V1, V1, version(1), [engine(serving=V2), engine("b", serving=V1)], quorum=2, paused=paused)
    assert back == (OrderState.COMES, "its engines are being loaded"), "a pause holds none where it goes back"
    assert served == (OrderState.SERVED, None)
    assert why_it_waits(None) is why_it_waits(replace(rollout, paused_since=None)) is None


def test_an_order_is_refused_in_the_words_of_what_refuses_it() -> None:
    rejected = version(2, state=VersionState.REJECTED, reason="a NaN")
    assert order_state(V2, V1, rejected, [], quorum=1) == (OrderState.REFUSED, f"{V2} was rejected there: a NaN")
    assert state_of(ordered=V1, refused="the disk is full") == (OrderState.REFUSED, "the disk is full")
    assert state_of(failed(), engine("b", serving=V2)) == (OrderState.REFUSED, "engine a is NACKED: no room")
    assert state_of(failed(), engine("b", state=EngineState.UPDATING))[0] is OrderState.COMES


def test_unknown_contents_and_hosts_without_an_engine_that_answers_are_told_apart_from_a_refusal() -> None:
    lost = engine(state=EngineState.QUARANTINED, known=False, reason="torn")
    assert state_of(lost) == (OrderState.DOUBTFUL, "engine a is QUARANTINED: torn")
    assert state_of(engine(state=EngineState.UNREACHABLE))[0] is OrderState.AWAY
    assert state_of()[0] is OrderState.AWAY


def test_hosts_with_engines_of_one_configuration_prove_the_same_however_many_they_have() -> None:
    prints = {(V1, "c"): "xxh3:1", (V1, "d"): "xxh3:2", (V1, "e"): f"{ANSWERED}-0.51"}

    def proved(*configurations: str) -> tuple[str, str | None]:
        engines = [engine(str(at), serving=V1, configuration=each) for at, each in enumerate(configurations)]
        return proof_of_host(V1, engines, lambda v, c: prints.get((v, c)))

    assert proved("c", "d") == proved("d", "c", "c")
    assert proved("c")[1] != proved("d")[1]
    assert proved("e")[1] is None
    assert proof_of_host(None, [engine(configuration="c")], lambda *_: None) == (proved("c")[0], None)


def made_of(prints: dict[str, str | None]) -> str:
    """What the proof of a host with an engine of each configuration says that it is made of."""
    engines = [engine(each, serving=V1, configuration=each) for each in prints]
    proof = proof_of_host(V1, engines, lambda _, configuration: prints[configuration])[1]
    assert proof is not None
    return proof.rpartition(":")[0]


@pytest.mark.parametrize("other", [f"{ANSWERED}-:-2.0", None, "plugin:xxh3:2"])
def test_a_proof_for_which_an_engine_gave_no_digest_or_one_by_other_means_is_not_compared(other: str | None) -> None:
    """As a vLLM with the plugin: where a delta was written into a copy, and its loader took it, it answers a prompt."""
    assert made_of({"c": "xxh3:1", "d": "vllm:xxh3:2"}) == made_of({"c": "xxh3:9", "d": "vllm:xxh3:8"})
    assert made_of({"c": "xxh3:1", "d": "vllm:xxh3:2"}) != made_of({"c": "xxh3:1", "d": other})


@pytest.mark.parametrize(
    ("prints", "proof"),
    [
        ({"c": "xxh3:1"}, "checksums of tensors, of the host's engines"),
        ({"c": "plugin:xxh3:1"}, "fingerprints of refitd's plugin, of the host's engines"),
        ({"c": "vllm:1+vllm:1", "d": None}, "digests of parameters, of the host's engines"),
        (
            {"c": "xxh3:1", "d": "plugin:xxh3:1"},
            "fingerprints of refitd's plugin and checksums of tensors, of the host's engines",
        ),
        ({"c": "host:xxh3.5f:1"}, "checksums of tensors, of the host's engines"),
        ({"c": "host:5f:1"}, "proofs, of the host's engines"),
    ],
)
def test_what_proves_a_host_is_said_by_what_proves_its_own_engines(prints: dict[str, str | None], proof: str) -> None:
    digest = f"{made_of(prints)}:0"
    assert proof_by(digest) == proof
    assert proof_by(digest, recorded=True) == f"{proof} ({NOT_COMPARED})"
    assert what_was_compared(proof) == "They were compared with those of another load of the version, and are equal."


def test_a_host_names_a_bounded_number_of_its_engines_those_first_that_need_a_look() -> None:
    engines = [engine(f"e{at:03}", serving=V1) for at in range(40)] + [engine("z", state=EngineState.TAINTED)]
    told = engines_of_host("host", engines)
    assert (told.count, len(told.engines), told.engines[0].id) == (41, MAX_HOST_ENGINES, "z")


def test_what_a_host_does_for_its_engines_is_said_while_it_does_it() -> None:
    def does(ordered: str | None = V2, size: int | None = 5_000_000_000, **said: Any) -> str | None:
        return what_it_does(HostEngines(follower="host", **said), ordered, lambda _: size)

    pulls = {"pulling": V2, "pulled_bytes": 3_100_000_000}
    assert does(**pulls) == does(ordered=None, **pulls) == f"pulls {V2} (3.1 GB of 5.0 GB)"
    assert does(size=None, **pulls) == f"pulls {V2} (3.1 GB)"
    assert does() == f"prepares {V2}: it is pulled and checked there"
    assert does(loading=V2) == f"loads {V2}"
    assert does(waits="it is paused", **pulls) == does(**pulls)
    assert does(waits="it is paused") == f"waits to load {V2}: it is paused"
    assert does(ordered=None, waits="it is paused") == "waits: it is paused"
    assert does(ordered=None) is None
    assert what_it_does(None, V2, lambda _: None) is None
