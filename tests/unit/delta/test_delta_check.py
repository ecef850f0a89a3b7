"""What is found of a delta's changes together, in large pieces, is what a look at each tensor finds."""

import tempfile
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from refitd_client.checkpoint.finite import any_nonfinite, kind_of
from refitd_client.delta import Delta, DeltaFile, DeltaRefusedError, head, parse_delta
from refitd_client.delta import reader as check
from refitd_client.delta.change import Change
from refitd_client.delta.writer import encode

DTYPES = {"BF16": np.uint16, "F32": np.uint32, "U8": np.uint8}


def delta_of(tensors: list[tuple[str, int, list[int]]]) -> bytes:
    """A delta whose tensors have a dtype, so many elements, and changes at these of them."""
    changes: dict[str, Change] = {}
    for number, (dtype, size, at) in enumerate(tensors):
        indices = np.array(sorted({each % size for each in at}), np.uint32)
        values = np.full(len(indices), 1, DTYPES[dtype])
        changes[f"t{number}"] = Change(
            dtype=dtype, shape=(size,), indices=indices, values=values, base=0, result=number
        )
    return encode(Delta(base="run~v000001", version="run~v000002", changes=changes)).to_bytes()


def by_tensor(delta: DeltaFile) -> bool:
    """The look at each tensor."""
    try:
        for name, row in delta.head.rows.items():
            for _, values in delta.pieces(name):
                if any_nonfinite(kind_of(name, row.dtype), values.view("u1")):
                    return False
    except DeltaRefusedError:
        return False
    return True


TENSORS = st.lists(
    st.tuples(
        st.sampled_from(sorted(DTYPES)), st.integers(1, 300), st.lists(st.integers(0, 299), min_size=1, max_size=40)
    ),
    min_size=1,
    max_size=6,
)


@given(tensors=TENSORS, at=st.integers(0, 10**6), byte=st.integers(0, 255), piece=st.sampled_from([8, 16, 24, 2**22]))
@example(tensors=[("BF16", 300, list(range(40)))], at=0, byte=255, piece=8)
def test_a_byte_that_is_changed_is_found_together_where_it_is_found_by_tensor(
    tensors: list[tuple[str, int, list[int]]], at: int, byte: int, piece: int
) -> None:
    """Pieces end within tensors, and between them, also where a tensor's first index is below the last one before."""
    data = bytearray(delta_of(tensors))
    body = 8 + int.from_bytes(data[:8], "little")
    data[body + at % (len(data) - 16 - body)] = byte
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile() as file:
        patch.setattr(check, "_CHECK_PIECE", piece)
        file.write(data)
        file.flush()
        delta = DeltaFile(file.fileno())
        assert searched(delta, data, piece) == by_tensor(delta)
        assert check.in_order(delta.head, np.frombuffer(data, np.uint8)) == searched(delta, data, piece, values=False)


def searched(delta: DeltaFile, data: bytes | bytearray, piece: int, *, values: bool = True) -> bool:
    """What is found in stretches of so many bytes, of which the last comes first."""
    search = check.ChangesSearch(delta.head, values=values)
    edges = sorted({search.boundary(at) for at in range(0, len(data), piece)} | {len(data)}, reverse=True)
    for end, begin in pairwise(edges):
        search.look(memoryview(data)[begin:end], begin)
    return search.is_sound


def test_what_was_not_looked_at_is_not_sound() -> None:
    data = delta_of([("BF16", 9, [1, 2, 5])])
    delta = head.head_in(memoryview(data))
    search = check.ChangesSearch(delta)
    assert not search.is_sound
    search.look(memoryview(data)[: search.begin + 8], 0)
    assert not search.is_sound
    search.look(memoryview(data)[search.begin + 8 :], search.begin + 8)
    assert search.is_sound


def outcome(data: bytes, at_once: int) -> Any:
    """The header of a file, or the sentence that refuses it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "_JSON_AT_ONCE", at_once)
        try:
            return head.head_in(memoryview(data))
        except DeltaRefusedError as error:
            return str(error)


REPLACED = [
    b'"',
    b"{",
    b"}",
    b",",
    b":",
    b" ",
    b"0",
    b"\\u0061",
    b"\xff",
    b"null",
    b'"dtype":"U8",',
    b'"t0":{},',
    b'{"a":' * 5000,
]


@given(tensors=TENSORS, at=st.integers(0, 10**6), length=st.integers(0, 12), by=st.sampled_from(REPLACED))
def test_a_header_that_is_parsed_at_once_is_what_it_is_pair_by_pair(
    tensors: list[tuple[str, int, list[int]]], at: int, length: int, by: bytes
) -> None:
    data = delta_of(tensors)
    size = int.from_bytes(data[:8], "little")
    at %= size
    text = data[8 : 8 + at] + by + data[8 + at + length : 8 + size]
    changed = len(text).to_bytes(8, "little") + text + data[8 + size :]
    assert outcome(changed, 2**20) == outcome(changed, 0)


def test_a_header_that_nests_deeper_than_any_parser_goes_is_refused() -> None:
    text = b'{"__metadata__":' + b'{"a":' * 100_000
    refused = outcome(len(text).to_bytes(8, "little") + text + bytes(24), 2**20)
    assert refused == outcome(len(text).to_bytes(8, "little") + text + bytes(24), 0)
    assert str(refused).startswith("its header does not parse: its JSON is malformed")


def test_a_header_that_was_parsed_before_counts_only_for_the_very_same_file() -> None:
    one, other = delta_of([("BF16", 9, [1])]), delta_of([("BF16", 9, [1, 2])])
    known = head.head_in(memoryview(one))
    assert parse_delta(other, known=known).changes["t0"].indices.tolist() == [1, 2]
    assert known.is_of(memoryview(one))
    assert not known.is_of(memoryview(one + b"\0"))
