"""What sender and receivers of a transfer decide alike: who takes part, in which group, and where each byte goes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd_client.contract.plugin import Receiver, Receivers
from refitd_client.transport.group.transfer import Go, Ready, StandingGroup, decide, flat_layout
from refitd_client.transport.ipc.offer import HostPlace, OfferedTensor
from refitd_client.transport.ways import TrainerPlace, choose, hinders

STANDING = StandingGroup(number=3, ranks={"a": 1, "b": 2})


def test_a_group_stays_while_all_its_members_hold_it() -> None:
    said = {"a": Ready(group=3), "b": Ready(group=3)}
    assert decide(said, STANDING, 3) == Go(group=3, ranks={"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("said", "ranks"),
    [
        ({"a": Ready(group=3), "b": Ready()}, {"a": 1, "b": 2}),  # its receiver was begun again
        ({"a": Ready(group=3), "b": None}, {"a": 1}),  # it is late, or gone
        ({"a": Ready(group=3), "b": Ready(refused="no room")}, {"a": 1}),
        ({"a": Ready(group=3), "b": Ready(group=3), "c": Ready()}, {"a": 1, "b": 2, "c": 3}),
        ({"a": Ready(group=2), "b": Ready(group=3)}, {"a": 1, "b": 2}),
    ],
)
def test_a_new_group_is_made_of_all_that_are_ready_when_a_member_is_another(
    said: dict[str, Ready | None], ranks: dict[str, int]
) -> None:
    assert decide(said, STANDING, 3) == Go(group=4, ranks=ranks)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"a": None, "b": None}, "no receiver was ready in time"),
        ({"a": None, "b": Ready(refused="there is no room for it")}, "there is no room for it"),
        ({}, "no receiver was ready in time"),
    ],
)
def test_nothing_is_sent_where_no_receiver_is_ready(said: dict[str, Ready | None], why: str) -> None:
    assert decide(said, STANDING, 3) == Go(refused=why)


@pytest.mark.parametrize(
    ("takes", "streams"),
    [([4], 4), ([4, 4, 4], 4), ([4, 1], 1), ([8, 4], 4), ([4] * 16, 4), ([4] * 17, 3), ([4] * 64, 1), ([4] * 200, 1)],
)
def test_members_have_as_many_connections_as_all_of_them_make_and_a_large_group_fewer(
    takes: list[int], streams: int
) -> None:
    said = {f"{number:03}": Ready(streams=each) for number, each in enumerate(takes)}
    assert decide(said, None, 0).streams == streams


def test_a_group_that_has_failed_is_not_used_again() -> None:
    assert decide({"a": Ready(group=3), "b": Ready(group=3)}, None, 3).group == 4


@given(st.lists(st.integers(0, 300), max_size=30), st.integers(1, 500))
def test_the_blocks_bring_each_byte_of_each_tensor_once(sizes: list[int], block: int) -> None:
    layout = flat_layout([OfferedTensor(f"{n}", "U8", (size,), HostPlace("/x", 0)) for n, size in enumerate(sizes)])
    assert all(offset % 64 == 0 for offset in layout.offsets)
    sent = {number: bytearray(size) for number, size in enumerate(sizes)}
    for begin, end in layout.blocks(block):
        assert end - begin <= block
        for piece in layout.pieces(begin, end):
            assert 0 <= piece.offset <= end - begin - piece.size
            assert begin + piece.offset == layout.offsets[piece.tensor] + piece.begin
            for at in range(piece.begin, piece.begin + piece.size):
                sent[piece.tensor][at] += 1
    assert all(set(counts) <= {1} for counts in sent.values())


def rank(
    engine: str = "e", device: str = "GPU-1", host: str = "h", backends: tuple[str, ...] = ("gloo", "nccl")
) -> Receiver:
    return Receiver(engine=engine, rank=0, name=engine, host=host, boot="b", device=device, backends=list(backends))


def ranks(*there: Receiver) -> Receivers:
    return Receivers(receivers=list(there))


def trainer(*devices: str, shared: bool = False, backends: tuple[str, ...] = ("gloo", "nccl")) -> TrainerPlace:
    return TrainerPlace(host="h", boot="b", devices=frozenset(devices), shared=shared, backends=frozenset(backends))


def test_trainer_and_engine_on_one_gpu_hand_over_and_nccl_is_refused_by_the_gpus_name() -> None:
    assert choose([trainer("GPU-1")], ranks(rank())).transport == "handover"
    assert hinders("nccl", [trainer("GPU-1")], ranks(rank())) == (
        "trainer and rank 0 of e share GPU-1: NCCL refuses two ranks on one GPU; use handover"
    )


def test_gpus_of_their_own_take_nccl_also_on_several_hosts() -> None:
    assert choose([trainer("GPU-0")], ranks(rank(), rank("f", "GPU-2", host="other"))).transport == "nccl"


def test_two_engines_on_one_gpu_are_no_group_of_nccl() -> None:
    assert "two engine ranks share GPU-1" in str(hinders("nccl", [trainer("GPU-0")], ranks(rank(), rank("f"))))
    assert choose([trainer("GPU-0")], ranks(rank(), rank("f"))).transport == "delta"


@pytest.mark.parametrize(
    ("here", "there", "why"),
    [
        (trainer(), [rank()], "the tensors are in host memory: use gloo"),
        (trainer("GPU-0", "GPU-2"), [rank()], "the tensors are on 2 GPUs"),
        (trainer("GPU-0", backends=("gloo",)), [rank()], "the trainer's torch has no nccl: use gloo"),
        (trainer("GPU-0"), [rank(device="", backends=("gloo",))], "rank 0 of e has no nccl: use gloo"),
    ],
)
def test_what_nccl_cannot_do_is_said_with_what_to_do(here: TrainerPlace, there: list[Receiver], why: str) -> None:
    assert why in str(hinders("nccl", [here], ranks(*there)))


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ([], "no engine of the service follows the run yet"),
        (["a", "b"], "no engine of the run (a, b) has refitd inside"),
        (list("abcde"), "(a, b, c and 2 more) has refitd inside"),
    ],
)
def test_where_no_engine_can_receive_files_go_and_it_is_said_whether_there_is_one(others: list[str], why: str) -> None:
    found = Receivers(receivers=[], others=others)
    choice = choose([trainer("GPU-0")], found)
    assert (choice.transport, why in choice.why, why in str(hinders("gloo", [trainer()], found))) == (
        "delta",
        True,
        True,
    )


@pytest.mark.parametrize("shared", [False, True])
def test_host_memory_is_handed_over_where_others_can_open_it(shared: bool) -> None:
    there = ranks(rank(device="", backends=("gloo",)))
    assert choose([trainer(shared=shared)], there).transport == ("handover" if shared else "delta")
    assert hinders("gloo", [trainer(shared=shared)], there) is None
