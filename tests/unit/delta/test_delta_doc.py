"""docs/delta-format.md: its vectors are what refitd computes, so that what others write by it can be read."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refitd_client.delta import encode, parse_delta
from refitd_client.fingerprint import fingerprint, share, to_text, updated
from refitd_client.fingerprint.host import MIXES
from support.fingerprint_definition import key_of_column, key_of_row, mixed

DOC = (Path(__file__).parents[3] / "docs" / "delta-format.md").read_text()
TYPES: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
NUMBER = r"`?((?:0x)?[0-9a-fA-F]+)`?"


def rows(*columns: str) -> list[tuple[str, ...]]:
    """The rows of the tables with such columns."""
    found = re.findall(r"^\| " + r" \| ".join(columns) + r" \|$", DOC, re.MULTILINE)
    assert found
    return found


def block(kind: str) -> bytes:
    found = re.search(rf"^```{kind}\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL)
    assert found is not None
    return bytes.fromhex(found[1])


@pytest.mark.parametrize(("bits", "count", "expected"), rows(r"(\d+)", r"(\d+)", r"`([0-9a-f]{16})`"))
def test_the_fingerprints_are_those_of_the_page(bits: str, count: str, expected: str) -> None:
    tensor = np.arange(int(count), dtype=np.uint64).astype(TYPES[int(bits)])
    assert to_text(fingerprint(tensor)) == expected


@pytest.mark.parametrize(
    ("bits", "index", "value", "mix", "expected"),
    rows(r"(\d+)", r"(\d+)", r"`(0x\w+)`", r"`(0x\w+)`", r"`([0-9a-f]{16})`"),
)
def test_the_shares_are_those_of_the_page(bits: str, index: str, value: str, mix: str, expected: str) -> None:
    number = int(value, 16)
    assert mixed(number, int(bits) // 8) == int(mix, 16)
    at, values = np.array([int(index)], np.uint64), np.array([number], TYPES[int(bits)])
    assert to_text(share(at, values)) == expected


def test_the_constants_are_those_of_the_page() -> None:
    hexadecimal = r"`(0x\w+)`"
    for bits, seed, s1, f1, s2, f2, s3 in rows(
        r"(\d+)", hexadecimal, rf"(\d+), {hexadecimal}", rf"(\d+), {hexadecimal}", r"(\d+)"
    ):
        mix = MIXES[int(bits) // 8]
        assert (mix.seed, mix.last) == (int(seed, 16), int(s3))
        assert mix.rounds == ((int(s1), int(f1, 16)), (int(s2), int(f2, 16)))
    for name, key in (("R", key_of_column), ("Q", key_of_row)):
        found = re.findall(rf"{name}\(([01])\) = ([0-9a-f]{{16}})", DOC)
        assert [(n, to_text(key(int(n)))) for n, _ in found] == found
        assert len(found) == 2


def test_the_file_of_the_page_is_read_and_written() -> None:
    """To the byte: a writer that changes makes another format."""
    delta = parse_delta(block("flat"))
    assert (delta.base, delta.version) == ("exp~trial~v000122", "exp~trial~v000123")
    change = delta.changes["w"]
    assert (change.dtype, change.shape) == ("BF16", (2, 3))
    assert change.indices.tolist() == [1, 4]
    assert change.values.tolist() == [0x4001, 0x409F]
    base = np.array([0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0], np.uint16)
    assert fingerprint(base) == change.base
    assert updated(change.base, change.indices, base[change.indices], change.values) == change.result
    assert all(f"`{to_text(each)}`" in DOC for each in (change.base, change.result))
    assert encode(delta).to_bytes() == block("flat")
