"""A fuzzer on the parsers of what anyone may have written: safetensors headers, manifests, indices, deltas."""

import json
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from refitd_client.checkpoint.header import Header, HeaderRefusedError, read_header
from refitd_client.checkpoint.index import Index, IndexRefusedError, parse_index
from refitd_client.contract.manifest import Manifest, ManifestFile, ManifestRefusedError, TensorsSummary, parse_manifest
from refitd_client.delta import Change, Delta, DeltaRefusedError, encode, parse_delta
from support.fuzz import FUZZ, changed, check_sentence, within_bounds
from support.rawfiles import bf16, f32, safetensors

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

CHANGES = {
    name: Change(
        dtype="BF16",
        shape=(4, 4),
        indices=np.array(indices, np.uint32),
        values=np.array(indices, np.uint16),
        base=1,
        result=2,
    )
    for name, indices in {"a": [0, 3, 15], "b": [7]}.items()
}
DELTAS = [encode(Delta(base="exp~v000122", version="exp~v000123", changes=CHANGES)).to_bytes()[:-16]]


@st.composite
def hostile_files(draw: st.DrawFn, files: list[bytes]) -> bytes:
    """Of most files the length of the header is put right again, to get past it."""
    whole = draw(st.sampled_from(files))
    length = struct.unpack("<Q", whole[:8])[0]
    if draw(st.integers(0, 3)) == 0:
        return draw(changed([whole]))
    header = draw(changed([whole[8 : 8 + length]]))
    return struct.pack("<Q", len(header)) + header + whole[8 + length :]


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


@FUZZ
@given(data=hostile_files(FILES))
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


@FUZZ
@given(data=hostile_files(DELTAS))
def test_no_bytes_make_the_delta_parser_do_anything_but_refuse_or_give_a_delta(data: bytes) -> None:
    """Its digest is right: a user who means harm computes it."""

    def parse() -> Delta | None:
        try:
            return parse_delta(data + xxhash.xxh3_128(data).digest())
        except DeltaRefusedError as refusal:
            check_sentence(refusal)
            return None

    delta = within_bounds(len(data), parse)
    if delta is not None:
        for change in delta.changes.values():
            assert len(change.indices) == len(change.values)
            assert not len(change.indices) or int(change.indices.max()) < np.prod(change.shape)


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
