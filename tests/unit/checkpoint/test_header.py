"""The safetensors header: what hostile and broken files can say, and that none of it gets through."""

import json
import os
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize

from refitd_client.checkpoint import header
from refitd_client.checkpoint.header import (
    BITS,
    MAX_HEADER_BYTES,
    BoundedCache,
    Header,
    HeaderRefusedError,
    TornFileError,
    parse_header,
    read_header,
)
from support.rawfiles import bf16, entry, raw, safetensors


def read(tmp_path: Path, data: bytes, size: int | None = None) -> Header:
    path = tmp_path / "file.safetensors"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd, len(data) if size is None else size)
    finally:
        os.close(fd)


def parse(document: object, data_bytes: int = 0) -> Header:
    return parse_header(document if isinstance(document, bytes) else json.dumps(document).encode(), data_bytes)


def test_tensors_come_in_the_order_of_their_data() -> None:
    found = parse({"a": entry(start=2), "b": entry(start=0)}, 4)
    assert list(found.tensors) == ["b", "a"]


def test_metadata_may_hold_json_in_a_string() -> None:
    metadata = {"config": json.dumps({"a": {"b": "}{"}})}
    assert parse({"__metadata__": metadata}).metadata == metadata


def test_metadata_that_is_null_is_none_as_for_the_library() -> None:
    document = json.dumps({"__metadata__": None, "a": entry()}).encode()
    assert parse(document, 2).metadata == {}
    check_against_library(parse(document, 2), raw(document, bytes(2)))


ENTRY = json.dumps(entry()).encode()
REFUSED: list[tuple[str, Any, int, str]] = [
    ("a tensor twice", b'{"a":%b,"a":%b}' % (ENTRY, ENTRY), 2, "'a' twice"),
    ("an escaped name twice", b'{"a":%b,"\\u0061":%b}' % (ENTRY, ENTRY), 2, "'a' twice"),
    ("metadata twice", b'{"__metadata__":{},"__metadata__":{}}', 0, "twice"),
    ("a key of the metadata twice", b'{"__metadata__":{"k":"1","k":"2"}}', 0, "'k' twice"),
    ("a field twice", b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"shape":[2]}}', 2, "tensor 'a'"),
    ("an unknown field", {"a": entry() | {"x": 1}}, 2, "tensor 'a'"),
    ("no offsets", {"a": {"dtype": "U8", "shape": [2]}}, 2, "tensor 'a'"),
    ("an unknown dtype", {"a": entry("F7")}, 2, "tensor 'a' has the dtype 'F7'"),
    ("an empty name", {"": entry()}, 2, "empty"),
    ("a control character in a name", {"a\nb": entry()}, 2, r"'a\nb'"),
    ("a direction mark in a name", {"a\u202eb": entry()}, 2, "not printable"),
    ("a name without end", {"a" * 2000: entry()}, 2, "longer than 1024"),
    ("a lone surrogate", b'{"\\ud800":{}}', 0, "not valid"),
    ("bytes that are not UTF-8", b'{"\xff":{}}', 0, "not valid"),
    ("a negative dimension", {"a": entry(shape=[-2, -1])}, 2, "negative"),
    ("a float", {"a": entry() | {"shape": [2.0]}}, 2, "tensor 'a'"),
    ("a dimension beyond 64 bits", {"a": entry(shape=[2**63], end=0)}, 0, "beyond"),
    ("a product that overflows to 0", {"a": entry(shape=[2**32, 2**32], end=0)}, 0, "takes more than"),
    ("offsets that do not match", {"a": entry(shape=[3], end=2)}, 2, "takes 3 bytes"),
    ("offsets backwards", {"a": entry(shape=[0], start=2, end=0)}, 0, "tensor 'a'"),
    ("half a byte", {"a": entry("F4", [3])}, 1, "whole bytes"),
    ("a hole", {"a": entry(), "b": entry(start=3)}, 5, "tensor 'b' begins at byte 3"),
    ("a hole at the start", {"a": entry(start=1)}, 3, "tensor 'a' begins at byte 1"),
    ("an overlap", {"a": entry(), "b": entry(start=1)}, 3, "tensor 'b' begins at byte 1"),
    ("trailing bytes", {"a": entry()}, 3, "1 bytes after the last tensor"),
    ("no object", b"[]", 0, "not a JSON object"),
    ("no JSON", b"{]", 0, "malformed"),
    ("a second document", b"{}{}", 0, "goes on after"),
    ("a NUL after the end", b"{}\0", 0, "goes on after"),
    ("deep nesting", b'{"a":' * 100_000, 0, "malformed"),
    ("deep lists", b'{"a":{"dtype":' + b"[" * 100_000, 0, "malformed"),
    ("nothing", b"", 0, "not a JSON object"),
    ("a tensor that is null", {"a": None}, 0, "tensor 'a'"),
    ("metadata that is null twice", b'{"__metadata__":null,"__metadata__":null}', 0, "twice"),
    ("metadata that is no strings", {"__metadata__": {"a": 1}}, 0, "malformed"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "document", "data_bytes", "says"), REFUSED, ids=[case[0] for case in REFUSED])
