"""A delta's file: what was written is read, and what anyone else may have made of it is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from refitd_client.contract import manifest
from refitd_client.delta import Change, Delta, DeltaRefusedError, encode, parse_delta, reader, union
from refitd_client.fingerprint import width_of

BASE, VERSION = "exp~trial~v000122", "exp~trial~v000123"
TYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def change(shape: tuple[int, ...], indices: list[int], dtype: str = "BF16", seed: int = 0) -> Change:
    kind = TYPES[width_of(dtype)]
    values = np.random.default_rng(seed).integers(0, np.iinfo(kind).max, len(indices), dtype=kind)
    at = np.array(indices, np.uint32)
    return Change(dtype=dtype, shape=shape, indices=at, values=values, base=seed, result=seed + 1)


def delta(**changes: Change) -> Delta:
    return Delta(base=BASE, version=VERSION, changes=changes)


def same(one: Delta, other: Delta) -> bool:
    if (one.base, one.version, one.changes.keys()) != (other.base, other.version, other.changes.keys()):
        return False
    pairs = [(change, other.changes[name]) for name, change in one.changes.items()]
    facts = all((a.dtype, a.shape, a.base, a.result) == (b.dtype, b.shape, b.base, b.result) for a, b in pairs)
    return facts and all(
        np.array_equal(a.indices, b.indices)
        and np.array_equal(a.values, b.values)
        and a.indices.dtype == b.indices.dtype
        for a, b in pairs
    )


EXAMPLE = delta(
    w=change((300, 1000), [0, 1, 65536, 65537, 299_999]),
    scale=change((8,), [3], "F32", 1),
    bytes=change((4, 4), list(range(16)), "F8_E4M3", 2),
    long=change((9,), [8], "I64", 3),
    pairs=change((2, 4), [0, 3], "F4", 4),
)


def test_what_lies_together_is_written_together() -> None:
    """As a GPU's results do, in few pieces; and what does not lie as the file has it is in its place all the same."""
    indices, values = np.arange(60_000, dtype=np.uint32), np.arange(60_000).astype(np.uint16)
    places = {"a": (0, 20_000), "b": (20_000, 40_000), "d": (50_000, 60_000), "e": (40_000, 50_000)}
    together = delta(**{name: _part(indices[slice(*at)], values[slice(*at)]) for name, at in places.items()})
    copies = delta(**{name: _part(each.indices.copy(), each.values.copy()) for name, each in together.changes.items()})
    assert len(encode(together).parts()) == 1 + 2 * 3
    assert encode(together).to_bytes() == encode(copies).to_bytes()
    assert same(parse_delta(encode(together).to_bytes()), together)


def test_small_arrays_are_written_together_wherever_they_lie() -> None:
    """A model of 100,000 small tensors has as many: one digest for each would take longer than the rest."""
    small = {f"t{at:03d}": _part(np.arange(3, dtype=np.uint32), np.full(3, at, np.uint16)) for at in range(100)}
    assert len(encode(delta(**small)).parts()) == 2
    assert same(parse_delta(encode(delta(**small)).to_bytes()), delta(**small))


def _part(indices: Any, values: Any) -> Change:
    return Change(dtype="BF16", shape=(100_000,), indices=indices, values=values, base=1, result=2)


def test_a_delta_without_changes_is_one() -> None:
    """A step with a learning rate of nothing."""
    assert same(parse_delta(encode(delta()).to_bytes()), delta())


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    """Under its own ending, with aligned arrays."""
    path = tmp_path / "weights.refit-delta"
    path.write_bytes(encode(delta(w=EXAMPLE.changes["w"], scale=EXAMPLE.changes["scale"])).to_bytes())
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["base"] == BASE
        assert file.get_tensor("indices:w").tolist() == EXAMPLE.changes["w"].indices.tolist()
        assert file.get_tensor("values:w").shape == (5,)
        assert str(file.get_tensor("values:w").dtype) == "torch.bfloat16"


@st.composite
def deltas(draw: st.DrawFn) -> Delta:
    changes: dict[str, Change] = {}
    for name in draw(st.lists(st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=5), unique=True)):
        elements = draw(st.integers(1, 200_000))
        indices = sorted(draw(st.sets(st.integers(0, elements - 1), min_size=1, max_size=20)))
        dtype = draw(st.sampled_from(["BF16", "F32", "F64", "U8", "F8_E5M2"]))
        changes[name] = change((elements,), indices, dtype, draw(st.integers(0, 2**32)))
    return delta(**changes)


