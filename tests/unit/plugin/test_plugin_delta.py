"""Deltas in place: what they leave is what a full load leaves; what does not fit is refused, and what fails undone."""

import gc
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from refitd_client.contract.naming import DELTA_NAME
from refitd_client.contract.plugin import UpdateOutcome
from refitd_plugin.delta import in_place
from refitd_plugin.delta.changes import most_memory, open_changes
from refitd_plugin.delta.in_place import HostPatch
from refitd_plugin.memory.source import SourceRefusedError, place_of, reference_in
from refitd_plugin.update.update_source import leads_from
from support.forged import sign
from support.mini_sglang import expected, tiny_weights, values
from support.tiny_rank import Breaking, Rank, Weights, delta, group, together, version


def changed(weights: Weights, seed: int, *names: str) -> Weights:
    """Some elements of some tensors are others; without names, of all but the norm, which the loader computes with."""
    random = torch.Generator().manual_seed(seed)
    after = {name: tensor.clone() for name, tensor in weights.items()}
    for name in names or [name for name in after if name != "norm.weight"]:
        flat = after[name].view(-1)
        at = torch.randperm(len(flat), generator=random)[: max(1, len(flat) // 3)]
        flat[at] = torch.randn(len(at), generator=random).bfloat16()
    return after


def serving(root: Path, startup: Path, **args: Any) -> Rank:
    """A rank that holds version 2, with a plan that is proven."""
    rank = Rank(startup, **args)
    for step in (1, 2):
        assert rank.answer(version(root, step, fingerprints=True)).outcome is UpdateOutcome.SERVED
    return rank


def state(rank: Rank) -> Any:
    return values(rank.model), rank.path, rank.engine.served


def test_a_delta_leaves_what_a_full_load_leaves(root: Path, startup: Path) -> None:
    """Stacked, padded, transposed; and one after the other."""
    rank, other, weights = serving(root, startup), Rank(startup), tiny_weights(2)
    for step in (3, 4, 5):
        before, weights = weights, changed(weights, step)
        folder = delta(root, step, step - 1, before, weights)
        answer = rank.answer(folder)
        assert (answer.outcome, answer.how, answer.version) == (UpdateOutcome.SERVED, "delta", f"run~v{step:06d}")
        assert values(rank.model) == expected(weights)
        assert answer.contents == other.answer(version(root, step + 100, weights)).contents
        assert (rank.path, rank.engine.served) == (str(folder), f"run~v{step:06d}")


def test_a_delta_that_spans_several_versions_leads_on_from_each(root: Path, startup: Path) -> None:
    first = changed(tiny_weights(2), 3, "q.weight")
    second = changed(first, 4, "q.weight", "down.weight")
    for way in ((4,), (3, 4)):
        rank = serving(root, startup)
        steps = {3: (2, tiny_weights(2), first), 4: (2, tiny_weights(2), second)}
        for step in way:
            assert rank.answer(delta(root, step, *steps[step])).outcome is UpdateOutcome.SERVED
        assert values(rank.model) == expected(second)
        shutil.rmtree(root / "run")


def test_a_delta_that_is_served_already_is_served_when_it_is_told_again(root: Path, startup: Path) -> None:
    """As the service tells it again where SGLang could not flush its cache."""
    rank, after = serving(root, startup), changed(tiny_weights(2), 3)
    folder = delta(root, 3, 2, tiny_weights(2), after)
    first, again = rank.answer(folder), rank.answer(folder)
    assert (again.outcome, again.version, again.contents) == (UpdateOutcome.SERVED, first.version, first.contents)
    assert values(rank.model) == expected(after)
    with torch.no_grad():
        next(rank.model.parameters()).add_(1)  # somebody else has written meanwhile
    assert (rank.answer(folder).outcome, rank.answer(folder).needs) == (UpdateOutcome.REFUSED, "full")


@pytest.mark.parametrize(("times", "outcome"), [(1, UpdateOutcome.RESTORED), (2, UpdateOutcome.UNKNOWN)])
def test_to_be_told_again_what_is_served_and_to_break_ends_as_any_update_does(
    root: Path, startup: Path, times: int, outcome: UpdateOutcome
) -> None:
    rank, after = serving(root, startup), changed(tiny_weights(2), 3)
    folder = delta(root, 3, 2, tiny_weights(2), after)
    rank.answer(folder)
    breaks = [RuntimeError("no room for a graph")] * times

    def ending() -> None:
        if breaks:
            raise breaks.pop()

    rank.updater.after = ending
    answer = rank.answer(folder)
    assert (answer.outcome, values(rank.model)) == (outcome, expected(after))
    assert "no room for a graph" in answer.reason


def test_a_delta_that_was_prepared_for_what_is_gone_is_looked_at_again(root: Path, startup: Path) -> None:
    rank, after = serving(root, startup), changed(tiny_weights(2), 3)
    folder = delta(root, 3, 2, tiny_weights(2), after)
    prepared = rank.engine.prepare(str(folder))
    rank.answer(root / "run" / "v000001")
    rank.answer(root / "run" / "v000002")
    rank.engine._prepared = prepared
    assert rank.answer(folder).outcome is UpdateOutcome.SERVED
    assert values(rank.model) == expected(after)


def test_a_delta_that_was_prepared_for_what_is_gone_does_not_fit_what_came(root: Path, startup: Path) -> None:
    rank = serving(root, startup)
    folder = delta(root, 3, 2, tiny_weights(2), changed(tiny_weights(2), 3))
    prepared = rank.engine.prepare(str(folder))
    rank.answer(root / "run" / "v000001")
    rank.engine._prepared = prepared
    answer = rank.answer(folder)
    assert (answer.outcome, answer.needs, rank.holds(1)) == (UpdateOutcome.REFUSED, "full", True)


@pytest.mark.parametrize(
    ("base", "held", "version", "leads"),
    [
        ("run~v000002", "run~v000002", "run~v000005", True),
        ("run~v000002", "run~v000004", "run~v000005", True),
        ("run~v000002", "run~v000005", "run~v000005", False),
        ("run~v000002", "run~v000001", "run~v000005", False),
        ("run~v000002", "other~v000002", "run~v000005", False),
        ("run~v000002", "run~v000003.g2", "run~v000001.g3", False),
        ("run~v000009", "run~v000009", "run~v000002.g2", True),
        ("run~v000002", "/models/base", "run~v000005", False),
    ],
)
def test_a_delta_leads_from_its_base_and_what_came_after_it(base: str, held: str, version: str, leads: bool) -> None:
    changes = SimpleNamespace(base=base, label=version)
    assert leads_from(changes, held) is leads  # type: ignore[arg-type]


def a_damaged_byte(folder: Path, rank: Rank) -> None:
    path = folder / "weights.refit-delta"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def cut_off(folder: Path, rank: Rank) -> None:
    os.truncate(folder / "weights.refit-delta", 100)


def a_manifest_of_its_own(folder: Path, rank: Rank) -> None:
    sign(folder, "run", 3)


def no_manifest_that_parses(folder: Path, rank: Rank) -> None:
    (folder / "refit.json").write_text("{")


def a_link(folder: Path, rank: Rank) -> None:
    (folder / "weights.refit-delta").rename(folder.parent / "elsewhere")
    (folder / "weights.refit-delta").symlink_to("../elsewhere")


def written_by_someone_else(folder: Path, rank: Rank) -> None:
    rank.model.down.data.mul_(2)


def written_by_someone_else_where_the_delta_is_not(folder: Path, rank: Rank) -> None:
    rank.model.norm.data.mul_(2)


def another_version_is_served(folder: Path, rank: Rank) -> None:
    rank.answer(folder.parent / "v000001")


def a_version_from_nowhere_is_served(folder: Path, rank: Rank) -> None:
    rank.update(folder.parents[2] / "startup")


def no_plan(folder: Path, rank: Rank) -> None:
    rank.engine.loading.plan = None


def a_tensor_was_replaced(folder: Path, rank: Rank) -> None:
    rank.model.down.data = rank.model.down.data.clone()


REFUSED = [a_damaged_byte, cut_off, a_manifest_of_its_own, no_manifest_that_parses, a_link]
FULL = [
    written_by_someone_else,
    written_by_someone_else_where_the_delta_is_not,
    another_version_is_served,
    a_version_from_nowhere_is_served,
    no_plan,
    a_tensor_was_replaced,
]


@pytest.mark.parametrize("spoil", [*REFUSED, *FULL], ids=lambda each: each.__name__)
def test_a_delta_that_does_not_fit_is_refused_untouched(root: Path, startup: Path, spoil: Any) -> None:
    rank = serving(root, startup)
    folder = delta(root, 3, 2, tiny_weights(2), changed(tiny_weights(2), 3))
    spoil(folder, rank)
    before = state(rank)
    answer = rank.answer(folder)
    assert (answer.outcome, bool(answer.reason)) == (UpdateOutcome.REFUSED, True)
    assert (state(rank), answer.needs) == (before, "full" if spoil in FULL else "")
    assert rank.answer(version(root, 9)).outcome is UpdateOutcome.SERVED  # the full version
    assert rank.holds(9)


def test_a_tensor_that_the_loader_computes_with_is_not_guessed(root: Path, startup: Path) -> None:
    rank = serving(root, startup)
    before = state(rank)
    answer = rank.answer(delta(root, 3, 2, tiny_weights(2), changed(tiny_weights(2), 3, "norm.weight")))
    assert (answer.outcome, answer.needs, state(rank)) == (UpdateOutcome.REFUSED, "full", before)
    assert "tensor norm.weight cannot be changed in place" in answer.reason


def test_weights_of_another_version_are_seen_before_they_are_written(root: Path, startup: Path) -> None:
    """Its ids are right, and its base's content is not: a trainer that published other weights under the same step."""
    rank, other = serving(root, startup), changed(tiny_weights(2), 77, "q.weight")
    before = state(rank)
    for after in (changed(other, 3, "q.weight"), changed(other, 3, "k.weight")):  # in what it names, and in what not
        answer = rank.answer(delta(root, 3, 2, other, after))
        assert (answer.outcome, answer.needs, state(rank)) == (UpdateOutcome.REFUSED, "full", before)
        shutil.rmtree(root / "run" / "v000003")


def test_a_base_that_is_not_served_is_not_taken_for_it_by_its_content(root: Path, startup: Path) -> None:
    """On a rank with slices of all that changed, nothing but the ids would tell."""
    rank = serving(root, startup)
    before = state(rank)
    answer = rank.answer(delta(root, 5, 4, tiny_weights(2), changed(tiny_weights(2), 3)))
    assert (answer.outcome, answer.needs, state(rank)) == (UpdateOutcome.REFUSED, "full", before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_refused(root: Path, startup: Path, value: float) -> None:
    rank, after = serving(root, startup), changed(tiny_weights(2), 3)
    after["q.weight"][0, 0] = value
    before = state(rank)
    assert "non-finite" in rank.answer(delta(root, 3, 2, tiny_weights(2), after)).reason
    assert state(rank) == before


class Failing:
    """Patches that break off: the first so many, a write after its first piece and an undo after `undone`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, write: int = 0, undo: int = 0, undone: int = 0) -> None:
        self.left, self.pieces = {"write": write, "undo": undo}, {"write": 1, "undo": undone}
        for name in self.left:
            monkeypatch.setattr(HostPatch, name, self._failing(name, getattr(HostPatch, name)))

    def _failing(self, name: str, original: Any) -> Any:
        def failing(patch: HostPatch) -> None:
            if self.left[name] == 0:
                original(patch)
                return
            self.left[name] -= 1
            pieces, patch._pieces = patch._pieces, patch._pieces[: self.pieces[name]]
            original(patch)
            patch._pieces = pieces
            raise RuntimeError("lost the device")

        return failing


def test_a_delta_that_fails_is_undone_and_proven_so(root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, after = serving(root, startup), changed(tiny_weights(2), 3)
    folder, before = delta(root, 3, 2, tiny_weights(2), after), state(rank)
    shutil.rmtree(root / "run" / "v000002")
    Failing(monkeypatch, write=1)
    answer = rank.answer(folder)
    assert (answer.outcome, answer.reason) == (UpdateOutcome.RESTORED, "RuntimeError: lost the device")
    assert state(rank) == before
    assert rank.answer(folder).needs == "full"  # the plan may have been at fault
    for step in (8, 9):
        rank.answer(version(root, step))
    assert rank.answer(delta(root, 10, 9, tiny_weights(9), changed(tiny_weights(9), 3))).outcome is UpdateOutcome.SERVED


def test_a_delta_of_which_all_was_taken_back_is_undone_though_the_undoing_broke_off(
    root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = serving(root, startup)
    before, label = state(rank), rank.engine.served
    Failing(monkeypatch, write=1, undo=1, undone=1)
    answer = rank.answer(delta(root, 3, 2, tiny_weights(2), changed(tiny_weights(2), 3)))
    assert (answer.outcome, "every weight is what it was" in answer.reason) == (UpdateOutcome.RESTORED, True)
    assert (state(rank), rank.engine.served) == (before, label)


def test_a_write_that_does_something_else_is_noticed_and_undone(
    root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, before = serving(root, startup), values
    held = before(rank.model)
    monkeypatch.setattr(HostPatch, "write", lambda patch: None)
    answer = rank.answer(delta(root, 3, 2, tiny_weights(2), changed(tiny_weights(2), 3)))
    assert (answer.outcome, "not what the delta should have made" in answer.reason) == (UpdateOutcome.RESTORED, True)
    assert before(rank.model) == held


def test_a_rank_that_fails_takes_the_others_back(root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = group(startup, monkeypatch)
    for step in (1, 2):
        together(members, version(root, step))
    Failing(monkeypatch, write=1)  # whichever comes first
    answers = together(members, delta(root, 3, 2, tiny_weights(2), changed(tiny_weights(2), 3)))
    assert {each.outcome for each in answers} == {UpdateOutcome.RESTORED}
    assert [rank.holds(2) for rank in members] == [True, True]


def test_a_rank_that_needs_a_full_version_makes_the_engine_need_one(
    root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = group(startup, monkeypatch)
    for step in (1, 2):
        together(members, version(root, step))
    members[1].engine.loading.plan = None
    answers = together(members, delta(root, 3, 2, tiny_weights(2), changed(tiny_weights(2), 3)))
    assert {(each.outcome, each.needs) for each in answers} == {(UpdateOutcome.REFUSED, "full")}


def test_a_full_version_that_fails_after_deltas_is_undone_to_the_last_of_them(root: Path, startup: Path) -> None:
    rank, weights = serving(root, startup), tiny_weights(2)
    for step in (3, 4):
        before, weights = weights, changed(weights, step)
        assert rank.answer(delta(root, step, step - 1, before, weights)).outcome is UpdateOutcome.SERVED
    held, fifth = state(rank), version(root, 5)
    for step in (2, 3, 4):
        shutil.rmtree(root / "run" / f"v{step:06d}")
    rank.engine.loading.plan = None
    Breaking(rank.model, 4)
    assert rank.answer(fifth).outcome is UpdateOutcome.RESTORED
    assert state(rank) == held
    assert values(rank.model) == expected(weights)


def test_deltas_that_lead_on_from_each_other_do_not_pile_up_for_ever(
    root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_place, "MOST_DELTAS", 2)
    rank, weights = serving(root, startup), tiny_weights(2)
    answers: list[str] = []
    for step in (3, 4, 5):
        before, weights = weights, changed(weights, step)
        answers.append(rank.answer(delta(root, step, step - 1, before, weights)).needs)
    assert answers == ["", "", "full"]


def test_deltas_from_one_base_replace_each_other(root: Path, startup: Path) -> None:
    rank = serving(root, startup)
    for step in range(3, 12):
        after = changed(tiny_weights(2), 3)
        assert rank.answer(delta(root, step, 2, tiny_weights(2), after)).outcome is UpdateOutcome.SERVED
    assert len(rank.engine.restore_point.served_state.deltas) == 1


def test_memory_that_is_not_what_the_manifest_says_is_not_served(root: Path, startup: Path) -> None:
    rank = serving(root, startup)
    third = version(root, 3, fingerprints=True)
    manifest = (third / "refit.json").read_text()
    name = '"k.weight": "'
    at = manifest.index(name) + len(name)
    (third / "refit.json").write_text(manifest[:at] + "0" * 16 + manifest[at + 16 :])
    answer = rank.answer(third)
    assert (answer.outcome, "tensor k.weight has fingerprint" in answer.reason) == (UpdateOutcome.RESTORED, True)
    assert rank.holds(2)


def test_while_the_weights_memory_is_released_nothing_touches_it(
    root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refitd_plugin.update import rank_engine

    rank = serving(root, startup, enable_memory_saver=True)
    folder, before = delta(root, 3, 2, tiny_weights(2), changed(tiny_weights(2), 3)), state(rank)
    monkeypatch.setattr(in_place, "fit_delta", None)  # nobody may read
    rank.engine.prepare(str(folder))
    with monkeypatch.context() as gone:
        gone.setattr(rank_engine, "released", lambda _: "down")
        gone.setattr(rank_engine, "contents_of", None)
        for path in (folder, version(root, 4)):
            assert "the memory of down is released" in rank.answer(path).reason
    assert state(rank) == before


def test_memory_that_came_back_without_its_contents_takes_full_versions_only(root: Path, startup: Path) -> None:
    rank = serving(root, startup, enable_memory_saver=True)
    folder = delta(root, 3, 2, tiny_weights(2), changed(tiny_weights(2), 3))
    for tensor in rank.model.parameters():
        tensor.data.zero_()
    assert rank.answer(folder).needs == "full"
    assert rank.answer(version(root, 4)).outcome is UpdateOutcome.SERVED
    assert rank.holds(4)


def test_a_hundred_updates_leave_nothing_behind(root: Path, startup: Path) -> None:
    """No descriptor and no mapping more than after ten; the same version has the same fingerprints each time."""
    rank = serving(root, startup)
    folder = delta(root, 3, 2, tiny_weights(2), changed(tiny_weights(2), 3))
    seen: dict[Path, set[str]] = {}
    descriptors: list[int] = []
    mappings: set[int] = set()
    gc.collect()  # what earlier tests left is closed now, not while it is counted
    for number in range(99):
        path = (root / "run" / "v000001", root / "run" / "v000002", folder)[number % 3]
        answer = rank.answer(path)
        assert answer.outcome is UpdateOutcome.SERVED
        seen.setdefault(path, set()).add(answer.contents)
        if number % 9 == 8:
            descriptors.append(len(os.listdir("/proc/self/fd")))
            mappings.add(_mappings(root))
    assert [len(contents) for contents in seen.values()] == [1, 1, 1]
    assert max(descriptors) == descriptors[0]
    assert len(mappings) == 1


def _mappings(root: Path) -> int:
    return sum(str(root) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_delta_that_would_take_more_memory_than_its_model_allows_takes_none(root: Path, startup: Path) -> None:
    """Its file has holes: a header that says so, and nothing on the disk."""
    folder = delta(root, 3, 2, tiny_weights(2), changed(tiny_weights(2), 3))
    file, asked = folder / DELTA_NAME, list[int]()

    def room(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        asked.append(size)
        return np.empty(size, np.uint8)

    place, known = place_of(str(folder), root), reference_in(startup)
    assert open_changes(place, check_bytes=True, allocate=room, most=most_memory(known)).label == "run~v000003"
    taken = list(asked)
    with pytest.raises(SourceRefusedError, match=r"would take \d+ bytes of memory; at most 100 are given to it"):
        open_changes(place, check_bytes=True, allocate=room, most=100)
    os.truncate(file, 2**40)
    with pytest.raises(SourceRefusedError, match="it has"):
        open_changes(place, check_bytes=True, allocate=room, most=most_memory(known))
    assert asked == taken
