"""A fuzzer on both parsers of what anyone may have written: the header of a safetensors file and the manifest.

It begins with files that are right and changes bytes, tokens and lengths, so that what comes in is nearly right: that
gets deeper than noise. Derandomized: the same cases each time. `REFITD_FUZZ` is how many (default: 400 of each);
beyond the default, others each time.
"""

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from refitd.catalog.layout import Index, IndexRefusedError, parse_index
from refitd_client.contract.manifest import Manifest, ManifestFile, ManifestRefusedError, TensorsSummary, parse_manifest
from refitd_client.strict_header import Header, HeaderRefusedError, read_header
from support.rawfiles import bf16, f32, safetensors

CASES = int(os.environ.get("REFITD_FUZZ", "0"))
FUZZ = settings(
    max_examples=CASES or 400,
    derandomize=not CASES,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# What a case may take beyond its own size, several times over. A parser that builds what it reads takes far more.
MEMORY = 2 * 2**20

FILES = [
    safetensors({"model.embed_tokens.weight": bf16(8, 4), "model.norm.weight": bf16(4), "lm_head.weight": f32(2, 2)}),
    safetensors({"a": bf16(1)}),
    safetensors({}),
]
MANIFEST = Manifest(
    run="exp/trial",
    generation=2,
    step=123,
    files={f"model-0000{n}-of-00002.safetensors": ManifestFile(size=10**n, digest="xxh3:" + "0" * 32) for n in (1, 2)},
    tensors=TensorsSummary(count=3, bytes=120, dtypes={"BF16": 2, "F32": 1}),
    created_at="2026-01-01T00:00:00Z",
    base="exp~v000122",
    metadata={"loss": "0.5"},
).to_json()
INDEX = json.dumps({"metadata": {"total_size": 1}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}).encode()

# Bits of JSON that mean something to a parser, and numbers at which something ends.
TOKENS = [b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\", b"\\u0000", b"\\ud800", b"\\u001b[2J", b"\\n", b"null"]
TOKENS += [b"true", b"-1", b"-0", b"1e3", b"NaN", b"0.5", b"\x00", b"\xff", b"\xed\xa0\x80", b"[" * 2000]
TOKENS += [b"__metadata__", b"../", b'{"a":' * 2000]
TOKENS += [str(2**power + more).encode() for power in (31, 32, 53, 63, 64, 128) for more in (-1, 0, 1)]
TOKENS += [b"dtype", b"shape", b"data_offsets", b"files", b"size", b"refit.json", b"F64", b"9" * 5000]

Change = Callable[[bytes], bytes]


@st.composite
def changes(draw: st.DrawFn) -> Change:
    """One thing that is done to the bytes. Places are fractions, so that they fit whatever came before."""
    begin, end = sorted((draw(st.floats(0, 1)), draw(st.floats(0, 1))))
    kind = draw(st.sampled_from(["flip", "token", "replace", "cut", "twice", "move", "noise"]))
    token = draw(st.sampled_from(TOKENS) | st.binary(max_size=8))
    bit = draw(st.integers(0, 7))

    def change(data: bytes) -> bytes:
        i, j = int(begin * len(data)), int(end * len(data))
        match kind:
            case "flip":
                return data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1 :] if i < len(data) else data
            case "token":
                return data[:i] + token + data[i:]
            case "replace":
                return data[:i] + token + data[i + len(token) :]
            case "cut":
                return data[:i] + data[j:]
            case "twice":
                return data[:j] + data[i:]
            case "move":
                return data[:i] + data[j:] + data[i:j]
            case _:
                return data[:i] + os.urandom(0) + token * 3 + data[j:]

    return change


def changed(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    """A seed with a few changes. Of most files the length of the header is put right again, to get past it."""

    def apply(seed: bytes, several: list[Change]) -> bytes:
        for change in several:
            seed = change(seed)
        return seed

    return st.builds(apply, st.sampled_from(seeds), st.lists(changes(), max_size=5))


@st.composite
def hostile_files(draw: st.DrawFn) -> bytes:
    whole = draw(st.sampled_from(FILES))
    length = struct.unpack("<Q", whole[:8])[0]
    if draw(st.integers(0, 3)) == 0:
        return draw(changed([whole]))
    header = draw(changed([whole[8 : 8 + length]]))
    return struct.pack("<Q", len(header)) + header + whole[8 + length :]


def within_bounds(size: int, act: Callable[[], Any]) -> Any:
    tracemalloc.start()
    try:
        return act()
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < MEMORY + 20 * size, f"{most} bytes for {size}"


@pytest.mark.parametrize("seed", FILES)
def test_the_seeds_are_right(seed: bytes, tmp_path: Path) -> None:
    assert header_of(tmp_path / "file", seed) is not None
    assert parse_manifest(MANIFEST).step == 123
    assert parse_index(INDEX).files == ["x.safetensors", "y.safetensors"]


def header_of(path: Path, data: bytes) -> Header | None:
    """The header, None where it is refused. Whatever else is raised is a bug."""
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd, len(data))
    except HeaderRefusedError as refusal:
        check_sentence(refusal)
        return None
    finally:
        os.close(fd)


def check_sentence(refusal: Exception) -> None:
    """It goes into logs, answers and terminals: it is short, and holds nothing that one of these would obey."""
    assert str(refusal).isprintable()
    assert len(str(refusal)) < 1500


@FUZZ
@given(data=hostile_files())
@example(data=struct.pack("<Q", 2**62) + b"{}")
@example(data=struct.pack("<Q", 2**64 - 1) + b"{}")
def test_no_bytes_make_the_header_parser_do_anything_but_refuse_or_agree_with_the_library(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    header = within_bounds(len(data), lambda: header_of(path, data))
    if header is None:
        return
    try:
        library = {name: (told["dtype"], tuple(told["shape"])) for name, told in deserialize(data)}
    except SafetensorError as error:
        pytest.fail(f"the library refuses what was let through: {error}")
    assert library == {name: (spec.dtype, spec.shape) for name, spec in header.tensors.items()}


@FUZZ
@given(data=changed([MANIFEST]))
@example(data=MANIFEST.replace(b'"full"', b'"\\u001b[2J\\n' + b"x" * 5000 + b'"'))
@example(data=MANIFEST.replace(b'"model-0', b'"../\\u001b[2J'))
@example(data=b'{"x":' + b"[" * 200_000)
@example(data=b'{"metadata":' * 100_000)
def test_no_bytes_make_the_manifest_parser_do_anything_but_refuse_or_give_a_manifest(data: bytes) -> None:
    def parse() -> Manifest | None:
        try:
            return parse_manifest(data)
        except ManifestRefusedError as refusal:
            check_sentence(refusal)
            return None

    manifest = within_bounds(len(data), parse)
    if manifest is not None:
        assert parse_manifest(manifest.to_json()) == manifest
        assert manifest.digest.startswith("xxh3:")
        assert not any("/" in name or name.startswith(".") for name in manifest.files)


@FUZZ
@given(data=changed([INDEX]))
def test_no_bytes_make_the_index_parser_do_anything_but_refuse_or_give_an_index(data: bytes) -> None:
    def parse() -> Index | None:
        try:
            return parse_index(data)
        except IndexRefusedError as refusal:
            check_sentence(refusal)
            return None

    index = within_bounds(len(data), parse)
    if index is not None:
        assert all(name.endswith(".safetensors") and "/" not in name for name in index.files)


def test_a_manifest_of_the_largest_size_takes_no_more_memory_than_it_may() -> None:
    """Small objects are what a parser pays most for."""
    for fill in (b'"metadata":{%b}', b'"files":{%b}', b'"x":[%b]'):
        pairs = b",".join(b'"%d":""' % n for n in range(200_000))
        bomb = b'{"run":"r",' + fill % (pairs if b"[" not in fill else b"{}," * 1_000_000 + b"{}") + b"}"
        tracemalloc.start()
        with pytest.raises(ManifestRefusedError):
            parse_manifest(bomb)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 12 * len(bomb), fill
