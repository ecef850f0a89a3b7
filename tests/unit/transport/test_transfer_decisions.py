"""Which transport a trainer of one process takes, and why another cannot work."""

import pytest

from refitd_client.contract.plugin import Receiver, Receivers
from refitd_client.transport.choice import TrainerPlace, choose, hinders


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
