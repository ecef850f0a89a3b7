"""A small version goes from host to host in smaller blocks than those of its manifest, and is proved as ever."""

from collections.abc import Sequence

import pytest

from refitd.follow import transfer
from refitd.follow.transfer import block_of
from refitd.follow.upstream import FilePart, UnreachableError
from refitd_client.contract.manifest import BLOCK
from support.pulls import V1, FakeSource, Stage, same, with_right_digests

SMALL = 16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "LEAST_BLOCK", SMALL)
    monkeypatch.setattr(transfer, "MOST_BLOCKS", 10**6)


@pytest.mark.parametrize(
    ("total", "block"), [(0, 2**20), (128 * 2**20, 2**20), (268 * 10**6, 2**21), (460 * 10**6, 2**22), (10**12, BLOCK)]
)
def test_a_version_has_about_as_many_blocks_whatever_its_size_but_none_larger_than_the_manifest_s(
    monkeypatch: pytest.MonkeyPatch, stage: Stage, total: int, block: int
) -> None:
    monkeypatch.undo()
    assert block_of(stage.sources, V1, total) == block
    stage.sources.early = False  # nobody pulls from here, nor this host from a relay
    assert block_of(stage.sources, V1, total) == BLOCK


async def test_no_part_is_larger_and_what_was_pulled_is_the_version(stage: Stage) -> None:
    with_right_digests(stage.hub, 1)
    relay = FakeSource(stage.hub, name="relay")
    stage.sources.known = [relay]
    await stage.pull()
    assert same(stage)
    assert {part.length for part in relay.parts} >= {SMALL}
    assert max(part.length for part in relay.parts) == SMALL


async def test_wrong_bytes_of_a_relay_are_found_in_the_small_block(stage: Stage) -> None:
    with_right_digests(stage.hub, 1)

    async def lies(part: FilePart, data: bytes) -> bytes:
        return bytes(len(data)) if part.start == 128 else data

    relay = FakeSource(stage.hub, name="http://liar:8700", on_part=lies)
    stage.sources.known = [relay]
    await stage.pull()
    assert same(stage)
    assert "bytes 128 to 143 of " in stage.sources.wrong["http://liar:8700"]


async def test_digests_that_a_link_has_damaged_make_nobody_a_liar(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_right_digests(stage.hub, 1)
    right, asked = stage.upstream.blocks, list[str]()

    async def damaged(version: str, file: str, size: int) -> Sequence[bytes] | None:
        asked.append(file)
        told = list(await right(version, file, size) or ())
        return [bytes(16), *told[1:]] if len(asked) % 2 else told

    monkeypatch.setattr(stage.upstream, "blocks", damaged)
    stage.sources.known = [FakeSource(stage.hub, name="relay")]
    await stage.pull()
    assert same(stage)
    assert asked
    assert not stage.sources.wrong


@pytest.mark.parametrize("size", [SMALL, 2 * SMALL])
async def test_a_pull_that_is_begun_again_believes_blocks_of_its_own_size_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    with_right_digests(stage.hub, 1)

    async def cut(part: FilePart, data: bytes) -> bytes:
        if part.start >= 128:
            raise UnreachableError("the connection was cut")
        return data

    stage.upstream.on_part = cut
    with pytest.raises(UnreachableError):
        await stage.pull()
    monkeypatch.setattr(transfer, "LEAST_BLOCK", size)
    stage.upstream.on_part, stage.upstream.parts = None, []
    totals = await stage.pull()
    assert same(stage)
    assert (totals.resumed > 0) is (size == SMALL)