def test_a_hostile_header_is_refused_by_name(what: str, document: object, data_bytes: int, says: str) -> None:
    with pytest.raises(HeaderRefusedError) as refused:
        parse(document, data_bytes)
    assert says in str(refused.value), what
    assert str(refused.value).isprintable()


def test_missing_data_is_a_torn_file(tmp_path: Path) -> None:
    whole = safetensors({"a": bf16(4)})
    for length in (0, 7, 8, 20, len(whole) - 1):
        with pytest.raises(TornFileError):
            read(tmp_path, whole[:length])


def test_a_huge_header_length_is_refused_before_it_is_read(tmp_path: Path) -> None:
    for length in (2**62, MAX_HEADER_BYTES + 1):
        with pytest.raises(HeaderRefusedError, match=str(length)):
            read(tmp_path, length.to_bytes(8, "little") + b"{}", size=2**63 - 1)


def test_a_file_that_became_shorter_is_an_io_error(tmp_path: Path) -> None:
    whole = safetensors({"a": bf16(4)})
    with pytest.raises(OSError, match="ended at byte"):
        read(tmp_path, whole[:20], size=len(whole))


def test_too_many_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_TENSORS", 10)
    names = [f"t{number}" for number in range(11)]
    assert len(parse(dict.fromkeys(names[:10], entry(shape=[0]))).tensors) == 10
    with pytest.raises(HeaderRefusedError, match="more than 10 tensors"):
        parse(dict.fromkeys(names, entry(shape=[0])))


