"""Who takes part in a transfer from several ranks, what each member does in it, and which transport such ranks take."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from refitd_client.contract.decoding import from_json
from refitd_client.contract.plugin import Receiver, Receivers
from refitd_client.errors import TransportRefusedError
from refitd_client.publish.attempt import PublishCall
from refitd_client.transport.choice import TrainerPlace, decide_route
from refitd_client.transport.schedule import HeldStrip, everything, schedule, strip
from refitd_client.transport.script import (
    BlockWord,
    Go,
    LaneWord,
    MemberScript,
    Ready,
    ShardTable,
    StandingLanes,
    StripSide,
    decide_lanes,
    script_of,
    sender_name,
    table_of_whole,
)
from refitd_client.ways import Transport

TABLE, ANOTHER = ShardTable(sizes=(1,), held=()), ShardTable(sizes=(2,), held=())
STANDING = StandingLanes(number=3, receivers=("a", "b"), table=TABLE, backend="gloo")
OTHER = {"sender 1": Ready(group=3)}
BOTH: dict[str, Ready | None] = {"a": Ready(group=3), "b": Ready(group=3)}


def test_lanes_stay_while_members_shards_and_needs_do() -> None:
    assert decide_lanes(OTHER, BOTH, STANDING, TABLE, "gloo", 3) == Go(group=3, receivers=("a", "b"))


@pytest.mark.parametrize(
    ("senders", "receivers", "standing", "table", "backend"),
    [
        ({"sender 1": Ready()}, BOTH, STANDING, TABLE, "gloo"),  # its process was begun again
        (OTHER, {**BOTH, "b": Ready()}, STANDING, TABLE, "gloo"),
        (OTHER, {**BOTH, "b": None}, STANDING, TABLE, "gloo"),
        (OTHER, {**BOTH, "c": Ready(group=3)}, STANDING, TABLE, "gloo"),
        (OTHER, BOTH, STANDING, ANOTHER, "gloo"),  # other shards, or other needs
        (OTHER, BOTH, None, TABLE, "gloo"),  # one has failed
        (OTHER, BOTH, STANDING, TABLE, "nccl"),  # blocks of another size, and tensors at another place
    ],
)
def test_lanes_are_made_anew_when_anything_is_another(
    senders: dict[str, Ready | None],
    receivers: dict[str, Ready | None],
    standing: StandingLanes | None,
    table: ShardTable,
    backend: Any,
) -> None:
    go = decide_lanes(senders, receivers, standing, table, backend, 3)
    assert (go.group, go.refused) == (4, "")
    assert set(go.receivers) == {name for name, said in receivers.items() if said is not None}


@pytest.mark.parametrize(
    ("takes", "streams"),
    [([4], 4), ([4, 4, 4], 4), ([4, 1], 1), ([8, 4], 4), ([4] * 16, 4), ([4] * 17, 3), ([4] * 64, 1), ([4] * 200, 1)],
)
def test_members_have_as_many_connections_as_all_of_them_make_and_a_large_group_fewer(
    takes: list[int], streams: int
) -> None:
    said = {f"{number:03}": Ready(streams=each) for number, each in enumerate(takes)}
    assert decide_lanes({}, said, None, TABLE, "gloo", 0).streams == streams


def test_the_table_of_one_sender_has_all_tensors_side_by_side() -> None:
    table = table_of_whole([5, 0, 24])
    assert table.held == ((HeldStrip(0, strip(0, 5), 0), HeldStrip(2, strip(0, 24), 64)),)
    assert from_json(msgspec.json.encode(table), ShardTable) == table


@pytest.mark.parametrize(
    ("senders", "receivers", "why"),
    [
        ({"sender 1": None}, BOTH, "sender 1 was not ready in time"),
        ({"sender 1": Ready(refused="no room")}, BOTH, "sender 1: no room"),
        (OTHER, {"a": None}, "no receiver was ready in time"),
        (OTHER, {"a": Ready(refused="no room")}, "no room"),
    ],
)
def test_nothing_is_sent_without_each_sender_and_a_receiver(
    senders: dict[str, Ready | None], receivers: dict[str, Ready | None], why: str
) -> None:
    assert decide_lanes(senders, receivers, STANDING, TABLE, "gloo", 3) == Go(refused=why)


def block(lane: int, *move: int) -> BlockWord:
    return BlockWord(lane, (StripSide(*move),))


def test_each_member_gets_its_side_of_its_own_lanes() -> None:
    held = [[HeldStrip(0, strip(0, 8), 64)], [HeldStrip(0, strip(8, 8), 0)]]
    plan = schedule(held, [128], {"a": everything([16]), "b": {0: [strip(12, 4)]}}, 100)
    names = [sender_name(0), sender_name(1)]
    lanes = [LaneWord(0, (names[0], "a")), LaneWord(1, (names[1], "a")), LaneWord(2, (names[1], "b"))]
    first, second, a, b = (script_of(plan, name) for name in (*names, "a", "b"))
    assert first == MemberScript((lanes[0],), (block(0, 64, 8, 8, 1),))
    assert second == MemberScript(tuple(lanes[1:]), (block(0, 0, 8, 8, 1), block(1, 4, 4, 4, 1)))
    assert a == MemberScript(tuple(lanes[:2]), (block(0, 128, 8, 8, 1), block(1, 136, 8, 8, 1)))
    assert b == MemberScript((lanes[2],), (block(0, 140, 4, 4, 1),))
    assert (first.delivered, second.delivered) == (8, 12)


@pytest.mark.parametrize(
    "odd",
    [
        block(1, 0, 8, 8, 1),
        BlockWord(0, ()),
        block(0, -1, 8, 8, 1),
        block(0, 0, 8, 0, 1),
        block(0, 0, 4, 8, 2),
        block(0, 93, 8, 8, 1),
        block(0, 0, 50, 8, 3),
    ],
)
def test_a_script_that_leads_out_of_the_memory_or_of_its_lanes_is_at_fault(odd: BlockWord) -> None:
    lane = LaneWord(0, ("sender 0", "a"))
    assert MemberScript((lane,), (block(0, 92, 8, 8, 1), block(0, 0, 46, 8, 3))).fault(100) is None
    assert MemberScript((lane,), (odd,)).fault(100) is not None


def place(*devices: str, backends: tuple[str, ...] = ("gloo", "nccl")) -> TrainerPlace:
    return TrainerPlace(
        host="h", boot="b", devices=frozenset(devices), shared=False, backends=frozenset(backends), is_rank=True
    )


def rank(device: str, needs: str = "") -> Receiver:
    name = f"0-1-{device}.sock"
    return Receiver(
        engine="e", rank=0, name=name, host="h", boot="b", device=device, backends=["gloo", "nccl"], needs=needs
    )


def test_ranks_and_engine_ranks_with_gpus_of_their_own_take_nccl_and_say_what_is_needed() -> None:
    route = decide_route(
        "auto", [place("G0"), place("G1")], Receivers(receivers=[rank("G2", "d2"), rank("G3")]), "service"
    )
    assert route.handover
    assert route.destination is not None
    assert (route.destination.backend, route.destination.needs) == ("nccl", {"0-1-G2.sock": "d2"})


@pytest.mark.parametrize(
    ("places", "receivers", "why"),
    [
        ([place("G0"), place("G0")], [rank("G2")], "two trainer ranks share G0: NCCL refuses two ranks on one GPU"),
        ([place("G0"), place()], [rank("G2")], "trainer rank 1: the tensors are in host memory: use gloo"),
        ([place("G0"), place("G1")], [rank("G1")], "trainer rank 1: trainer and rank 0 of e share G1"),
        ([place("G0"), place("G1", backends=("gloo",))], [rank("G2")], "trainer rank 1: the trainer's torch has no"),
        ([place("G0"), place("G1")], [rank("G2"), rank("G2")], "two engine ranks share G2"),
    ],
)
def test_what_nccl_cannot_do_is_refused_with_the_rank_and_auto_takes_files(
    places: list[TrainerPlace], receivers: list[Receiver], why: str
) -> None:
    with pytest.raises(TransportRefusedError, match=why):
        decide_route("nccl", places, Receivers(receivers=receivers), "service")
    route = decide_route("auto", places, Receivers(receivers=receivers), "service")
    if "share G1" in why:
        assert (route.choice.transport, route.handover, route.destination) == ("handover", True, None)
    else:
        assert (route.choice.transport, route.handover) == ("disk", False)
        assert why in route.choice.why


def test_a_hand_over_needs_all_ranks_on_one_host_with_an_engine_and_says_so_without_an_error() -> None:
    here, there = place("G0"), replace(place("G1"), host="other")
    far = replace(rank("G0"), host="far")
    for places, receivers, why in (
        ([here, there], [rank("G0")], "trainer rank 1 is on other, and rank 0 on h: use nccl or gloo"),
        ([here, here], [far], "rank 0 of e runs on far, and the trainer on h: use nccl or gloo"),
        ([here, here], [], "no engine of the service follows the run yet"),
    ):
        found = Receivers(receivers=receivers)
        route = decide_route("handover", places, found, "service")
        assert (route.choice.transport, route.handover) == ("disk", False)
        assert why in str(route.instead)
        assert decide_route("auto", places, found, "service").choice.transport != "handover"
    route = decide_route("handover", [here], Receivers(receivers=[rank("G2"), far]), "service")
    assert (route.choice.transport, route.handover) == ("handover", True)  # an engine that cannot says so itself


def test_ranks_hand_over_on_their_own_accord_to_all_engine_ranks_on_their_gpus() -> None:
    """Also to tensor-parallel ones, which hold what they copied of their slices against the offer together."""
    places, tensor_parallel = [place("G0"), place("G1")], Receivers(receivers=[rank("G0"), rank("G1")])
    route = decide_route("auto", places, tensor_parallel, "service")
    assert (route.choice.transport, route.handover) == ("handover", True)
    apart = Receivers(receivers=[rank("G0"), rank("G2")])
    assert decide_route("auto", places, apart, "service").choice.transport == "disk"


@pytest.mark.parametrize("transport", ["nccl", "gloo"])
def test_without_refitd_inside_an_engine_files_go_and_say_why(transport: Transport) -> None:
    stock = Receivers(receivers=[], others=["a"])
    route = decide_route(transport, [place("G0"), place("G1")], stock, "service")
    assert (route.choice.transport, route.handover) == ("disk", False)
    assert "no engine of the run (a) has refitd inside" in str(route.instead)


def test_a_word_that_is_no_transport_and_one_without_a_service_are_refused() -> None:
    def checked(transport: Any, *, of_ranks: bool = True) -> Transport | None:
        return PublishCall(step=1, transport=transport).checked(None, of_ranks=of_ranks).transport

    for of_ranks in (False, True):
        with pytest.raises(ValueError, match="transport is 'fast'"):
            checked("fast", of_ranks=of_ranks)
        for transport in ("auto", "handover"):
            with pytest.raises(ValueError, match=f"transport='{transport}' needs the service_url"):
                checked(transport, of_ranks=of_ranks)
        assert checked("disk", of_ranks=of_ranks) == "disk"
