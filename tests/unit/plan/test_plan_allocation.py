"""Allocation strings: both of AReaL's grammars are read, and what cannot be read is named."""

import pytest

from refitd_client import PlanRefusedError
from refitd_plan.allocation import Parallel, Role, allocation_of_counts, parse
from refitd_plan.machine import Gpu, Machine, place


@pytest.mark.parametrize("text", ["sglang.d1p1t1+d1p1t1", "sglang:d1+fsdp:d1", " sglang : d1 p1 + fsdp : d1 "])
def test_the_strings_of_2025_and_of_today_mean_the_same(text: str) -> None:
    read = parse(text)
    assert [[(part.backend, part.parallel.world) for part in group] for group in read.groups] == [
        [("sglang", 1)],
        [("fsdp", 1)],
    ]
    assert read.world == 2


def test_a_stroke_shares_gpus_and_binds_tighter_than_plus() -> None:
    read = parse("sglang[r]:d2+fsdp[a]:d4|fsdp[c]:d4")
    assert [[part.name for part in group] for group in read.groups] == [["r"], ["a", "c"]]
    assert read.world == 6
    assert parse("sglang:d1p1t1|fsdp:d1p1t1").world == 1


def test_experts_add_no_ranks() -> None:
    (_,), (trainer,) = parse("sglang:d8t2+megatron:(attn:d1p4t2c2|ffn:d2p4e2)").groups
    assert trainer.parallel == Parallel(d=1, p=4, t=2, c=2, e=2)
    assert trainer.parallel.world == 16
    assert parse("sglang:d4+megatron:attn:d2p2|ffn:e2").groups[1][0].parallel == Parallel(d=2, p=2, e=2)


def test_a_trainer_without_a_name_is_the_one_that_areal_takes() -> None:
    assert parse("sglang.d4+d4").of(Role.TRAINING)[0].backend == "fsdp"
    assert parse("sglang.d64p1m1+d32p2m1").of(Role.TRAINING)[0].backend == "megatron"


def test_counts_say_the_same_as_a_string() -> None:
    assert allocation_of_counts(8, 8, engine_tp=2).groups == parse("sglang:d4t2+fsdp:d8").groups
    assert allocation_of_counts(4, 4, shared=True).groups == parse("sglang:d4|fsdp:d4").groups


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sglang-d1p1t1+d1p1t1", "does not parse at 'sglang-d1p1t1"),
        ("sglang:d1+", "does not parse at ''"),
        ("sglang:d1+fsdp:(attn:d1|ffn:e1)", "use megatron"),
        ("sglang:(attn:d1|ffn:e1)+d1", "sglang has no parts for attention and experts"),
        ("sglang:d1+megatron:(attn:d1|ffn:e1", "does not parse at"),
        ("sglang:d0+d1", "sglang:d0 has d0, which is no size"),
        ("sglang:d1c2+d1", "no dimension 'c'"),
        ("sglang:d1d2+d1", "'d' twice"),
        ("trt:d1+d1", "archon, fsdp, megatron, sglang, vllm"),
        ("sglang:d1|fsdp:d2", "as many ranks"),
        ("sglang[a]:d1+fsdp[a]:d1", "called a"),
        ("sglang:d1+fsdp:d1+fsdp:d1", "has a name"),
        ("sglang:d4+megatron:(attn:d1p2t2|ffn:d1p2e4)", "other ranks"),
        ("sglang:d4+megatron:(attn:d1p2t2|ffn:p4)", "pipelines are one"),
        ("sglang:d4+megatron:d3e2", "megatron:d3e2: e2 does not divide"),
        (f"sglang:d{'9' * 5000}+d1", "does not parse at '999"),
        ("sglang:d1é+d1", "does not parse at 'é"),
    ],
)
def test_what_does_not_parse_or_cannot_be_is_named(text: str, named: str) -> None:
    with pytest.raises(PlanRefusedError) as refused:
        parse(text)
    assert named in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("text", ["", "  ", "sglang:d4", "d4", "sglang:d999999+d1"])
def test_what_leaves_nothing_to_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanRefusedError):
        parse(text)


@pytest.mark.parametrize(
    ("text", "gpus", "nodes", "names"),
    [
        ("sglang:d8+d8", 4, 1, "8 ranks"),
        ("sglang:t3+d1", 2, 2, "3 GPUs"),
        ("sglang:d3t2+d2", 3, 3, "torn over nodes"),
        ("sglang:d1+d9", 8, 1, "9 ranks"),
        ("sglang:d8+fsdp:d16", 8, 2, "asks for 24 GPUs, and 2 nodes of 8 have 16"),
    ],
)
def test_world_sizes_that_contradict_the_machine_are_refused(text: str, gpus: int, nodes: int, names: str) -> None:
    with pytest.raises(PlanRefusedError, match=names):
        place(parse(text), Machine(gpus=(Gpu(),) * gpus, nodes=nodes))


def test_a_job_that_asks_for_more_than_there_is_begins_again_at_the_first_gpu() -> None:
    placement = place(parse("sglang.d1p1t1+d1p1t1"), Machine(gpus=(Gpu(),)))
    assert placement.wrapped
    assert [rank.gpu for rank in placement.ranks] == [0, 0]
    assert not place(parse("sglang:d2+d2"), Machine(gpus=(Gpu(),) * 2, nodes=2)).wrapped


def test_gpus_are_told_apart_by_uuid_alone() -> None:
    """Two entries of one UUID are one GPU, whatever their number; GPUs of one name are two."""
    once = Machine(gpus=(Gpu(uuid="GPU-a", name="A40"), Gpu(uuid="GPU-a", name="A40")))
    twice = Machine(gpus=(Gpu(uuid="GPU-a", name="A40"), Gpu(uuid="GPU-b", name="A40")))
    assert len({rank.device for rank in place(parse("sglang:d1+d1"), once).ranks}) == 1
    assert len({rank.device for rank in place(parse("sglang:d1+d1"), twice).ranks}) == 2
