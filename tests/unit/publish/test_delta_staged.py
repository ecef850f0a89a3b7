"""Deltas together with slots and with publications that end in the background."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from test_delta_publish import serve

from refitd_client import DeltaRules, Publication, PublishOptions, StorageError, WeightPublisher
from refitd_client.checkpoint.header import Entry
from refitd_client.contract.manifest import fitting_fingerprints
from refitd_client.contract.naming import layout_of, slot_name, slots_path
from refitd_client.contract.states import Kind
from refitd_client.delta import apply, read_delta
from refitd_client.fingerprint import fingerprint
from refitd_client.publish.run_folder import RunFolder
from support import durable_effects, published
from support.handed_back import hand_back
from support.stand_in_service import StandIn, make_engine, stand_in

State = dict[str, NDArray[np.float32]]


@pytest.fixture
def service() -> Iterator[StandIn]:
    with stand_in() as service:
        service.engines = [make_engine(version=None, run="run")]
        yield service


@pytest.fixture
def publisher(tmp_path: Path, service: StandIn) -> Iterator[WeightPublisher]:
    rules = DeltaRules(threshold=0.5, anchor_every=2)
    with WeightPublisher(
        tmp_path, "run", service.url, options=PublishOptions(max_shard_bytes=256, delta_rules=rules)
    ) as publisher:
        yield publisher


def stage(publisher: WeightPublisher, state: State, step: int) -> Publication:
    return publisher.publish(state, step=step, transport="delta", block="staged")


def copied(state: State) -> State:
    return {name: tensor.copy() for name, tensor in state.items()}


def result(publication: Publication, base: State) -> State:
    """A delta's, which is held against its fingerprints; of a full version what is in it."""
    if publication.kind is Kind.FULL:
        published.check(publication.path)
        return published.tensors(publication.path)
    state = copied(base)
    targets = {
        name: (Entry(name=name, dtype="F32", shape=tensor.shape), tensor.reshape(-1).view(np.uint8))
        for name, tensor in state.items()
    }
    apply(read_delta(publication.path / "weights.refit-delta"), targets)
    return state


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_a_staged_delta_is_of_the_tensors_as_they_were(
    publisher: WeightPublisher, service: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may change as soon as `publish` returns, and the next delta leads on from there."""
    state = durable_effects.weights(1)
    first = stage(publisher, state, 1).committed(30)
    serve(service, first)
    before, go = copied(state), Event()
    record = RunFolder.record
    monkeypatch.setattr(RunFolder, "record", lambda *args: (go.wait(30), record(*args)))
    state["a"][0, :2] = 5
    then = copied(state)
    staged = stage(publisher, state, 2)
    state["a"][:] = 77
    assert not staged.path.exists()
    go.set()
    second = staged.committed(30)
    assert (second.kind, second.base) == (Kind.DELTA, first.version_id)
    assert same(result(second, before), then)
    assert {"compare", "encode", "write"} <= second.timings.keys()


@pytest.mark.parametrize("asked", [{"transport": "delta", "block": "staged"}, {"transport": "auto"}])
def test_a_staged_version_says_before_it_is_committed_whether_it_is_a_delta_and_why_not(
    publisher: WeightPublisher, service: StandIn, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    state = durable_effects.weights(1)
    go, record = Event(), RunFolder.record
    staged: list[Publication] = []
    for step in (1, 2):
        go.clear()
        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "record", lambda *args: (go.wait(30), record(*args)))
            staged.append(publisher.publish(state, step=step, **asked))
            known = staged[-1].kind, staged[-1].why_full, staged[-1].density
            assert not staged[-1].path.exists()
            go.set()
            done = staged[-1].committed(30)
        assert known == (done.kind, done.why_full, done.density)
        serve(service, done)
        state["a"][0, 0] += 1
    assert [each.kind for each in staged] == [Kind.FULL, Kind.DELTA]
    assert (staged[0].why_full or "").startswith("nothing to compare with")


def test_a_staged_adapter_is_one(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    save_file({"a.lora_A.weight": np.ones((8, 4), np.float32)}, folder / "adapter_model.safetensors")
    with WeightPublisher(tmp_path / "root", "run") as publisher:
        for step, transport in enumerate(("disk", "delta"), 1):
            staged = publisher.publish(folder, step=step, block="staged", transport=transport)
            assert (staged.kind, staged.committed(30).kind) == (Kind.LORA, Kind.LORA)


def test_a_delta_after_a_version_that_failed_in_the_background_is_none(
    publisher: WeightPublisher, service: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its tensors were compared with was never published, and what changed in it would be missing."""
    state = durable_effects.weights(1)
    serve(service, stage(publisher, state, 1).committed(30))
    base = copied(state)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "record", no_disk)
        state["a"][0, 0] += 1
        failed = stage(publisher, state, 2)
        with pytest.raises(StorageError):
            failed.committed(30)
    state["a"][0, 1] += 1
    third = stage(publisher, state, 3).committed(30)
    assert third.kind is Kind.FULL
    assert same(result(third, base), state)


