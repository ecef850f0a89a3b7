"""Finding what changed and applying it are inverse, on the CPU as by the operations that a GPU runs."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from refitd_client import tensors as torch_tensors
from refitd_client.checkpoint.header import Entry
from refitd_client.delta import Change, Delta, DeltaRefusedError, apply, changed, compare, device
from refitd_client.delta.change import nonfinite_in
from refitd_client.delta.shadow import HostShadow, Shadow
from refitd_client.fingerprint import fingerprint, fingerprints
from refitd_client.tensors import Casts, TensorSource, casts

BASE, VERSION = "exp~v000001", "exp~v000002"
pairs = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]).flatmap(
    lambda kind: st.integers(1, 100).flatmap(
        lambda size: st.tuples(
            hnp.arrays(kind, size, elements=st.integers(0, 3)), hnp.arrays(kind, size, elements=st.integers(0, 3))
        )
    )
)
ALL = 2**62
COUNT = 2**20 + 5
DTYPE = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}


def between(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any], dtype: str | None = None) -> Delta:
    indices = changed(old, new)
    made = Change(
        dtype=dtype or DTYPE[old.itemsize], shape=old.shape, indices=indices, values=new[indices],
        base=fingerprint(old), result=fingerprint(new),
    )  # fmt: skip
    return Delta(base=BASE, version=VERSION, changes={"w": made} if len(indices) else {})


def target(bits: np.ndarray[Any, Any]) -> dict[str, tuple[Entry, np.ndarray[Any, Any]]]:
    return {"w": (Entry(name="w", dtype=DTYPE[bits.itemsize], shape=bits.shape), bits.view(np.uint8))}


@given(pairs)
def test_applying_what_was_found_gives_the_new_tensor(pair: tuple[Any, Any]) -> None:
    """Once, and twice, with known fingerprints and without."""
    old, new = pair
    made, now = between(old, new), old.copy()
    assert apply(made, target(now), {"w": fingerprint(old)}) == {name: fingerprint(new) for name in made.changes}
    assert np.array_equal(now, new)
    apply(made, target(now))
    assert np.array_equal(now, new)


def test_bits_are_compared_and_not_values() -> None:
    """A zero that became negative is a change; a NaN that stayed is none."""
    old = np.array([0.0, np.nan, 1.0], np.float32).view(np.uint32)
    new = np.array([-0.0, np.nan, 1.0], np.float32).view(np.uint32)
    assert changed(old, new).tolist() == [0]


def test_changes_are_found_on_both_sides_of_a_block() -> None:
    old = np.zeros(3 * 2**18 + 5, np.uint16)
    places = [0, 2**18 - 1, 2**18, 2**19, 3 * 2**18 + 4]
    new = old.copy()
    new[places] = 7
    assert changed(old, new).tolist() == places
    assert changed(old, new).dtype == np.uint32


def test_other_tensors_are_not_compared() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        changed(np.zeros(3, np.uint16), np.zeros(3, np.uint32))


def test_a_half_applied_delta_is_mended_by_a_whole_one() -> None:
    """A reader that was killed in the middle applies it again."""
    old, new = np.zeros(100, np.uint16), np.arange(100, dtype=np.uint16)
    made = between(old, new)
    half = np.where(np.arange(100) < 50, new, old)
    apply(made, target(half))
    assert np.array_equal(half, new)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (None, "is not there"),
        (Entry(name="w", dtype="F16", shape=(100,)), "it is F16"),
        (Entry(name="w", dtype="BF16", shape=(10, 10)), r"shape \[10, 10\]"),
    ],
)
def test_a_delta_for_another_model_writes_nothing(entry: Entry | None, says: str) -> None:
    """Not even to the tensors that fit."""
    old, new = np.zeros(100, np.uint16), np.ones(100, np.uint16)
    fits, other = old.copy(), old.copy()
    one = between(old, new).changes["w"]
    targets = {"fits": (Entry(name="fits", dtype="BF16", shape=(100,)), fits.view(np.uint8))}
    if entry is not None:
        targets["w"] = (entry, other.view(np.uint8))
    with pytest.raises(DeltaRefusedError, match=says):
        apply(Delta(base=BASE, version=VERSION, changes={"fits": one, "w": one}), targets)
    assert not fits.any()
    assert not other.any()


@pytest.mark.parametrize("known", [True, False])
def test_a_delta_on_another_base_is_seen_by_the_result(known: bool) -> None:
    """The element that differs is one that the delta does not list."""
    old, new = np.zeros(100, np.uint16), np.zeros(100, np.uint16)
    new[3] = 1
    wrong = old.copy()
    wrong[50] = 9
    with pytest.raises(DeltaRefusedError, match="load a full version"):
        apply(between(old, new), target(wrong), {"w": fingerprint(wrong)} if known else None)


def sources(state: dict[str, torch.Tensor]) -> list[TensorSource]:
    return [torch_tensors.torch_source(name, tensor, Casts()) for name, tensor in state.items()]


def some_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(300, 40, generator=generator).to(torch.bfloat16),
        "transposed": torch.randn(30, 70, generator=generator).T,
        "flags": torch.zeros(50, dtype=torch.bool),
        "eight": torch.randn(64, generator=generator).to(torch.float8_e4m3fn),
        "long": torch.arange(20),
        "empty": torch.zeros(0, 4),
        "one": torch.tensor(1.5),
    }


@pytest.mark.parametrize("kind", [HostShadow, device.DeviceShadow, device.StreamShadow])
def test_each_shadow_finds_the_same(kind: type[Shadow], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for tensors on a GPU as well: their operations run on any device. In small groups and chunks."""
    monkeypatch.setattr(device, "CHUNK", 2**15)
    monkeypatch.setattr(device, "LONGEST", 2**12)
    monkeypatch.setattr(compare, "ROOM", 60)
    monkeypatch.setattr(device, "_CHANGES_ROOM", 60)
    state = some_state()
    shadow = kind()
    known = shadow.keep(sources(state))
    assert known == dict(zip(state, fingerprints(list(state.values())), strict=True))
    assert shadow.find(sources(state), ALL).count == 0
    state["w"][0, 0] = 7
    state["w"][299, 39] = -7
    state["w"][100:110, 3] += 1
    state["transposed"][69, 29] = 0
    state["flags"][49] = True
    state["long"][3] = -1
    state["one"].fill_(2.0)
    changes = shadow.find(sources(state), ALL)
    found = changes.found
    assert changes.count == sum(len(each.indices) for each in found.values())
    assert found.keys() == changes.shifts.keys()
    assert found.keys() == {"w", "transposed", "flags", "long", "one"}
    assert found["w"].indices.tolist() == [0, *range(4003, 4403, 40), 11999]
    assert found["w"].indices.dtype == np.uint32
    assert found["transposed"].indices.tolist() == [2099]
    for name, change in found.items():
        bits = state[name].contiguous().reshape(-1).view(torch.uint8).numpy().view(change.values.dtype)
        assert np.array_equal(change.values, bits[change.indices])
        assert (known[name] + changes.shifts[name]) % 2**64 == fingerprints([state[name]])[0]
    gathered = shadow.gather({name: change.indices for name, change in found.items()})
    assert all(np.array_equal(gathered[name], change.values) for name, change in found.items())
    assert shadow.find(sources(state), ALL).found == {}


