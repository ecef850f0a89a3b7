"""A version that is taken from a trainer's memory, on a rank with SGLang's own flow and no server."""

import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from refitd_client.contract.plugin import UpdateOutcome, answers_in
from refitd_client.transport import exporter
from refitd_client.transport.memory import SharedTensors
from refitd_client.transport.offer import DevicePlace, OfferedTensor, OfferLayout, offer_with
from refitd_client.transport.offer_file import ExportedTensors, make_secret
from refitd_plugin.memory import offered
from refitd_plugin.memory.imported import IpcHandleCache, OpenedMemory
from refitd_plugin.memory.offered import OfferedMemory, OfferedVersion, memory_of, structure_of
from refitd_plugin.memory.source import SourceRefusedError, VersionPlace, reference_in
from support.exporting import exporting, fill, offer_of, shared
from support.mini_sglang import tiny_weights
from support.tiny_rank import Breaking, Rank, group, together, version


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "root" / ".refitd").mkdir(parents=True)
    yield tmp_path / "root"
    exporter.end(tmp_path / "root" / "run")


@pytest.fixture
def startup(tmp_path: Path) -> Path:
    folder = tmp_path / "startup"
    folder.mkdir()
    save_file(tiny_weights(0), folder / "model.safetensors")
    return folder


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[SharedTensors]:
    made = shared(tiny_weights(5), tmp_path)
    yield made
    made.close()


def prepare(rank: Rank, root: Path, exported: ExportedTensors, step: int = 5) -> Any:
    path = str(root / "run" / f"v{step:06d}")
    return rank.engine.prepare(path, offer=f"run/{exported.path.name}")


def take(rank: Rank, root: Path, exported: ExportedTensors, step: int = 5) -> Any:
    prepare(rank, root, exported, step)
    return rank.answer(root / "run" / f"v{step:06d}")


@pytest.mark.parametrize("learned", [False, True])
def test_what_is_offered_is_served_by_the_loader_and_by_replay(
    root: Path, startup: Path, trainer: SharedTensors, learned: bool
) -> None:
    rank = Rank(startup)
    if learned:
        for step in (1, 2):
            rank.answer(version(root, step))
    with exporting(root, 5, trainer) as exported:
        answer = take(rank, root, exported)
        assert exported.take_back(0.0)  # nobody holds it any more
    assert (answer.outcome, answer.version, answer.how) == (
        UpdateOutcome.SERVED,
        "run~v000005",
        "replay" if learned else "load",
    )
    assert rank.holds(5)
    assert answer.proved >= 3
    assert rank.path == str(root / "run" / "v000005")
    trainer.tensors["norm.weight"].fill_(9)  # the next step
    assert rank.holds(5)


def test_what_was_taken_is_served_when_it_is_told_again_after_the_offer_is_over(
    root: Path, startup: Path, trainer: SharedTensors
) -> None:
    """As the service tells it again where SGLang could not flush its cache."""
    rank = Rank(startup)
    with exporting(root, 5, trainer) as exported:
        first = take(rank, root, exported)
        assert exported.take_back(0.0)
    again = rank.answer(root / "run" / "v000005")
    assert (again.outcome, again.version, again.contents) == (UpdateOutcome.SERVED, "run~v000005", first.contents)
    assert rank.holds(5)


def test_a_trainer_that_dies_after_its_offer_was_looked_at_leaves_an_offer_that_nobody_takes(
    root: Path, startup: Path, trainer: SharedTensors
) -> None:
    rank = Rank(startup)
    with exporting(root, 5, trainer) as exported:
        prepare(rank, root, exported)
        exporter.end(root / "run")  # as when its process ends: the file is still there
        assert exported.path.exists()
        assert rank.answer(root / "run" / "v000005").outcome is UpdateOutcome.REFUSED
        with pytest.raises(SourceRefusedError, match="its trainer is gone"):
            prepare(rank, root, exported)
    assert rank.holds(0)