@given(deltas())
def test_any_delta_comes_back(made: Delta) -> None:
    assert same(parse_delta(encode(made).to_bytes()), made)


@settings(max_examples=300)
@given(deltas(), st.data())
def test_a_single_damaged_byte_is_refused(made: Delta, data: st.DataObject) -> None:
    """Wherever it is: in the length, the header, the padding, the data, the digest."""
    raw = bytearray(encode(made).to_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DeltaRefusedError):
        parse_delta(bytes(raw))


def test_a_file_that_was_cut_off_is_refused() -> None:
    """At every length."""
    raw = encode(EXAMPLE).to_bytes()
    for length in range(0, len(raw), 3):
        with pytest.raises(DeltaRefusedError):
            parse_delta(raw[:length])


def signed(head: bytes, body: bytes) -> bytes:
    """A file with a good digest, as whoever means harm makes it."""
    raw = len(head).to_bytes(8, "little") + head + body
    return raw + xxhash.xxh3_128(raw).digest()


def remade(edit: Any) -> bytes:
    """The example's file after `edit(header, metadata, rows, body)` changed them in place, with a good digest."""
    raw = encode(EXAMPLE).to_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    metadata = header["__metadata__"]
    rows, body = json.loads(metadata["tensors"]), bytearray(raw[end:-16])
    edit(header, metadata, rows, body)
    metadata["tensors"] = json.dumps(rows)
    return signed(json.dumps(header).encode(), bytes(body))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4),
)
FIELDS = [
    ("rows", "w", "shape"), ("rows", "w", "changed"), ("rows", "w", "dtype"), ("rows", "w", "base"),
    ("rows", "w"), ("rows", "new"),
    ("metadata", "format"), ("metadata", "encoding"), ("metadata", "compression"), ("metadata", "base"),
    ("metadata", "extra"), ("header", "indices:w", "shape"), ("header", "indices:w", "dtype"),
    ("header", "indices:w", "data_offsets"), ("header", "values:w"), ("header", "digest"), ("header", "__metadata__"),
]  # fmt: skip


@settings(max_examples=400)
@given(st.sampled_from(FIELDS), JSON)
def test_a_header_with_anything_in_it_is_read_or_refused(field: tuple[str, ...], value: Any) -> None:
    """And where it is read, it says what it said."""

    def edit(header: Any, metadata: Any, rows: Any, _: bytearray) -> None:
        target: Any = {"header": header, "metadata": metadata, "rows": rows}[field[0]]
        for part in field[1:-1]:
            target = target[part]
        target[field[-1]] = value
        if field == ("header", "__metadata__"):
            metadata.clear()

    try:
        found = parse_delta(remade(edit))
    except DeltaRefusedError:
        return
    assert found.changes.keys() == EXAMPLE.changes.keys()


