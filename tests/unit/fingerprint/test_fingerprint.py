"""A tensor's fingerprint is what `definition` says, whoever computes it; it sees what goes wrong with updates."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from refitd_client.fingerprint import bits_of, device, fingerprint, fingerprints, share, to_text, updated, width_of
from refitd_client.fingerprint.host import MASK, MIXES, ROW
from refitd_client.tensors import DTYPES
from support.fingerprint_definition import mixed, share_of, to_int

TYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
widths = st.sampled_from([1, 2, 4, 8])


def random_bits(width: int, count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 2 ** (8 * width), count, dtype=TYPES[width])


def by_definition(bits: np.ndarray[Any, Any]) -> int:
    return sum(share_of(index, int(value), bits.itemsize) for index, value in enumerate(bits)) & MASK


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 5, ROW - 1, ROW, ROW + 1, 2 * ROW + 17])
def test_numpy_and_torch_compute_what_the_definition_says(width: int, count: int) -> None:
    bits = random_bits(width, count)
    expected = by_definition(bits)
    assert fingerprint(bits) == expected
    assert to_int(device.fingerprint(torch.from_numpy(bits.view(SIGNED[width])))) == expected
    assert share(np.arange(count, dtype=np.uint64), bits) == expected


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_numpy_and_torch_agree_over_many_blocks(width: int) -> None:
    """More rows than one block of numpy's has, and a part of a row."""
    bits = random_bits(width, 37 * ROW + 5)
    assert fingerprint(bits) == to_int(device.fingerprint(torch.from_numpy(bits.view(SIGNED[width]))))


@pytest.mark.parametrize("width", [1, 2])
def test_the_bijection_is_one(width: int) -> None:
    values = {mixed(bits, width) for bits in range(2 ** (8 * width))}
    assert len(values) == 2 ** (8 * width)
    assert all(factor % 2 for mix in MIXES.values() for _, factor in mix.rounds)


@given(widths.flatmap(lambda width: hnp.arrays(TYPES[width], st.integers(1, 200))), st.data())
def test_an_update_gives_the_fingerprint_of_the_whole(before: np.ndarray[Any, Any], data: st.DataObject) -> None:
    """Also with indices in any order, as an update of parts gives them."""
    places = data.draw(st.lists(st.integers(0, len(before) - 1), unique=True))
    indices = np.array(places, dtype=np.uint32)
    after = before.copy()
    after[indices] = data.draw(hnp.arrays(before.dtype, len(indices)))
    assert updated(fingerprint(before), indices, before[indices], after[indices]) == fingerprint(after)


@given(widths.flatmap(lambda width: hnp.arrays(TYPES[width], st.integers(1, 100))), st.data())
def test_one_changed_element_never_goes_unseen(before: np.ndarray[Any, Any], data: st.DataObject) -> None:
    after = before.copy()
    index = data.draw(st.integers(0, len(before) - 1))
    after[index] ^= before.dtype.type(data.draw(st.integers(1, 2 ** (8 * before.itemsize) - 1)))
    assert fingerprint(after) != fingerprint(before)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_what_goes_wrong_with_updates_is_seen(width: int) -> None:
    """All at once: each of these tensors is one that a bug could make of the first."""
    bits = random_bits(width, 8 * ROW)
    sign = TYPES[width](2 ** (8 * width - 1))
    wrong = [
        bits,
        np.roll(bits, 1),
        np.roll(bits, ROW),
        bits[::-1],
        bits.reshape(-1, 64).T.reshape(-1),
        bits ^ sign,
        bits ^ TYPES[width](1),
        np.concatenate([bits[ROW : 2 * ROW], bits[:ROW], bits[2 * ROW :]]),
        np.concatenate([bits[1:2], bits[:1], bits[2:]]),
        np.zeros_like(bits),
        np.zeros_like(bits)[:-1],
        np.zeros_like(bits)[:-ROW],
    ]
    assert len({fingerprint(np.ascontiguousarray(each)) for each in wrong}) == len(wrong)


def test_two_flipped_signs_do_not_cancel() -> None:
    """The worst for a sum of products: differences that are multiples of a large power of two."""
    for width, kind in TYPES.items():
        base = fingerprint(np.zeros(ROW, kind))
        seen: set[int] = set()
        for other in range(1, 500):
            flipped = np.zeros(ROW, kind)
            flipped[[0, other]] = 2 ** (8 * width - 1)
            seen.add(fingerprint(flipped))
        assert base not in seen
        assert len(seen) == 499


def test_the_bits_of_each_fingerprint_are_evenly_set() -> None:
    """Half of the 64 bits differ between tensors that differ in one element, in every bit of the fingerprint."""
    base = np.zeros(4096, np.uint16)
    flips = np.zeros(64)
    for index in range(1000):
        other = base.copy()
        other[index] = 1 + index % 7
        difference = fingerprint(other) ^ fingerprint(base)
        flips += [(difference >> bit) & 1 for bit in range(64)]
    assert flips[0] > 350  # the lowest bits depend on the lowest bits of the bijection alone
    assert np.all((flips[1:] > 350) & (flips[1:] < 650))


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_that_a_version_may_hold_has_one(name: str) -> None:
    """Types below a byte by bytes; views, transposes and slices as the elements that they show."""
    raw = torch.arange(128, dtype=torch.uint8).reshape(8, 16)
    tensor = (raw % 2).bool() if name == "bool" else raw.view(getattr(torch, name))
    other = tensor[:, :1].contiguous() if name.startswith("float4") else tensor.T
    width = width_of(DTYPES[name])
    for each in (tensor, other):
        data = each.contiguous().reshape(-1).view(torch.uint8).numpy()
        assert fingerprints([each]) == [fingerprint(bits_of(data, width))]


@settings(max_examples=20)
@given(st.integers(0, MASK))
def test_its_text_has_sixteen_digits(number: int) -> None:
    assert len(to_text(number)) == 16
    assert int(to_text(number), 16) == number