def no_disk(*_: object) -> None:
    raise OSError(5, "Input/output error")


def test_a_base_that_was_recycled_is_not_what_is_compared_with(
    tmp_path: Path, publisher: WeightPublisher, service: StandIn
) -> None:
    """The copy that finds changes is not a version's files: those are written again meanwhile."""
    state, counts = durable_effects.weights(1), itertools.count()
    kinds: list[Kind] = []
    served: Publication | None = None
    base = copied(state)
    inodes: list[set[int]] = []
    for step in range(1, 8):
        state["a"].reshape(-1)[next(counts)] += 1
        publication = stage(publisher, state, step).committed(30)
        kinds.append(publication.kind)
        assert same(result(publication, base), state)
        if publication.kind is Kind.FULL:
            inodes.append({path.stat().st_ino for path in published.shards(publication.path)})
        elif served is not None and served.kind is Kind.FULL:
            hand_back(tmp_path, served.path)
        served, base = publication, copied(state)
        serve(service, served)
    assert kinds == [Kind.FULL, Kind.DELTA] * 3 + [Kind.FULL]
    assert inodes[0] == inodes[1] == inodes[2], "each full version was written into the files of the one before"


def test_a_delta_takes_no_slot(tmp_path: Path, publisher: WeightPublisher, service: StandIn) -> None:
    """Not even one that has no files, as a delta has no shards."""
    state = durable_effects.weights(1)
    serve(service, stage(publisher, state, 1).committed(30))
    slot = durable_effects.make_slot(tmp_path)
    empty = slot.parent / slot_name(layout_of([]), "e" * 32)
    empty.mkdir()
    state["a"][0, 0] += 1
    assert stage(publisher, state, 2).committed(30).kind is Kind.DELTA
    assert sorted((tmp_path / slots_path("run")).iterdir()) == sorted([slot, empty])


@pytest.mark.parametrize("block", ["committed", "staged"])
@pytest.mark.parametrize("recycle", [False, True])
def test_full_versions_have_fingerprints_when_they_are_asked_for(tmp_path: Path, block: str, recycle: bool) -> None:
    """Tensors of many pieces, of a part of one, and of nothing."""
    chance = np.random.default_rng(0)
    state = {
        "many": chance.standard_normal((700, 900), dtype=np.float32),
        "long": chance.integers(0, 2**40, 70_001),
        "short": np.ones(3, np.float16),
        "none": np.zeros((0, 4), np.float32),
    }
    with WeightPublisher(tmp_path, "run", options=PublishOptions(fingerprints=True)) as publisher:
        if recycle:
            hand_back(tmp_path, publisher.publish(state, step=1).path)
        done = publisher.publish(state, step=2, block=block)  # type: ignore[call-overload]
        path = done.committed(30).path if block == "staged" else done.path
        assert not recycle or not list((tmp_path / slots_path("run")).iterdir())
    bits = {name: array.reshape(-1).view(f"u{array.itemsize}") for name, array in state.items()}
    assert published.check(path).fingerprints == fitting_fingerprints(
        {name: fingerprint(each) for name, each in bits.items()}
    )
