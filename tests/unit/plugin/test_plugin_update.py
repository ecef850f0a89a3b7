"""An update from SGLang's call to its answer, on a rank with SGLang's own flow and no server."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from refitd_client.contract.plugin import UpdateOutcome
from refitd_plugin.update.update_source import FullVersion
from support.forged import sign
from support.mini_sglang import TinyModel, Updater, expected, make_loader, tiny_weights, values
from support.tiny_rank import Breaking, Rank, group, together, version

Weights = dict[str, torch.Tensor]


def test_versions_are_served_first_by_the_loader_then_by_replay(root: Path, startup: Path) -> None:
    rank = Rank(startup)
    hows: list[str] = []
    contents: list[str] = []
    for step in (1, 2, 3):
        answer = rank.answer(version(root, step))
        assert (answer.outcome, answer.version) == (UpdateOutcome.SERVED, f"run~v{step:06d}")
        assert rank.holds(step)
        hows.append(answer.how)
        contents.append(answer.contents)
    assert hows == ["load", "replay", "replay"]
    assert len(set(contents)) == 3
    assert rank.path == str(root / "run" / "v000003")
    assert rank.engine.loading.plan.proven


def test_without_a_manifest_it_is_stock_sglang_and_the_next_update_is_none_the_worse(root: Path, startup: Path) -> None:
    rank = Rank(startup)
    rank.answer(version(root, 1))
    assert rank.update(startup) == (True, "Succeeded to update model weights.")
    assert rank.holds(0)
    assert rank.answer(version(root, 2)).how == "replay"
    assert rank.holds(2)


def test_an_update_that_names_some_tensors_is_sglangs_own(root: Path, startup: Path) -> None:
    def some(name: str) -> bool:
        return True

    assert "refitd" not in Rank(startup).update(version(root, 1), weight_name_filter=some)[1]


def draft_of(rank: Rank) -> Updater:
    """The draft model beside a rank's model, on weights of its own, as SGLang updates it after the model."""
    draft = Updater(
        TinyModel(), SimpleNamespace(model_path="/draft"), make_loader(), server_args=rank.updater.server_args
    )
    draft.__dict__["is_draft_worker"] = True
    draft.model.load_weights(tiny_weights(9).items())
    return draft


@pytest.mark.parametrize("is_version", [True, False])
def test_a_draft_model_with_a_checkpoint_of_its_own_is_never_written(
    root: Path, startup: Path, is_version: bool
) -> None:
    own: dict[str, Any] = {"speculative_draft_model_path": "/draft", "model_path": str(startup)}
    rank = Rank(startup, speculative_algorithm="EAGLE3", **own)
    draft = draft_of(rank)
    rank.plugin.started(None, rank.updater)
    rank.plugin.started(None, draft)
    before = values(draft.model)
    for step in (1, 2, 3):
        path = version(root, step)
        if not is_version:
            (path / "refit.json").unlink()
        model = rank.update(path)
        assert rank.plugin.update(Updater.update_weights_from_disk, draft, str(path), "auto") == model
        assert (model[0], rank.holds(step)) == (True, True)
    assert values(draft.model) == before
    assert draft.model_config.model_path == "/draft"
    assert (rank.plugin.rank_of(rank.updater).aside, list(rank.plugin._ranks)) == (None, [rank.updater])


def test_draft_layers_of_the_models_own_checkpoint_are_updated_by_sglang_after_the_model(
    root: Path, startup: Path
) -> None:
    rank = Rank(
        startup, speculative_algorithm="EAGLE", speculative_draft_model_path=str(startup), model_path=str(startup)
    )
    draft = draft_of(rank)
    rank.plugin.started(None, draft)
    path = version(root, 1)
    assert rank.update(path)[0]
    assert rank.plugin.update(Updater.update_weights_from_disk, draft, str(path), "auto")[0]
    assert rank.holds(1)
    assert values(draft.model) == expected(tiny_weights(1))


