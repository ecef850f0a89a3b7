"""The digest that a delta's file ends in, by blocks. Nothing else is taken."""

from typing import Any

import pytest
import xxhash
from test_delta_format import EXAMPLE, same

from refitd_client.contract import manifest as digest
from refitd_client.delta import DeltaRefusedError, encode, parse_delta
from refitd_client.delta import reader as own_digest

BLOCK = 100


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "BLOCK", BLOCK)


def by_hand(data: bytes, block: int = BLOCK) -> bytes:
    if len(data) <= block:
        return xxhash.xxh3_128_digest(data)
    each = [xxhash.xxh3_128_digest(data[at : at + block]) for at in range(0, len(data), block)]
    return xxhash.xxh3_128_digest(b"".join(each))


@pytest.mark.usefixtures("small_blocks")
def test_a_file_is_held_against_its_digest_by_several_threads(monkeypatch: Any) -> None:
    monkeypatch.setattr(own_digest, "lanes_for", lambda jobs: 4)
    assert same(parse_delta(encode(EXAMPLE).to_bytes()), EXAMPLE)


@pytest.mark.parametrize("of_block", [(1, 0), (1, 1), (1, -1), (2, 0), (2, -1), (7, 0)])
def test_a_file_ends_in_the_digest_of_the_blocks_before(of_block: tuple[int, int], monkeypatch: Any) -> None:
    """Wherever the last of them ends: the digest itself may be in it, or in a block of its own, or in two."""
    blocks, more = of_block
    before = len(encode(EXAMPLE).to_bytes()) - 16
    block = -(-before // blocks) + more
    monkeypatch.setattr(digest, "BLOCK", block)
    data = encode(EXAMPLE).to_bytes()
    assert data[before:] == by_hand(data[:before], block)
    assert same(parse_delta(data), EXAMPLE)


@pytest.mark.usefixtures("small_blocks")
def test_a_damaged_byte_in_any_block_is_refused() -> None:
    raw = encode(EXAMPLE).to_bytes()
    assert len(raw) > 10 * BLOCK
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 1
        with pytest.raises(DeltaRefusedError):
            parse_delta(bytes(damaged))


@pytest.mark.usefixtures("small_blocks")
def test_a_delta_of_the_first_format_is_refused_with_the_advice_to_publish_in_full() -> None:
    """Its digest is of all bytes in one go."""
    body = encode(EXAMPLE).to_bytes()[:-16].replace(b"refit-delta/2", b"refit-delta/1")
    with pytest.raises(DeltaRefusedError, match=r"its format is refit-delta/1, and .*: publish a full version"):
        parse_delta(body + xxhash.xxh3_128_digest(body))


@pytest.mark.usefixtures("small_blocks")
def test_the_digest_of_all_bytes_in_one_go_is_none() -> None:
    """Readers in other languages know one way."""
    body = encode(EXAMPLE).to_bytes()[:-16]
    with pytest.raises(DeltaRefusedError, match="its digest is not that of its bytes"):
        parse_delta(body + xxhash.xxh3_128_digest(body))


@pytest.mark.usefixtures("small_blocks")
def test_what_was_held_against_its_manifest_is_not_digested_again(monkeypatch: Any) -> None:
    raw = encode(EXAMPLE).to_bytes()
    monkeypatch.setattr(own_digest, "digest_of_pieces", None)
    assert same(parse_delta(raw, digested=True), EXAMPLE)
    with pytest.raises(TypeError):
        parse_delta(raw)