def edits() -> dict[str, tuple[Any, str]]:
    """By the harm that is meant: an edit, and what the error says."""

    def at(*path: str, value: Any) -> Any:
        def edit(header: Any, metadata: Any, rows: Any, _: bytearray) -> None:
            target: Any = {"header": header, "metadata": metadata, "rows": rows}[path[0]]
            for part in path[1:-1]:
                target = target[part]
            target[path[-1]] = value

        return edit

    def set_index(position: int, value: int) -> Any:
        def edit(header: Any, _: Any, __: Any, body: bytearray) -> None:
            begin = header["indices:w"]["data_offsets"][0] + 4 * position
            body[begin : begin + 4] = value.to_bytes(4, "little")

        return edit

    return {
        "out of range": (set_index(4, 300_000), "has index 300000, of 300000 elements"),
        "far out of range": (set_index(4, 2**32 - 1), "has index 4294967295"),
        "twice": (set_index(1, 0), "not in strict order"),
        "back": (set_index(2, 0), "not in strict order"),
        "another dtype": (at("rows", "w", "dtype", value="F32"), "should be F32"),
        "no dtype": (at("rows", "w", "dtype", value="C64"), "no version has"),
        "a smaller tensor": (at("rows", "w", "shape", value=[299_999]), "has index 299999, of 299999 elements"),
        "a huge tensor": (at("rows", "w", "shape", value=[2**40, 2**40]), "impossible shape"),
        "many dimensions": (at("rows", "w", "shape", value=[1] * 1000), "impossible shape"),
        "a negative one": (at("rows", "w", "shape", value=[-1, -300_000]), "impossible shape"),
        "half a byte": (at("rows", "pairs", "shape", value=[5]), "impossible shape"),
        "fewer": (at("rows", "w", "changed", value=4), "should be U32 of shape"),
        "none": (at("rows", "w", "changed", value=0), "0 changes"),
        "no base": (at("metadata", "base", value="../../etc"), "no version's id"),
        "another format": (
            at("metadata", "format", value="refit-delta/3"),
            "this refitd reads refit-delta/2: publish a full version",
        ),
        "an unknown word": (at("metadata", "hidden", value="x"), "not a delta's"),
        "unknown data": (
            at("header", "more", value={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
            "other data",
        ),
        "a bad fingerprint": (at("rows", "w", "result", value="0" * 15 + "G"), "16 hexadecimal digits"),
        "a hole": (at("header", "values:bytes", "data_offsets", value=[1, 17]), "hole"),
        "an overlap": (at("header", "indices:scale", "data_offsets", value=[0, 4]), "hole"),
        "tokens": (at("rows", "w", "tokens", value=9), "does not parse"),
        "indices as distances": (at("metadata", "encoding", value="gap"), "written as gap .*: publish a full version"),
        "compressed": (at("metadata", "compression", value="zstd"), "compression zstd, .*: publish a full version"),
        "a terminal's colours": (at("metadata", "format", value="\x1b[31m"), r"\\x1b"),
    }


@pytest.mark.parametrize("harm", edits())
def test_what_could_do_harm_is_refused_with_a_word_on_what_it_is(harm: str) -> None:
    edit, says = edits()[harm]
    with pytest.raises(DeltaRefusedError, match=says) as caught:
        parse_delta(remade(edit))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("key", ["indices:w", "__metadata__"])
def test_a_name_that_comes_twice_is_refused(key: str) -> None:
    """Loaders take the last, and a reader of another kind the first."""
    raw = encode(delta(w=EXAMPLE.changes["w"])).to_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    head = raw[8:end].rstrip()
    twice = head[:-1] + b"," + json.dumps({key: json.loads(head)[key]})[1:].encode()
    with pytest.raises(DeltaRefusedError, match="twice"):
        parse_delta(signed(twice, raw[end:-16]))


def test_a_header_that_claims_to_be_huge_is_not_read() -> None:
    raw = (2**62).to_bytes(8, "little") + bytes(64)
    with pytest.raises(DeltaRefusedError, match="claims"):
        parse_delta(raw)


def test_what_would_take_too_much_memory_is_refused() -> None:
    with pytest.raises(DeltaRefusedError, match="of memory"):
        parse_delta(encode(EXAMPLE).to_bytes(), max_bytes=100)


@given(st.lists(st.sets(st.integers(0, 100)), min_size=1, max_size=5))
def test_a_union_has_each_index_once_and_in_order(parts: list[set[int]]) -> None:
    arrays = [np.array(sorted(part), np.uint32) for part in parts]
    assert union(arrays).tolist() == sorted(set().union(*parts))


def by_hand(data: bytes, block: int) -> bytes:
    if len(data) <= block:
        return xxhash.xxh3_128_digest(data)
    each = [xxhash.xxh3_128_digest(data[at : at + block]) for at in range(0, len(data), block)]
    return xxhash.xxh3_128_digest(b"".join(each))


@pytest.mark.parametrize("of_block", [(1, 0), (1, 1), (1, -1), (2, 0), (2, -1), (7, 0)])
def test_a_file_ends_in_the_digest_of_the_blocks_before(
    of_block: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the last of them ends: the digest itself may be in it, or in a block of its own, or in two."""
    blocks, more = of_block
    before = len(encode(EXAMPLE).to_bytes()) - 16
    block = -(-before // blocks) + more
    monkeypatch.setattr(manifest, "BLOCK", block)
    monkeypatch.setattr(reader, "lanes_for", lambda jobs: 4)
    data = encode(EXAMPLE).to_bytes()
    assert data[before:] == by_hand(data[:before], block)
    assert same(parse_delta(data), EXAMPLE)


def test_a_delta_of_the_first_format_is_refused_with_the_advice_to_publish_in_full() -> None:
    """Its digest is of all bytes in one go."""
    body = encode(EXAMPLE).to_bytes()[:-16].replace(b"refit-delta/2", b"refit-delta/1")
    with pytest.raises(DeltaRefusedError, match=r"its format is refit-delta/1, and .*: publish a full version"):
        parse_delta(body + xxhash.xxh3_128_digest(body))


def test_what_was_held_against_its_manifest_is_not_digested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = encode(EXAMPLE).to_bytes()
    monkeypatch.setattr(reader, "digest_of_pieces", None)
    assert same(parse_delta(raw, digested=True), EXAMPLE)
    with pytest.raises(TypeError):
        parse_delta(raw)
