"""A delta's file that is gone through piece by piece says what one that is read whole says."""

import os
import tracemalloc
from pathlib import Path

import pytest
from test_delta_format import EXAMPLE, change, delta, edits, remade

from refitd_client.delta import Delta, DeltaFile, DeltaRefusedError, encode, head
from refitd_client.delta import reader as pieces


@pytest.fixture(params=[1, 2, 1000], autouse=True)
def few_at_a_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "AT_A_TIME", request.param)


def gone_through(path: Path) -> dict[str, tuple[list[int], list[int]]]:
    fd = os.open(path, os.O_RDONLY)
    try:
        file = DeltaFile(fd)
        file.check_digest()
        found = {name: list(file.pieces(name)) for name in file.head.rows}
    finally:
        os.close(fd)
    return {
        name: ([int(i) for part, _ in parts for i in part], [int(v) for _, part in parts for v in part])
        for name, parts in found.items()
    }


def said(made: Delta) -> dict[str, tuple[list[int], list[int]]]:
    return {name: (each.indices.tolist(), each.values.tolist()) for name, each in made.changes.items()}


def test_every_width_is_gone_through(tmp_path: Path) -> None:
    far = delta(far=change((10_000_000,), [0, 1, 9_000_000, 9_999_999]), **EXAMPLE.changes)
    for made in (EXAMPLE, far):
        (tmp_path / "file").write_bytes(encode(made).to_bytes())
        assert gone_through(tmp_path / "file") == said(made)


@pytest.mark.parametrize("harm", edits())
def test_what_could_do_harm_is_refused(tmp_path: Path, harm: str) -> None:
    edit, says = edits()[harm]
    (tmp_path / "file").write_bytes(remade(edit))
    with pytest.raises(DeltaRefusedError, match=says) as caught:
        gone_through(tmp_path / "file")
    assert str(caught.value).isprintable()


def test_a_file_whose_digest_is_wrong_is_refused(tmp_path: Path) -> None:
    damaged = bytearray(encode(EXAMPLE).to_bytes())
    damaged[-1] ^= 1
    (tmp_path / "file").write_bytes(damaged)
    with pytest.raises(DeltaRefusedError, match="digest"):
        gone_through(tmp_path / "file")


def test_a_header_of_empty_lists_takes_a_few_times_its_own_size() -> None:
    """A parser that builds everything first takes thirty times as much."""
    text = b'{"a":{"b":[' + b",".join([b"[]"] * 2**20) + b"]}}"
    data = len(text).to_bytes(8, "little") + text + bytes(16)
    tracemalloc.start()
    try:
        with pytest.raises(DeltaRefusedError):
            head.head_in(memoryview(data))
        assert tracemalloc.get_traced_memory()[1] < 6 * len(text)
    finally:
        tracemalloc.stop()
