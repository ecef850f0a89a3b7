"""A file has one digest, whoever computes it, in whichever pieces; large files by blocks, so that threads can share."""

import numpy as np
import pytest
import xxhash

from refitd_client.contract import manifest as digest
from refitd_client.contract.manifest import (
    BLOCK,
    FileDigest,
    blocks,
    digest_of_block,
    digest_of_pieces,
    in_blocks,
    joined,
)


def data_of(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("size", [0, 1, 1000, BLOCK - 1, BLOCK])
def test_a_file_of_one_block_has_the_digest_that_everybody_computes(size: int) -> None:
    data, found = data_of(size), FileDigest()
    found.update(data.data)
    assert found.text == f"xxh3:{xxhash.xxh3_128_hexdigest(data)}"


@pytest.mark.parametrize("size", [BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 77])
@pytest.mark.parametrize("step", [2**20, 2**20 + 3, 3 * BLOCK])
def test_pieces_and_blocks_give_the_same(size: int, step: int) -> None:
    data, found = data_of(size), FileDigest()
    for begin in range(0, size, step):
        found.update(data[begin : begin + step].data)
    by_hand = b"".join(xxhash.xxh3_128_digest(data[begin : begin + BLOCK]) for begin in range(0, size, BLOCK))
    assert found.text == f"xxh3-16m:{xxhash.xxh3_128_hexdigest(by_hand)}"
    assert found.text == joined([digest_of_block(data[begin:end]) for begin, end in blocks(size)])


def test_blocks_in_another_order_are_another_file() -> None:
    one, other = digest_of_block(data_of(5)), digest_of_block(data_of(6))
    assert joined([one, other]) != joined([other, one])


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200, 777])
@pytest.mark.parametrize("step", [7, 100, 1000])
def test_blocks_that_others_digested_and_the_rest_give_the_same(
    size: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the file's parts are cut, and whatever is appended to it."""
    monkeypatch.setattr(digest, "BLOCK", 100)
    data, plain, shared = bytes(data_of(size)), FileDigest(), FileDigest()
    plain.update(data)
    plain.update(b"end")
    *whole, last = in_blocks(memoryview(data)[begin : begin + step] for begin in range(0, size, step))
    shared = FileDigest()
    for piece in last:
        shared.update(piece)
    shared.begin_with([digest_of_pieces(block) for block in whole])
    shared.update(b"end")
    assert shared.text == plain.text
