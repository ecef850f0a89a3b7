"""The digest that a delta's file ends in: by blocks, in files of the first format in one go. Nothing else is taken."""

from typing import Any

import pytest
import xxhash
from test_delta_format import EXAMPLE, FORMS, same

from refitd_client.contract import digest
from refitd_client.delta import Compression, DeltaRefusedError, Encoding, encode, parse_delta
from refitd_client.delta import reader as own_digest
from refitd_client.delta.layout import FIRST_FORMAT, FORMAT

FORMATS = [FORMAT, FIRST_FORMAT]
BLOCK = 100
BY_AN_EARLIER_REFITD = bytes.fromhex(
    """
    c8010000000000007b225f5f6d657461646174615f5f223a7b22666f726d6174223a2272656669742d64656c74612f31222c226261736522
    3a226578707e747269616c7e76303030313232222c2276657273696f6e223a226578707e747269616c7e76303030313233222c22656e636f
    64696e67223a22666c6174222c22636f6d7072657373696f6e223a226e6f6e65222c2274656e736f7273223a227b5c22775c223a7b5c2264
    747970655c223a5c22424631365c222c5c2273686170655c223a5b322c335d2c5c226368616e6765645c223a322c5c22626173655c223a5c
    22333535613333336438313366333630315c222c5c22726573756c745c223a5c22383066666664306662323164386333355c227d7d227d2c
    22696e64696365733a77223a7b226474797065223a22553332222c227368617065223a5b325d2c22646174615f6f666673657473223a5b30
    2c385d7d2c2276616c7565733a77223a7b226474797065223a2242463136222c227368617065223a5b325d2c22646174615f6f6666736574
    73223a5b382c31325d7d2c22646967657374223a7b226474797065223a225538222c227368617065223a5b31365d2c22646174615f6f6666
    73657473223a5b31322c32385d7d7d20010000000400000001409f40310081be196baad5fca5056912b22696
    """
)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "BLOCK", BLOCK)


def by_hand(format_: str, data: bytes, block: int = BLOCK) -> bytes:
    if format_ == FIRST_FORMAT or len(data) <= block:
        return xxhash.xxh3_128_digest(data)
    each = [xxhash.xxh3_128_digest(data[at : at + block]) for at in range(0, len(data), block)]
    return xxhash.xxh3_128_digest(b"".join(each))


def in_format(format_: str, form: tuple[Encoding, Compression] = FORMS[0], *, digest_of: str | None = None) -> bytes:
    """The example's file, with the digest of that format, or of the other."""
    body = encode(EXAMPLE, *form).to_bytes()[:-16]
    assert body.count(FORMAT.encode()) == 1
    body = body.replace(FORMAT.encode(), format_.encode())
    return body + by_hand(digest_of or format_, body)


def test_a_file_of_an_earlier_refitd_is_read() -> None:
    found = parse_delta(BY_AN_EARLIER_REFITD)
    assert (found.version, found.changes["w"].indices.tolist()) == ("exp~trial~v000123", [1, 4])
    for at in range(len(BY_AN_EARLIER_REFITD)):
        damaged = bytearray(BY_AN_EARLIER_REFITD)
        damaged[at] ^= 1
        with pytest.raises(DeltaRefusedError):
            parse_delta(bytes(damaged))


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_blocks")
def test_both_formats_are_read(format_: str, form: tuple[Encoding, Compression], monkeypatch: Any) -> None:
    """And held against their digest by several threads."""
    monkeypatch.setattr(own_digest, "lanes_for", lambda jobs: 4)
    assert same(parse_delta(in_format(format_, form)), EXAMPLE)


@pytest.mark.parametrize("of_block", [(1, 0), (1, 1), (1, -1), (2, 0), (2, -1), (7, 0)])
def test_a_file_ends_in_the_digest_of_the_blocks_before(of_block: tuple[int, int], monkeypatch: Any) -> None:
    """Wherever the last of them ends: the digest itself may be in it, or in a block of its own, or in two."""
    blocks, more = of_block
    before = len(encode(EXAMPLE).to_bytes()) - 16
    block = -(-before // blocks) + more
    monkeypatch.setattr(digest, "BLOCK", block)
    data = encode(EXAMPLE).to_bytes()
    assert data[before:] == by_hand(FORMAT, data[:before], block)
    assert same(parse_delta(data), EXAMPLE)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.usefixtures("small_blocks")
def test_a_damaged_byte_in_any_block_is_refused(format_: str) -> None:
    """Also one that makes a file of one format say that it is of the other."""
    raw = in_format(format_)
    assert len(raw) > 10 * BLOCK
    for at in range(len(raw)):
        for change in (1, ord("1") ^ ord("2")):
            damaged = bytearray(raw)
            damaged[at] ^= change
            with pytest.raises(DeltaRefusedError):
                parse_delta(bytes(damaged))


@pytest.mark.parametrize(("format_", "other"), [FORMATS, FORMATS[::-1]])
@pytest.mark.usefixtures("small_blocks")
def test_the_digest_of_the_other_format_is_none(format_: str, other: str) -> None:
    """Readers in other languages know one way for each."""
    with pytest.raises(DeltaRefusedError, match="its digest is not that of its bytes"):
        parse_delta(in_format(format_, digest_of=other))


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.usefixtures("small_blocks")
def test_what_was_held_against_its_manifest_is_not_digested_again(format_: str, monkeypatch: Any) -> None:
    raw = in_format(format_)
    monkeypatch.setattr(own_digest, "digest_of_pieces", None)
    assert same(parse_delta(raw, digested=True), EXAMPLE)
    with pytest.raises(TypeError):
        parse_delta(raw)
