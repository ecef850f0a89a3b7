"""What a rank finds in its parts, in terms of whole tensors: indices, fingerprints, and how it is sent."""

from math import prod

import numpy as np
import pytest

from refitd_client.fingerprint import fingerprint
from refitd_client.fingerprint import host as shifts
from refitd_client.fingerprint.host import shifts_of
from refitd_client.sharded.layout import Box, Claim, WritePart
from refitd_client.sharded.orders import PackedChanges
from refitd_client.sharded.parts import SentPart, sent_parts
from refitd_client.sharded.rank_group import message_of, parts_of
from refitd_client.sharded.rank_shadow import join

BOXES = [
    ((), (), ()),
    ((10,), (3,), (4,)),
    ((6, 5), (2, 0), (3, 5)),
    ((6, 5), (0, 2), (6, 2)),
    ((6, 5), (1, 1), (4, 3)),
    ((4, 3, 5), (1, 0, 0), (2, 3, 5)),
    ((4, 3, 5), (0, 1, 0), (4, 2, 5)),
    ((4, 3, 5), (1, 1, 2), (3, 1, 2)),
]


def part_of(shape: tuple[int, ...], box: Box, begin: int, end: int) -> SentPart:
    claim = Claim(name="w", dtype="float32", shape=shape, boxes=(box,), memory="w")
    return sent_parts([WritePart("w", 0, begin, end)], [claim])[0]


@pytest.mark.parametrize(("shape", "start", "size"), BOXES)
def test_an_element_of_a_part_has_the_index_that_it_has_in_the_whole_tensor(
    shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...]
) -> None:
    """Of a whole box, and of its middle; and back, with what lies elsewhere left out."""
    places = tuple(slice(begin, begin + count) for begin, count in zip(start, size, strict=True))
    numbers = np.arange(prod(shape), dtype=np.uint32).reshape(shape)[places].reshape(-1)
    for begin, end in ((0, len(numbers)), (len(numbers) // 3, len(numbers) - len(numbers) // 4)):
        part = part_of(shape, Box(start, size), begin, end)
        for step in (1, 2):
            found = np.empty(len(range(0, end - begin, step)), part.index_type)
            part.to_whole(np.arange(0, end - begin, step, dtype=np.uint32), found)
            assert found.tolist() == numbers[begin:end:step].tolist()
            everything = np.arange(0, prod(shape), step, dtype=np.uint32)
            inside, local = part.to_part(everything)
            wanted = {int(each): at for at, each in enumerate(numbers[begin:end])}
            assert dict(zip(inside.tolist(), local.tolist(), strict=True)) == {
                each: at for each, at in wanted.items() if each % step == 0
            }


def test_a_tensor_of_more_elements_than_32_bits_count_has_longer_indices() -> None:
    part = part_of((2**21, 2**13), Box((2**20, 0), (4, 2**13)), 5, 2**15)
    found = np.empty(2, part.index_type)
    part.to_whole(np.array([0, 2**14], np.uint32), found)
    assert found.dtype == np.uint64
    assert found.tolist() == [2**33 + 5, 2**33 + 5 + 2**14]
    inside, local = part.to_part(found)
    assert (inside.tolist(), local.tolist()) == (found.tolist(), [0, 2**14])


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_changes_of_many_tensors_move_their_fingerprints_by_what_they_add(
    monkeypatch: pytest.MonkeyPatch, kind: type[np.unsignedinteger]
) -> None:
    """Pieces end within blocks, fill several, and begin with one."""
    monkeypatch.setattr(shifts, "_SHIFTED", 1000)
    chance, counts = np.random.default_rng(1), [1, 999, 1, 3500, 499, 7]
    olds = [chance.integers(0, 255, 20_000).astype(kind) for _ in counts]
    ats = [np.sort(chance.choice(20_000, count, replace=False)).astype(np.uint32) for count in counts]
    afters = [chance.integers(0, 255, count).astype(kind) for count in counts]
    news = [old.copy() for old in olds]
    for new, at, after in zip(news, ats, afters, strict=True):
        new[at] = after
    befores = [old[at] for old, at in zip(olds, ats, strict=True)]
    at, after, before = (np.concatenate(each) for each in (ats, afters, befores))
    expected = [(fingerprint(new) - fingerprint(old)) % 2**64 for new, old in zip(news, olds, strict=True)]
    assert shifts_of(counts, at, after, before) == expected
    assert shifts_of([], at[:0], after[:0], before[:0]) == []


def test_pieces_of_one_tensor_are_joined_in_order_also_where_they_interleave() -> None:
    def piece(*numbers: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array(numbers, np.uint32), np.array(numbers, np.uint16) * 2

    def joined(*pieces: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
        count = sum(len(indices) for indices, _ in pieces)
        indices, values = np.empty(count, np.uint32), np.empty(count, np.uint16)
        join(pieces, indices, values)
        return [indices.tolist(), values.tolist()]

    assert joined(piece(7, 9), piece(1, 4), piece()) == [[1, 4, 7, 9], [2, 8, 14, 18]]
    assert joined(piece(1, 9), piece(2, 30), piece(3)) == [[1, 2, 3, 9, 30], [2, 4, 6, 18, 60]]


def test_large_arrays_are_sent_as_they_lie_in_memory() -> None:
    large, locked = np.arange(2**16, dtype=np.uint32), np.arange(2**16, dtype=np.uint16)
    locked.flags.writeable = False
    sent = PackedChanges(names=["w", "v"], counts=[2**16 - 1, 1], indices=large, values=locked)
    message, *beside = parts_of([sent, np.arange(3)])
    assert len(message) < 2000
    assert np.shares_memory(np.frombuffer(beside[0], np.uint32), large)
    (found, few) = message_of([message, *(bytearray(part) for part in beside)])
    assert (found.indices == large).all()
    assert (found.values == locked).all()
    assert (found.names, few.tolist()) == (["w", "v"], [0, 1, 2])
