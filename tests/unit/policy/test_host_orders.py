"""A host as its hub sees it: which orders it obeys, how far it is with one, and what it proves."""

from dataclasses import replace
from typing import Any

import pytest

from refitd.engine.fingerprints import ANSWERED, NOT_COMPARED, proof_by, what_was_compared
from refitd.state.records import AttemptRecord, EngineRecord, HostLead, UpdateRecord
from refitd_client.contract.follow import MAX_HOST_ENGINES, Following, HostEngines, HostReply, OrderState
from refitd_client.contract.states import EngineState, VersionState
from refitd_hosts.policy.hosts import (
    engines_of_host,
    is_other,
    not_known,
    order_state,
    proof_of_host,
    refusal_of,
    standing_on,
    what_it_does,
    why_it_stays,
    why_it_waits,
    why_not_served,
)
from support.records import engine, version

V1, V2 = version(1).id, version(2).id
LED = HostLead(leader="hub", heard={"hub": 5, "before": 7}, told_by="the refitd of new")


def reply(epoch: int, leader: str = "hub") -> HostReply:
    return HostReply(lease_seconds=30, leader=leader, epoch=epoch, told_by="the refitd of old")


def test_a_reply_of_an_older_lead_is_not_obeyed_by_name_and_one_of_the_same_or_a_newer_lead_is() -> None:
    why = refusal_of(reply(4), LED, "http://hub")
    assert why is not None
    assert "the refitd of old leads with epoch 4; the refitd of new has led with epoch 5 since" in why
    assert refusal_of(reply(5), LED, "http://hub") is refusal_of(reply(6), LED, "http://hub") is None


def test_a_reply_of_another_hub_that_this_host_follows_now_is_obeyed() -> None:
    assert refusal_of(reply(0, "another"), LED, "http://hub") is None


def test_a_hub_that_led_before_another_one_is_obeyed_by_no_epoch_below_its_own() -> None:
    assert refusal_of(reply(7, "before"), LED, "http://hub") is None
    why = refusal_of(reply(6, "before"), LED, "http://hub")
    assert why is not None
    assert "another service has led with epoch 7 since" in why


def why_not(wanted: str, *stands: str, knows: str | None = "") -> str:
    return why_not_served(wanted, stands, knows=knows) or ""


def test_a_host_goes_back_from_nothing_that_its_hub_does_not_know_and_says_what_has_it_go() -> None:
    assert why_not(V1, V2, knows=V1) == (
        f"wants {V1}, and does not know {V2}, as after a loss of what it knew: engines stay there; "
        f"after 'refitd rollback run --to {V1}' at the hub hosts obey it"
    )
    assert why_not(V1, V1, V2)
    assert not why_not(V1, V2, knows=V2)
    assert not why_not(V1, V2, knows=version(3).id)
    assert not why_not(V1, V2, knows=None), "a store has a pointer, which its owner sets back"
    assert not why_not(V2, V1)
    assert not why_not(V1, "other~v000009")
    assert not why_not(V1)


def test_a_host_takes_no_other_version_for_one_that_has_its_name() -> None:
    here = version(1, digest="d1")
    assert is_other(here, "other")
    assert is_other(replace(here, state=VersionState.RETIRED), "other"), "its files are there until it is deleted"
    assert not is_other(here, "d1")
    assert not is_other(here, None)
    assert not is_other(None, "other")
    assert not is_other(replace(here, state=VersionState.LOST), "other"), "it is pulled anew"


def test_what_has_the_name_on_a_host_goes_only_where_nothing_there_serves_reads_or_needs_it() -> None:
    one, delta, other = version(1), version(2, base=V1), version(3)
    going = standing_on(one, [one, delta, other])
    assert going == [one, delta], "with it goes what stands on it"
    assert why_it_stays(going, [engine(serving=other.id)], [other.id, ""]) is None
    reading = [engine(serving=V2), engine(serving=None, held=V1), engine(serving=None, unproven=(V2,))]
    for each in (*reading, engine(serving=other.id, beneath=V1)):
        assert "engine a serves run~v00000" in (why_it_stays(going, [each], []) or "")
    away = engine(serving=V1, state=EngineState.UNREACHABLE)
    assert why_it_stays(going, [away], []), "it may come back, and say by the name what it serves"
    assert why_it_stays(going, [], [V2]) == f"engines here are to serve {V2}"
    assert why_it_stays([one.having(pinned=True)], [], []) == f"{V1} is pinned here"


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
    update = UpdateRecord(number=1, run="run", version=V1, cause="", started_at="", paused_since="2026-01-01")
    paused = why_it_waits(update)

    def why(ordered: str, here: VersionState = VersionState.SEALED) -> tuple[OrderState, str | None]:
        return order_state(V2, ordered, version(2, state=here), [held], quorum=1, paused=paused)

    waits = (OrderState.COMES, "updates of run are paused on that host since 2026-01-01: refitd resume run there")
    assert why(V1) == why(V2) == waits
    assert why(V1, VersionState.VALIDATING) == (OrderState.COMES, f"{V2} is pulled and checked there")
    served = order_state(V2, V2, version(2), [engine(serving=V2)], quorum=1, paused=paused)
    back = order_state(V1, V1, version(1), [engine(serving=V2), engine("b", serving=V1)], quorum=2, paused=paused)
    assert back == (OrderState.COMES, "its engines are being loaded"), "a pause holds none where it goes back"
    assert served == (OrderState.SERVED, None)
    assert why_it_waits(None) is why_it_waits(replace(update, paused_since=None)) is None


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


def test_a_rollback_at_a_hub_lets_hosts_obey_it_also_where_they_have_obeyed_another_one_since() -> None:
    """An empty hub took its place, and then it was restored: its epoch is below what hosts have heard."""
    told = Following(
        follower="a", upstream="http://hub", upstreams=[], leader="new", fence=1, heard={"hub": 4, "new": 1}
    )
    assert not_known("run", told, None, ("hub", 3)) == ("", 4)
    assert not_known("run", told, None, ("hub", 4)) is None
    assert not_known("run", told, None, ("new", 0)) == ("", 1)