@pytest.mark.parametrize("args", [{"pp_size": 2}, {"speculative_algorithm": "EAGLE"}])
def test_it_stands_aside_where_parts_are_updated_one_after_the_other(
    root: Path, startup: Path, args: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(startup, **args)
    for step in (1, 2):
        assert rank.update(version(root, step)) == (True, "Succeeded to update model weights.")
    assert [record.message for record in caplog.records if "stands aside" in record.message] == [
        f"refitd stands aside, updates are SGLang's own: {rank.plugin.rank_of(rank.updater).aside}"
    ]


def torn(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 200)
    sign(folder, "run", 1)


def smaller_than_the_manifest_says(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 200)


def one_byte_flipped(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 500)
    sign(folder, "run", 1)


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    sign(folder, "run", 1)


def a_link(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to("../elsewhere")


def a_damaged_manifest(folder: Path) -> None:
    (folder / "refit.json").write_text("{")


def resaved(change: Callable[[Weights], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        weights = tiny_weights(1)
        change(weights)
        save_file(weights, folder / "model.safetensors")
        sign(folder, "run", 1)

    return spoil


NAN = torch.full((4,), float("nan"), dtype=torch.bfloat16)
BAD = {
    "torn": torn,
    "smaller than the manifest says": smaller_than_the_manifest_says,
    "one byte flipped": one_byte_flipped,
    "garbage": garbage,
    "no weights": no_weights,
    "a link": a_link,
    "a damaged manifest": a_damaged_manifest,
    "a missing tensor": resaved(lambda weights: weights.pop("down.weight")),
    "an extra tensor": resaved(lambda weights: weights.update({"up.weight": torch.ones(2, dtype=torch.bfloat16)})),
    "another shape": resaved(lambda weights: weights.update({"q.weight": torch.ones(8, 2, dtype=torch.bfloat16)})),
    "another dtype": resaved(lambda weights: weights.update({"q.weight": torch.ones(4, 4)})),
    "not a number": resaved(lambda weights: weights.update({"norm.weight": NAN})),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
def test_a_bad_version_is_refused_before_the_first_write(
    root: Path, startup: Path, spoil: Callable[[Path], None], warm: bool
) -> None:
    rank = Rank(startup)
    if warm:
        rank.answer(version(root, 5))
        rank.answer(version(root, 6))
    held, path = values(rank.model), rank.path
    bad = version(root, 1)
    spoil(bad)
    answer = rank.answer(bad)
    assert (answer.outcome, bool(answer.reason)) == (UpdateOutcome.REFUSED, True)
    assert (values(rank.model), rank.path) == (held, path)
    assert rank.answer(version(root, 7)).outcome is UpdateOutcome.SERVED
    assert rank.holds(7)


def test_a_load_format_that_kills_a_stock_server_is_refused(root: Path, startup: Path) -> None:
    rank = Rank(startup)
    answer = rank.answer(version(root, 1), load_format="quux")
    assert (answer.outcome, rank.holds(0), rank.path) == (UpdateOutcome.REFUSED, True, str(startup))
    assert "Unknown load format quux" in answer.reason


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_load_that_fails_is_undone_and_proven_so(root: Path, startup: Path, after: int) -> None:
    rank = Rank(startup)
    Breaking(rank.model, after)
    answer = rank.answer(version(root, 1))
    assert (answer.outcome, rank.holds(0), rank.path) == (UpdateOutcome.RESTORED, True, str(startup))
    assert answer.reason == "RuntimeError: CUDA out of memory"
    assert rank.answer(root / "run" / "v000001").outcome is UpdateOutcome.SERVED
    assert rank.holds(1)


def test_a_replay_that_fails_is_undone_though_the_version_of_before_is_deleted(
    root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(startup)
    rank.answer(version(root, 1))
    rank.answer(version(root, 2))
    from refitd_plugin.update import loading

    original = loading.replay

    def failing(steps: Any, rest: Any, load: Any) -> None:
        original(steps[:3], [], load)
        raise RuntimeError("lost the device")

    monkeypatch.setattr(loading, "replay", failing)
    third = version(root, 3)
    shutil.rmtree(root / "run" / "v000002")
    answer = rank.answer(third)
    assert (answer.outcome, answer.how, rank.holds(2)) == (UpdateOutcome.RESTORED, "replay", True)
    monkeypatch.undo()
    assert rank.answer(third).how == "load"  # the plan may have been at fault: it is learned again
    assert rank.holds(3)


def test_what_cannot_be_put_back_is_unknown(root: Path, startup: Path) -> None:
    rank = Rank(startup)
    rank.answer(version(root, 1))
    Breaking(rank.model, 2, 2)  # the restore fails as well
    answer = rank.answer(version(root, 2))
    assert (answer.outcome, "could not be put back" in answer.reason) == (UpdateOutcome.UNKNOWN, True)
    assert rank.answer(version(root, 3)).outcome is UpdateOutcome.SERVED  # a full load repairs it
    assert rank.holds(3)


@pytest.mark.parametrize("after", [0, 3])
def test_a_loader_that_cannot_load_again_leaves_what_was_served(root: Path, startup: Path, after: int) -> None:
    """As SGLang's for quantised models: it writes so many tensors, and puts so many back."""
    rank = Rank(startup)
    Breaking(rank.model, after, after)
    answer = rank.answer(version(root, 1))
    assert (answer.outcome, rank.holds(0), rank.path) == (UpdateOutcome.RESTORED, True, str(startup))
    assert answer.reason == (
        "RuntimeError: CUDA out of memory; putting it back failed too (RuntimeError: CUDA out of memory), "
        "but every weight is what it was"
    )
    assert rank.answer(root / "run" / "v000001").outcome is UpdateOutcome.SERVED


class Computing(TinyModel):
    """When it has all weights it computes something that is neither parameter nor buffer, as some of SGLang's do.

    `breaks` are where its next loads break off: before a tensor, by its number, or at the very end.
    """

    breaks: list[int | str]

    def load_weights(self, weights: Any) -> None:
        at = self.breaks.pop(0) if self.breaks else None
        for number, item in enumerate(weights):
            if number == at:
                raise RuntimeError("CUDA out of memory")
            super().load_weights([item])
        self.doubled = self.qkv.data * 2
        if at == "end":
            raise RuntimeError("CUDA out of memory")


@pytest.mark.parametrize("breaks", [("end", 0), (0, "end"), ("end", "end")])
@pytest.mark.parametrize("how", ["load", "replay"])
def test_a_load_that_breaks_after_its_last_tensor_has_to_be_undone_by_a_whole_one(
    root: Path, startup: Path, how: str, breaks: tuple[int | str, ...]
) -> None:
    """What is computed then shows in no fingerprint: they are equal here all the time."""
    rank = Rank(startup)
    for step in (1, 2):
        rank.answer(version(root, step))
    if how == "load":
        rank.engine.loading.plan = None
    rank.model.__class__, rank.model.breaks = Computing, list(breaks)
    answer = rank.answer(version(root, 3, tiny_weights(2)))
    assert (answer.outcome, answer.how, rank.holds(2)) == (UpdateOutcome.UNKNOWN, how, True)
    assert rank.answer(version(root, 4)).outcome is UpdateOutcome.SERVED


@pytest.mark.parametrize("first", ["before it asks", "after it asks"])
def test_weights_that_a_broken_load_moved_are_not_believed(root: Path, startup: Path, first: str) -> None:
    """A captured graph reads them where they were."""

    class Moving(TinyModel):
        def load_weights(self, weights: Any) -> None:
            if first == "after it asks":
                next(weights)
            self.qkv.data = self.qkv.data.clone()
            raise RuntimeError("CUDA out of memory")

    rank = Rank(startup)
    rank.model.__class__ = Moving
    assert (rank.answer(version(root, 1)).outcome, rank.holds(0)) == (UpdateOutcome.UNKNOWN, True)


@pytest.mark.parametrize("known", [True, False])
def test_where_nobody_looked_at_what_was_there_it_has_to_be_what_was_once_found(
    root: Path, startup: Path, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is looked at beside the copies, and a fault may come before."""
    rank = Rank(startup)
    if known:
        rank.answer(version(root, 1))
        rank.engine.loading.plan = None
    held = values(rank.model)
    monkeypatch.setattr(FullVersion, "watches", True)
    Breaking(rank.model, 3)
    assert rank.answer(version(root, 2)).outcome is (UpdateOutcome.RESTORED if known else UpdateOutcome.UNKNOWN)
    assert values(rank.model) == held


def test_what_was_not_loaded_from_its_files_is_not_said_to_be_restored(root: Path, startup: Path) -> None:
    rank = Rank(startup)
    rank.answer(version(root, 1))
    rank.model.down.data.mul_(2)  # as /update_weights_from_tensor may have done
    Breaking(rank.model, 2)
    answer = rank.answer(version(root, 2))
    assert (answer.outcome, "fingerprints" in answer.reason) == (UpdateOutcome.UNKNOWN, True)


def test_a_fault_in_the_plugin_itself_reaches_nobody(
    root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refitd_plugin.update import loading, rank_engine

    rank = Rank(startup)

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(loading, "learned", broken)
    assert rank.answer(version(root, 1)).outcome is UpdateOutcome.RESTORED
    assert rank.holds(0)
    monkeypatch.setattr(rank_engine, "contents_of", broken)
    assert rank.answer(version(root, 2)).outcome is UpdateOutcome.REFUSED
    assert rank.holds(0)


def test_a_replay_that_gives_something_else_is_noticed_undone_and_not_done_again(root: Path, startup: Path) -> None:
    class Counting(TinyModel):
        def load_weights(self, weights: Any) -> None:
            weights = dict(weights)
            super().load_weights(weights.items())
            self.norm.data.copy_(weights["norm.weight"] * len(weights))

    rank = Rank(startup)
    rank.model.__class__ = Counting
    for step, how in ((1, "load"), (2, "replay"), (3, "load")):
        assert rank.answer(version(root, step)).how == how
        fresh = Counting()
        fresh.load_weights(tiny_weights(step))
        assert values(rank.model) == values(fresh)
    assert rank.engine.loading.plan.loader_only == "a replay did not give what the loader gives"


def test_a_version_that_changes_while_it_is_looked_at_is_refused(
    root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refitd_plugin.memory import source

    rank, one = Rank(startup), version(root, 1)
    original = source.examine

    def examine(*args: Any, **more: Any) -> Any:
        found = original(*args, **more)
        sign(one, "run", 1)
        return found

    monkeypatch.setattr(source, "examine", examine)
    answer = rank.answer(one)
    assert (answer.outcome, "changed while it was looked at" in answer.reason) == (UpdateOutcome.REFUSED, True)


def test_sglang_that_does_not_take_the_tensors_is_not_trusted(root: Path, startup: Path) -> None:
    rank = Rank(startup)
    rank.updater.loader.load_weights_and_postprocess = lambda *_: None
    answer = rank.answer(version(root, 1))
    assert "did not load the tensors" in answer.reason
    assert answer.outcome is not UpdateOutcome.SERVED


def test_what_is_prepared_is_loaded_unless_it_changed(root: Path, startup: Path) -> None:
    rank = Rank(startup)
    one, two = version(root, 1), version(root, 2)
    rank.engine.prepare(str(one))
    assert rank.answer(one).outcome is UpdateOutcome.SERVED
    rank.engine.prepare(str(two))
    sign(two, "run", 2)
    answer = rank.answer(two)
    assert (answer.outcome, "not what it was" in answer.reason) == (UpdateOutcome.REFUSED, True)
    assert rank.holds(1)


def test_files_that_vanish_while_they_are_loaded_are_loaded_to_their_end(root: Path, startup: Path) -> None:
    rank = Rank(startup)
    one = version(root, 1)
    load = type(rank.model)._load_q

    def vanishing(model: TinyModel, tensor: torch.Tensor) -> None:
        (one / "model.safetensors").unlink(missing_ok=True)
        load(model, tensor)

    rank.model.__class__ = type("Vanishing", (TinyModel,), {"_load_q": vanishing})
    assert rank.answer(one).outcome is UpdateOutcome.SERVED
    assert rank.holds(1)


def test_a_tensor_that_may_be_missing_leaves_what_was_there(root: Path, startup: Path) -> None:
    from refitd_client.validation.validate import Options

    rank = Rank(startup)
    part = version(root, 1, {name: tensor for name, tensor in tiny_weights(1).items() if name != "down.weight"})
    rank.engine.prepare(str(part), Options(allow_missing=("*.*",)))
    assert rank.answer(part).outcome is UpdateOutcome.SERVED
    assert values(rank.model) == expected(tiny_weights(1) | {"down.weight": tiny_weights(0)["down.weight"]})
    assert rank.engine.loading.plan is None


def test_a_model_that_nobody_can_look_at_takes_nothing(root: Path, startup: Path) -> None:
    rank = Rank(startup)
    (startup / "model.safetensors").rename(startup / "pytorch_model.bin")
    answer = rank.answer(version(root, 1))
    assert (answer.outcome, "nothing to hold a version against" in answer.reason) == (UpdateOutcome.REFUSED, True)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_fails_takes_the_others_back(
    root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    members = group(startup, monkeypatch)
    together(members, version(root, 1))
    Breaking(members[broken].model, 3)
    answers = together(members, version(root, 2))
    assert {each.outcome for each in answers} == {UpdateOutcome.RESTORED}
    assert all(f"rank {broken}: RuntimeError" in each.reason for each in answers)
    assert [rank.holds(1) for rank in members] == [True, True]
    assert {rank.path for rank in members} == {str(root / "run" / "v000001")}


def test_a_rank_that_cannot_be_restored_makes_all_unknown(
    root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = group(startup, monkeypatch)
    Breaking(members[1].model, 3, 1)
    assert {each.outcome for each in together(members, version(root, 1))} == {UpdateOutcome.UNKNOWN}


def test_a_rank_that_refuses_keeps_the_others_from_writing(
    root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = group(startup, monkeypatch)

    def stale(*_: object, **__: object) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(members[1].engine.preparing, "here", stale)
    answers = together(members, version(root, 1))
    assert [(each.outcome, each.reason) for each in answers] == [
        (UpdateOutcome.REFUSED, "rank 1: stale file handle")
    ] * 2
    assert [rank.holds(0) for rank in members] == [True, True]


def test_a_store_that_is_gone_while_ranks_decide_makes_the_engine_unknown(
    root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = group(startup, monkeypatch)
    first = members[0].engine

    def gone(*_: Any) -> Any:
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(first._ranks, "decide", gone)
    answer = members[0].answer(version(root, 1))
    assert (answer.outcome, answer.reason) == (UpdateOutcome.UNKNOWN, "RuntimeError: the store is gone")