@pytest.mark.parametrize(
    "document",
    [
        b'{"a":[' + b"{}," * 700_000 + b"{}]}",
        b'{"a":{"dtype":"U8","shape":[' + b"0," * 1_000_000 + b'0],"data_offsets":[0,0]}}',
        b'{"__metadata__":{' + b",".join(b'"%d":""' % number for number in range(200_000)) + b"}}",
        b'{"' + b'\\"' * 1_000_000 + b'":{}}',
        b'{"a":{' + b'"",' * 700_000 + b"}}",
    ],
    ids=["objects", "dimensions", "metadata", "escapes", "strings"],
)
def test_a_small_header_cannot_take_a_lot_of_memory(document: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(HeaderRefusedError):
            parse_header(document, 0)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(document) + 2**20
    finally:
        tracemalloc.stop()


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was parsed, from a memory that is empty at first and holds a thousand bytes."""
    found: list[bytes] = []
    real = header.parse_header

    def parse(data: bytes, data_bytes: int) -> Header:
        found.append(data)
        return real(data, data_bytes)

    monkeypatch.setattr(header, "parse_header", parse)
    monkeypatch.setattr(header, "_parsed", BoundedCache(10, 1000))
    return found


def test_the_same_header_is_parsed_once(tmp_path: Path, parsed: list[bytes]) -> None:
    one, two = safetensors({"a": bf16(4)}), safetensors({"a": bf16(4, value=7)})
    assert read(tmp_path, one) is read(tmp_path, two)
    assert len(parsed) == 1


def test_a_hostile_header_is_refused_each_time(tmp_path: Path, parsed: list[bytes]) -> None:
    bad = raw(json.dumps({"a": entry(start=1)}).encode(), bytes(3))
    for _ in range(3):
        with pytest.raises(HeaderRefusedError, match="tensor 'a' begins at byte 1"):
            read(tmp_path, bad)
    assert len(parsed) == 3


def test_a_file_of_another_size_is_refused_though_its_header_is_known(tmp_path: Path, parsed: list[bytes]) -> None:
    whole = safetensors({"a": bf16(4)})
    read(tmp_path, whole)
    with pytest.raises(TornFileError, match="it has 7 of the 8 bytes"):
        read(tmp_path, whole[:-1])
    with pytest.raises(HeaderRefusedError, match="1 bytes after the last tensor"):
        read(tmp_path, whole + b"\0")
    read(tmp_path, whole)
    assert len(parsed) == 3


def test_a_header_that_differs_in_one_byte_is_another(tmp_path: Path, parsed: list[bytes]) -> None:
    one, two = safetensors({"a": bf16(4)}), safetensors({"b": bf16(4)})
    assert len(one) == len(two)
    assert (list(read(tmp_path, one).tensors), list(read(tmp_path, two).tensors)) == (["a"], ["b"])
    assert len(parsed) == 2


def test_metadata_of_many_pairs_counts_for_what_it_takes(tmp_path: Path, parsed: list[bytes]) -> None:
    text = json.dumps({"__metadata__": {str(number): "" for number in range(20)}}).encode()
    assert len(text) < 1000
    for _ in range(2):
        read(tmp_path, raw(text, b""))
    assert len(parsed) == 2


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**65) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
small = st.integers(-1, 9)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*BITS, "F7"]),
        "shape": st.lists(small, max_size=3),
        "data_offsets": st.lists(small, min_size=1, max_size=3),
    }
)
headers = st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), entries | json_like, max_size=4)


@given(st.binary(max_size=60) | headers.map(lambda value: json.dumps(value).encode()), st.integers(0, 20))
def test_any_bytes_give_a_header_or_a_refusal(document: bytes, data_bytes: int) -> None:
    with suppress(HeaderRefusedError):
        check_against_library(parse_header(document, data_bytes), raw(document, bytes(data_bytes)))


@st.composite
def good_headers(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.text("ab.é0", min_size=1, max_size=5), unique=True, max_size=5))
    document: dict[str, Any] = {}
    end = 0
    for name in names:
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        document[name] = entry(draw(st.sampled_from(["BF16", "F32", "U8", "F8_E4M3", "C64"])), shape, end)
        end = document[name]["data_offsets"][1]
    return dict(draw(st.permutations(list(document.items()))))


@given(good_headers(), st.booleans())
def test_what_is_right_is_accepted_as_the_library_accepts_it(document: dict[str, Any], ascii_only: bool) -> None:
    text = json.dumps(document, ensure_ascii=ascii_only).encode() + b"   "
    size = max((each["data_offsets"][1] for each in document.values()), default=0)
    found = parse_header(text, size)
    assert set(found.tensors) == set(document)
    check_against_library(found, raw(text, bytes(size)))


def check_against_library(found: Header, file: bytes) -> None:
    """What we accept, the library accepts, and reads in the same way."""
    library = {
        name: (tensor["dtype"], tuple(tensor["shape"]), len(tensor["data"])) for name, tensor in deserialize(file)
    }
    assert library == {name: (spec.dtype, spec.shape, spec.end - spec.start) for name, spec in found.tensors.items()}
