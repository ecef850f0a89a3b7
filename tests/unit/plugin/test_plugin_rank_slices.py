"""Ranks that have slices of tensors find out together whether these are what the manifest says, to the last element."""

from pathlib import Path

import pytest
import torch

from refitd_client.contract.plugin import UpdateOutcome
from support.exporting import exporting, shared
from support.sliced_rank import EXPERTS, KV_HEADS, SHAPES, SLICED, SlicedEngine, SlicedModel, flip, sliced_weights
from support.tiny_rank import delta, version

HERE = len(SLICED) + 1  # tensors that each rank has something of, beside its experts


def outcomes(answers: list) -> set[UpdateOutcome]:
    return {each.outcome for each in answers}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_tensors_are_proved_in_memory_however_many_ranks_share_them(
    root: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """By the first load, which is the loader's, and by replays."""
    engine = SlicedEngine(root, monkeypatch, size)
    for step, how in ((1, "load"), (2, "replay"), (3, "replay")):
        answers = engine.take(step)
        assert [(each.outcome, each.how) for each in answers] == [(UpdateOutcome.SERVED, how)] * size
        assert [each.proved for each in answers] == [HERE + EXPERTS // size] * size
        assert engine.holds(sliced_weights(step))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SLICED)
def test_a_bit_that_is_flipped_in_one_ranks_slice_takes_all_ranks_back(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    engine = SlicedEngine(root, monkeypatch, size)
    for step in (1, 2):
        engine.take(step)
    engine.spoil_once(size - 1, name)
    answers = engine.take(3)
    assert outcomes(answers) == {UpdateOutcome.RESTORED}
    assert all(f"tensor {name} have" in each.reason for each in answers), answers[0].reason
    assert engine.holds(sliced_weights(2))
    assert outcomes(engine.take(4)) == {UpdateOutcome.SERVED}  # by the loader: the plan may have been at fault
    assert engine.holds(sliced_weights(4))


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("name", ["k", "v"])
def test_a_replica_that_differs_is_found_whichever_rank_has_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, rank: int
) -> None:
    """Two ranks have the same heads, and the sum takes one of them."""
    size = 2 * KV_HEADS
    engine = SlicedEngine(root, monkeypatch, size)
    for step in (1, 2):
        engine.take(step)
    engine.spoil_once(rank, name)
    answers = engine.take(3)
    assert outcomes(answers) == {UpdateOutcome.RESTORED}
    reason = f"ranks that have the same slice of tensor {name} have different values in memory"
    assert [each.reason for each in answers] == [reason] * size
    assert engine.holds(sliced_weights(2))


@pytest.mark.parametrize("name", ["norm", "expert_3"])
def test_a_tensor_that_a_rank_has_whole_is_still_found_by_that_rank(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine = SlicedEngine(root, monkeypatch, 2)
    for step in (1, 2):
        engine.take(step)
    engine.spoil_once(1, name)
    answers = engine.take(3)
    assert outcomes(answers) == {UpdateOutcome.RESTORED}
    assert all(each.reason.startswith(f"rank 1: tensor {name} has fingerprint") for each in answers)


def test_without_fingerprints_nothing_is_proved_and_nothing_is_wrong(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SlicedEngine(root, monkeypatch, 2)
    for step in (1, 2):
        answers = engine.take(step, fingerprints=False)
        assert (outcomes(answers), answers[0].proved) == ({UpdateOutcome.SERVED}, 0)
    engine.spoil_once(0, "o")
    assert outcomes(engine.take(3, fingerprints=False)) == {UpdateOutcome.SERVED}


class Overlapping(SlicedModel):
    """Ranks load a row of their neighbour's as well, so that some elements would be counted twice."""

    def parts(self, name: str, tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if name != "bias" or self.size == 1:
            return super().parts(name, tensor)
        return [(self.bias.data, tensor[:6] if self.rank == 0 else tensor[5:11])]


def test_slices_that_are_not_each_element_once_are_not_proved_and_never_wrong(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SlicedEngine(root, monkeypatch, 2, kind=Overlapping)
    for step in (1, 2, 3):
        answers = engine.take(step)
        assert (outcomes(answers), answers[0].proved) == ({UpdateOutcome.SERVED}, HERE - 1 + EXPERTS // 2)
    engine.spoil_once(0, "bias")
    assert outcomes(engine.take(4)) == {UpdateOutcome.SERVED}


def test_where_one_rank_has_no_load_plan_what_is_whole_is_proved_and_no_more(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SlicedEngine(root, monkeypatch, 2)
    engine.take(1)
    engine.members[1].engine.loading.plan.loader_only = "a test says so"
    answers = engine.take(2)
    assert outcomes(answers) == {UpdateOutcome.SERVED}
    assert [each.proved for each in answers] == [1 + EXPERTS // 2, 0]


def test_a_table_that_cannot_be_read_is_as_bad_as_a_wrong_tensor(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that finds something wrong could be overruled by one that found nothing, because it could not look."""
    engine = SlicedEngine(root, monkeypatch, 2)
    engine.take(1)
    tables = engine.members[1].engine.loading._tables
    tables.slices.table = "no table"
    answers = engine.take(2)
    assert outcomes(answers) == {UpdateOutcome.RESTORED}
    assert "cannot be read: no slices" in answers[0].reason
    assert engine.holds(sliced_weights(1))


def test_deltas_of_slices_are_proved_as_well(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SlicedEngine(root, monkeypatch, 2)
    for step in (1, 2):
        engine.take(step)
    before = sliced_weights(2)
    for step in (3, 4):
        after = changed(before, step)
        answers = engine.load(delta(root, step, step - 1, before, after))
        assert [(each.outcome, each.how) for each in answers] == [(UpdateOutcome.SERVED, "delta")] * 2, answers[
            0
        ].reason
        assert [each.proved for each in answers] == [HERE + EXPERTS // 2] * 2
        assert engine.holds(after)
        before = after


def test_a_delta_to_slices_that_are_not_its_bases_is_taken_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is served came without fingerprints, and is not what the delta's publisher had."""
    engine = SlicedEngine(root, monkeypatch, 2)
    engine.take(1)
    served = sliced_weights(2)
    flip(served["o"])
    engine.load(version(root, 2, served))
    before = sliced_weights(2)
    answers = engine.load(delta(root, 3, 2, before, changed(before, 3, "o", "down")))
    assert outcomes(answers) == {UpdateOutcome.RESTORED}
    assert all("the ranks' slices of tensor o have fingerprint" in each.reason for each in answers)
    assert engine.holds(served)


def changed(weights: dict[str, torch.Tensor], seed: int, *names: str) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    after = {name: tensor.clone() for name, tensor in weights.items()}
    for name in names or SHAPES:
        flat = after[name].view(-1)
        at = torch.randperm(len(flat), generator=made)[:3]
        flat[at] = torch.randn(3, generator=made).to(flat.dtype)
    return after


@pytest.mark.parametrize("is_right", [True, False])
def test_slices_of_what_a_trainer_offers_are_held_against_the_offer(
    root: Path, monkeypatch: pytest.MonkeyPatch, *, is_right: bool
) -> None:
    """A trainer that goes on to its next step too early has other weights there when the ranks copy them."""
    engine = SlicedEngine(root, monkeypatch, 2)
    for step in (1, 2):
        engine.take(step)
    trainer = shared(sliced_weights(5), root.parent)
    path = root / "run" / "v000005"
    with exporting(root, 5, trainer) as exported:
        for member in engine.members:
            member.engine.prepare(str(path), offer=f"run/{exported.path.name}")
        if not is_right:
            flip(trainer.tensors["down"])
        answers = engine.load(path)
    if is_right:
        assert [(each.outcome, each.proved) for each in answers] == [(UpdateOutcome.SERVED, HERE + EXPERTS // 2)] * 2
    else:
        assert outcomes(answers) == {UpdateOutcome.RESTORED}
        assert all("slices of tensor down have fingerprint" in each.reason for each in answers)
        assert all("and the offer says" in each.reason for each in answers)
        assert [member.engine.preparing.handle_cache._opened for member in engine.members] == [None, None]
    assert engine.holds(sliced_weights(5 if is_right else 2))
    trainer.close()
