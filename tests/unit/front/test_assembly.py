"""An update that comes in buckets: what is a version, and what never becomes one."""

from contextlib import suppress
from typing import Literal

import pytest

from refitd_client.transport.child import Surroundings
from refitd_front.assembly import Assembly, PartRefusedError, UpdatePart, sent_part
from refitd_front.members import GroupMembers, TrainerGroup, hinders_group

ONE, TWO = "http://one", "http://two"


def bucket(*names: str, dtype: str = "bfloat16", shape: tuple[int, ...] = (2, 3), group: str = "g") -> UpdatePart:
    return sent_part(group, list(names), [dtype] * len(names), [shape] * len(names))


def arrived(update: Assembly, *keys: UpdatePart) -> None:
    for key in keys:
        number, _ = update.announced(ONE, key, kept=True)
        update.has_arrived(number)


def earlier() -> Assembly:
    """One that follows a version of the tensors a, b and c."""
    before = Assembly()
    arrived(before, bucket("a", "b"), bucket("c"))
    return Assembly(before.whole())


def test_the_calls_of_all_engines_are_one_bucket() -> None:
    update = Assembly()
    calls = [(ONE, bucket("a")), (TWO, bucket("a")), (TWO, bucket("b")), (ONE, bucket("b"))]
    assert [update.announced(*call, kept=True) for call in calls] == [(1, True), (1, False), (2, True), (2, False)]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ([bucket("a", "b")], "tensor c is missing"),
        ([bucket("a")], "tensor b is missing, and 1 more of the 3"),
        ([bucket("a", "b"), bucket("c"), bucket("a", "b")], "tensor a was sent twice"),
        ([bucket("a", "b"), bucket("b", "c")], "tensor b was sent twice"),
        ([bucket("a", "b"), bucket("c", shape=(3, 2))], r"tensor c is BF16 \[3, 2\], and was BF16 \[2, 3\]"),
        ([bucket("a", "b"), bucket("c", dtype="float32")], r"tensor c is F32 \[2, 3\], and was BF16"),
        ([bucket("a", "b"), bucket("c"), bucket("d")], "tensor d was not in the version before"),
    ],
)
def test_what_is_not_the_version_before_with_other_values_is_no_version(keys: list[UpdatePart], named: str) -> None:
    update = earlier()
    with suppress(PartRefusedError):
        arrived(update, *keys)
    with pytest.raises(PartRefusedError, match=named):
        update.whole()
    with pytest.raises(PartRefusedError, match=named):  # nor by another call
        update.announced(TWO, bucket("c"), kept=True)


def test_a_bucket_that_has_not_arrived_is_missed() -> None:
    update = Assembly()
    arrived(update, bucket("a"))
    update.announced(ONE, bucket("b"), kept=True)
    with pytest.raises(PartRefusedError, match="begins with b has not arrived"):
        update.whole()


def test_the_same_tensors_in_the_group_of_another_stage_of_the_pipeline_are_not_taken_twice() -> None:
    update = Assembly()
    arrived(update, bucket("a", group="g_0"))
    second = bucket("a", group="g_1")
    assert update.announced(ONE, second, kept=False) == (2, True)
    update.has_arrived(2)
    assert list(update.whole()) == ["a"]


def test_the_first_reason_stays() -> None:
    update = Assembly()
    update.broken("the trainer is gone")
    update.broken("and something else")
    assert not update.is_empty
    with pytest.raises(PartRefusedError, match="the trainer is gone: nothing of this update is published"):
        update.whole()


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes"),
    [
        ([], [], []),
        (["a"], ["bfloat16", "bfloat16"], [[1]]),
        (["a", "a"], ["bfloat16"] * 2, [[1]] * 2),
        (["a"], ["complex64"], [[1]]),
        (["a"], ["bfloat16"], [[-1]]),
        (["a\n"], ["bfloat16"], [[1]]),
    ],
)
def test_a_call_that_names_no_tensors_of_a_version_is_refused(
    names: list[str], dtypes: list[str], shapes: list[list[int]]
) -> None:
    with pytest.raises(PartRefusedError):
        sent_part("g", names, dtypes, shapes)


def test_ranks_of_nccl_each_need_a_gpu_and_those_of_gloo_none() -> None:
    def group(backend: str) -> TrainerGroup:
        return TrainerGroup(name="g", address="h", port=1, ranks=2, backend="nccl" if backend == "nccl" else "gloo")

    both = ["gloo", "nccl"]
    assert hinders_group(group("nccl"), Surroundings(backends=both, gpus=2)) is None
    assert hinders_group(group("gloo"), Surroundings(backends=both, gpus=0)) is None
    assert "sees 1: run it where" in str(hinders_group(group("nccl"), Surroundings(backends=both, gpus=1)))
    assert "has no nccl" in str(hinders_group(group("nccl"), Surroundings(backends=["gloo"], gpus=2)))


def test_members_of_vllms_group_have_the_settings_of_nccl_that_the_front_has_and_the_others_those_of_sglang() -> None:
    """All ranks of a group need the same, and vLLM makes its own with what its trainer was started with."""

    def settings(group: TrainerGroup) -> set[str]:
        members = GroupMembers(group)
        members.kill()
        return {name for child in members._children for name in child._environment if name.startswith("NCCL_")}

    def group(backend: Literal["nccl", "vllm"]) -> TrainerGroup:
        return TrainerGroup(name="g", address="h", port=1, ranks=2, backend=backend)

    assert settings(group("vllm")) == set()
    assert settings(group("nccl")) == {"NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"}