@pytest.mark.parametrize("kind", [HostShadow, device.DeviceShadow, device.StreamShadow])
def test_tensors_that_are_elsewhere_now_are_found_there(kind: type[Shadow]) -> None:
    """What was written down of where they lay is not used again, and what was in their place is not read."""
    state = some_state()
    shadow = kind()
    shadow.keep(sources(state))
    shadow.find(sources(state), ALL)
    moved = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.zero_()
    moved["w"][5, 5] = 3
    moved["long"][0] = 9
    for _ in range(2):
        found = shadow.find(sources(moved), ALL).found
        assert {name: each.indices.tolist() for name, each in found.items()} == {"w": [205], "long": [0]}
        moved["w"][5, 5] = float(moved["w"][5, 5]) + 2
        moved["long"][0] += 1
    state |= {"w": moved["w"], "one": moved["one"]}  # some of them, and in another order
    backwards = {name: state[name] if name in {"w", "one"} else moved[name] for name in reversed(state)}
    assert shadow.find(sources(backwards), ALL).found.keys() == {"w", "long"}


def test_rooms_that_lie_elsewhere_now_are_no_reason_to_cut_the_copy_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken anew for each step, from what the trainer has left; to cut takes tens of milliseconds."""
    cuts: list[int] = []
    lanes: list[Any] = []  # kept: their rooms are nobody else's then
    make, cut = device._Lane.__init__, device.chunked
    monkeypatch.setattr(device._Lane, "__init__", lambda self, on: (lanes.append(self), make(self, on))[1])
    monkeypatch.setattr(device, "chunked", lambda *each: (cuts.append(1), cut(*each))[1])
    monkeypatch.setattr(device, "CHUNK", 2**15)
    monkeypatch.setattr(device, "LONGEST", 2**12)
    state = {name: tensor for name, tensor in some_state().items() if tensor.is_contiguous()}  # others are made anew
    shadow = device.StreamShadow()
    shadow.keep(sources(state))
    for step in range(4):
        state["w"][step, 5] += 1
        found = shadow.find(sources(state), ALL).found
        assert {name: each.indices.tolist() for name, each in found.items()} == {"w": [40 * step + 5]}
    assert len({tuple(lane.places) for lane in lanes}) == 4
    assert len(cuts) == 1


@pytest.mark.parametrize("kind", [HostShadow, device.DeviceShadow, device.StreamShadow])
def test_with_too_many_changes_a_shadow_is_brought_up_to_date_all_the_same(kind: type[Shadow]) -> None:
    """Nobody wants to know which, and everybody how many, what the fingerprints are, and that none is NaN."""
    state = some_state()
    shadow = kind()
    known = shadow.keep(sources(state))
    state["w"] += 1
    state["transposed"][3, 4] = float("inf")
    changes = shadow.find(sources(state), 5)
    assert changes.count > 5
    assert changes.found == {}
    assert changes.nonfinite == {"transposed": 1}
    now = {name: (known[name] + changes.shifts.get(name, 0)) % 2**64 for name in known} | changes.anew
    assert now == dict(zip(state, fingerprints(list(state.values())), strict=True))
    assert shadow.find(sources(state), 5).count == 0


@pytest.mark.parametrize("kind", [HostShadow, device.DeviceShadow, device.StreamShadow])
def test_a_shadow_is_of_what_is_published_and_not_of_the_masters(kind: type[Shadow]) -> None:
    """A master that moves by less than its published dtype can tell has not changed."""
    masters = {"w": torch.linspace(1, 2, 500), "kept": torch.ones(9)}

    def cast() -> list[TensorSource]:
        rules = casts({"w": torch.bfloat16})
        return [torch_tensors.torch_source(name, tensor, rules) for name, tensor in masters.items()]

    shadow = kind()
    known = shadow.keep(cast())
    assert known == dict(zip(masters, fingerprints([masters["w"].bfloat16(), masters["kept"]]), strict=True))
    masters["w"] += 1e-6
    masters["w"][[7, 400]] = 3
    changes = shadow.find(cast(), ALL)
    found = changes.found
    assert found.keys() == {"w"}
    assert {7, 400} <= set(found["w"].indices.tolist())
    assert len(found["w"].indices) < 10
    assert found["w"].values.dtype == np.uint16
    assert (known["w"] + changes.shifts["w"]) % 2**64 == fingerprints([masters["w"].bfloat16()])[0]


def change_to(values: "np.ndarray[tuple[int], np.dtype[np.uint16]]") -> Change:
    indices = np.arange(len(values), dtype=np.uint32)
    return Change(dtype="BF16", shape=(len(values),), indices=indices, values=values, base=0, result=0)


@pytest.mark.parametrize("at", [0, 2**20 - 1, 2**20, COUNT - 1])
def test_one_value_in_a_million_is_found_in_whichever_piece_it_lies(at: int) -> None:
    data = np.zeros(2 * COUNT, np.uint16)
    changes = {"a": change_to(data[:COUNT]), "b": change_to(data[COUNT:])}  # they follow each other, as in a file
    assert nonfinite_in(changes) == {}
    data[COUNT + at] = 0x7FC0
    assert nonfinite_in(changes) == {"b": 1}
    assert nonfinite_in({"a": change_to(np.zeros(0, np.uint16))}) == nonfinite_in({}) == {}