@pytest.mark.parametrize("how", ["withdrawn", "gone", "changed"])
def test_tensors_that_are_not_lent_to_the_end_are_not_served(
    root: Path, startup: Path, trainer: SharedTensors, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(startup)
    for step in (1, 2):
        rank.answer(version(root, step))
    with exporting(root, 5, trainer) as exported:
        way = prepare(rank, root, exported)
        load = way.loading.load

        def loads(*args: Any, **kwargs: Any) -> Any:
            if how == "changed":
                trainer.tensors["q.weight"].add_(1)
            done = load(*args, **kwargs)
            if how == "withdrawn":
                assert not exported.take_back(0.0)
            elif how == "gone":
                exporter.end(root / "run")
            return done

        monkeypatch.setattr(way.loading, "load", loads)
        answer = rank.answer(root / "run" / "v000005")
        assert answer.outcome is UpdateOutcome.RESTORED
        assert rank.holds(2)
        assert exported.take_back(0.0)
    assert rank.path == str(root / "run" / "v000002")


def test_a_load_that_breaks_is_put_back_and_the_trainer_has_its_tensors_again(
    root: Path, startup: Path, trainer: SharedTensors
) -> None:
    rank = Rank(startup)
    Breaking(rank.model, 3)
    with exporting(root, 5, trainer) as exported:
        assert take(rank, root, exported).outcome is UpdateOutcome.RESTORED
        assert exported.take_back(0.0)
    assert rank.holds(0)


def test_what_was_taken_from_memory_is_put_back_from_its_files(
    root: Path, startup: Path, trainer: SharedTensors
) -> None:
    rank = Rank(startup)
    with exporting(root, 5, trainer) as exported:
        take(rank, root, exported)
    version(root, 5)  # its files have followed
    fill(trainer, tiny_weights(6))
    with exporting(root, 6, trainer) as exported:
        prepare(rank, root, exported, 6)
        Breaking(rank.model, 3)
        rank.engine.loading.plan = None
        assert rank.answer(root / "run" / "v000006").outcome is UpdateOutcome.RESTORED
    assert rank.holds(5)


def test_nothing_is_taken_while_there_is_no_way_back(root: Path, startup: Path, trainer: SharedTensors) -> None:
    """The files of what is served never came: the next version comes by its files."""
    rank = Rank(startup)
    with exporting(root, 5, trainer) as exported:
        take(rank, root, exported)
    fill(trainer, tiny_weights(6))
    with exporting(root, 6, trainer) as exported, pytest.raises(SourceRefusedError, match="has no files yet"):
        prepare(rank, root, exported, 6)
    assert rank.answer(version(root, 7)).outcome is UpdateOutcome.SERVED
    assert rank.holds(7)


def test_one_that_gets_no_files_is_no_reason_to_refuse_the_next(
    root: Path, startup: Path, trainer: SharedTensors
) -> None:
    rank = Rank(startup)
    for step in (5, 6, 7):
        fill(trainer, tiny_weights(step))
        with exporting(root, step, trainer, files=False) as exported:
            assert take(rank, root, exported, step).outcome is UpdateOutcome.SERVED
        assert rank.holds(step)


def test_where_one_without_files_cannot_be_put_back_the_contents_are_unknown(
    root: Path, startup: Path, trainer: SharedTensors
) -> None:
    rank = Rank(startup)
    with exporting(root, 5, trainer, files=False) as exported:
        take(rank, root, exported)
    fill(trainer, tiny_weights(6))
    with exporting(root, 6, trainer, files=False) as exported:
        prepare(rank, root, exported, 6)
        Breaking(rank.model, 3)
        rank.engine.loading.plan = None
        assert rank.answer(root / "run" / "v000006").outcome is UpdateOutcome.UNKNOWN
    assert rank.answer(version(root, 4)).outcome is UpdateOutcome.SERVED  # the service's next load is of one with files
    assert rank.holds(4)


def test_an_offer_that_does_not_fit_the_model_is_refused_while_the_engine_serves(
    root: Path, startup: Path, tmp_path: Path
) -> None:
    rank = Rank(startup)
    weights = tiny_weights(5)
    for wrong in (weights | {"more.weight": torch.zeros(2)}, {"q.weight": weights["q.weight"]}):
        made = shared(wrong, tmp_path)
        with exporting(root, 5, made) as exported, pytest.raises(SourceRefusedError, match="does not fit the model"):
            prepare(rank, root, exported)
        made.close()


@pytest.mark.parametrize("own", [False, True])
def test_a_head_of_its_own_is_not_taken_from_memory_into_a_model_that_ties_it(
    root: Path, startup: Path, tmp_path: Path, own: bool
) -> None:
    weights = tiny_weights(0)
    weights["embed_tokens.weight"] = weights.pop("embed.weight")
    save_file(weights, startup / "model.safetensors")
    (startup / "config.json").write_text('{"tie_word_embeddings": true}')
    made = shared(weights | {"lm_head.weight": weights["embed_tokens.weight"] + own}, tmp_path)
    with exporting(root, 5, made) as exported:
        place, offer = VersionPlace(root, "run/v000005"), f"run/{exported.path.name}"
        cache = IpcHandleCache()
        imported, opened = cache.import_offer(root, offer)
        with pytest.raises(SourceRefusedError, match=r"differs from embed_tokens\.weight") if own else nullcontext():
            memory_of(
                place, imported.offer, imported.offer, opened, cache, partial(reference_in, startup), on_device=False
            )
        imported.close()
        cache.close()
    made.close()


def test_an_offer_of_another_version_or_another_host_or_without_the_secret_is_refused(
    root: Path, startup: Path, trainer: SharedTensors
) -> None:
    rank = Rank(startup)
    with exporting(root, 5, trainer) as exported:
        with pytest.raises(SourceRefusedError, match="whose files will not be at"):
            prepare(rank, root, exported, 6)
        sealed = exported.path.read_bytes()
        (root / "run" / ".offer-forged").write_bytes(sealed[:-1] + (b"1" if sealed.endswith(b"0") else b"0"))
        with pytest.raises(SourceRefusedError, match="not made with this root's secret"):
            rank.engine.prepare(str(root / "run" / "v000005"), offer="run/.offer-forged")
        here = offer_of("run~v000005", trainer.tensors)
        elsewhere = offer_with(msgspec.structs.replace(here.layout, host="elsewhere"), here.version, here.fingerprints)
        secret = (root / ".refitd" / "handover.key").read_bytes()
        with (
            ExportedTensors(root / "run", elsewhere, secret) as other,
            pytest.raises(SourceRefusedError, match="of host 'elsewhere'"),
        ):
            prepare(rank, root, other)


def test_a_promised_version_that_nobody_prepared_is_refused_and_no_rank_waits_for_another(
    root: Path, startup: Path, trainer: SharedTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = group(startup, monkeypatch)
    with exporting(root, 5, trainer) as exported:
        prepare(members[0], root, exported)  # and the other was restarted
        answers = together(members, root / "run" / "v000005")
    assert {answer.outcome for answer in answers} == {UpdateOutcome.REFUSED}
    assert all(member.holds(0) for member in members)


def test_what_an_older_offer_named_is_not_touched_once_a_newer_one_was_looked_at(
    root: Path, startup: Path, trainer: SharedTensors
) -> None:
    """What the older one opened was given back: on a GPU to read there would be the end of the engine."""
    rank = Rank(startup)
    with exporting(root, 5, trainer) as exported:
        older = prepare(rank, root, exported)
        with suppress(SourceRefusedError), exporting(root, 6, trainer) as newer:
            prepare(rank, root, newer, 6)
        rank.engine._prepared = older
        ok, message = rank.update(root / "run" / "v000005")
        assert (ok, answers_in(message)[0].outcome) == (False, UpdateOutcome.REFUSED)
    assert rank.holds(0)


def test_a_secret_that_was_replaced_is_not_accepted_any_more(root: Path, startup: Path, trainer: SharedTensors) -> None:
    rank = Rank(startup)
    with exporting(root, 5, trainer) as exported:
        prepare(rank, root, exported)
        (root / ".refitd" / "handover.key").unlink()
        make_secret(root)
        with pytest.raises(SourceRefusedError, match="not made with this root's secret"):
            prepare(rank, root, exported)


def test_files_that_follow_are_opened_without_being_asked_for(
    root: Path, startup: Path, trainer: SharedTensors
) -> None:
    """The next prepare does not wait for it, and a folder that is deleted then can still be put back."""
    rank = Rank(startup)
    with exporting(root, 5, trainer) as exported:
        take(rank, root, exported)
    folder = version(root, 5)
    deadline = time.monotonic() + 30
    while isinstance(rank.engine.restore_point.served_state.source, OfferedMemory):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shutil.rmtree(folder)
    fill(trainer, tiny_weights(6))
    with exporting(root, 6, trainer) as exported:
        prepare(rank, root, exported, 6)
        Breaking(rank.model, 3)
        rank.engine.loading.plan = None
        assert rank.answer(root / "run" / "v000006").outcome is UpdateOutcome.RESTORED
    assert rank.holds(5)


def on_gpus(plan: Any, place: str, monkeypatch: pytest.MonkeyPatch) -> OfferedVersion:
    """A tensor on GPU `place`, and a model on GPU-0 with a plan."""
    monkeypatch.setattr(offered, "uuid_of", lambda _: "GPU-0")
    tensor = OfferedTensor("w", "BF16", (2, 2), DevicePlace(place, b"h" * 64, 1, 0))
    layout = OfferLayout(host="a", boot="b", pid=1, life="c", tensors=(tensor,))
    opened = OpenedMemory(Path("run"), layout)
    opened.structure = structure_of(opened)
    source: Any = SimpleNamespace(
        opened=opened, structure=opened.structure, place=SimpleNamespace(folder=None), label="", digest="", nbytes=0
    )
    loading: Any = SimpleNamespace(plan=plan, has=lambda _: True, make_ready=lambda _: SimpleNamespace(plan=plan))
    return OfferedVersion(source=source, loading=loading, imported=cast("Any", None), device=torch.device("cuda", 0))


def plan(**facts: Any) -> Any:
    return SimpleNamespace(**({"replays": True, "proven": True, "residual": (), "copies": ()} | facts))


@pytest.mark.parametrize("known", [None, plan(proven=False), plan(replays=False)])
@pytest.mark.parametrize("place", ["GPU-0", "GPU-1"])
def test_from_a_gpu_nothing_is_taken_before_it_is_known_how_the_model_is_loaded(
    known: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader may work in place on what it is given, and there that is the trainer's own."""
    with pytest.raises(SourceRefusedError, match="after a load from files"):
        on_gpus(known, place, monkeypatch).make_ready()


def test_from_another_gpu_only_what_is_copied_as_it_is_can_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    computing = plan(residual=("w",))
    on_gpus(computing, "GPU-0", monkeypatch).make_ready()
    on_gpus(plan(), "GPU-1", monkeypatch).make_ready()
    with pytest.raises(SourceRefusedError, match="on another GPU"):
        on_gpus(computing, "GPU-1", monkeypatch).make_ready()


def test_what_a_loader_works_on_is_a_copy_and_the_rest_is_where_it_lies(
    root: Path, startup: Path, trainer: SharedTensors
) -> None:
    rank = Rank(startup)
    with exporting(root, 5, trainer) as exported:
        source = prepare(rank, root, exported).source
        views = source.tensors()
        given = replace(source, loaded=frozenset({"norm.weight"})).tensors()
    assert given.keys() == views.keys()
    elsewhere = {name for name, tensor in given.items() if tensor.data_ptr() != views[name].data_ptr()}
    assert elsewhere == {"norm.weight"}
