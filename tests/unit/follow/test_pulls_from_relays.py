"""A pull from relays: none is believed, none is waited for in vain, and what was checked is handed on."""

import asyncio
import os

import pytest

from refitd.follow import transfer
from refitd.follow.upstream import FilePart, NotYetError, UnreachableError
from refitd_client.contract.manifest import parse_manifest
from support.pulls import RUN, V1, FakeSource, Stage, same, with_right_digests


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("knows_blocks", [True, False])
async def test_a_relay_that_gives_wrong_bytes_is_found_named_and_not_used_again(
    stage: Stage, knows_blocks: bool, early: bool
) -> None:
    with_right_digests(stage.hub, 1)
    stage.upstream.says_blocks, stage.sources.early = knows_blocks, early

    async def lies(part: FilePart, data: bytes) -> bytes:
        return bytes(len(data)) if part.start == 128 else data

    relay = FakeSource(stage.hub, name="http://liar:8700", on_part=lies)
    stage.sources.known = [relay]
    await stage.pull()
    assert same(stage)
    if knows_blocks:
        assert "bytes 128 to 191 of " in stage.sources.wrong["http://liar:8700"]
        assert {part.start for part in relay.parts if part in stage.upstream.parts} == {128}  # nothing good came twice


async def test_a_relay_that_dies_in_the_middle_is_left_and_the_rest_comes_from_the_upstream(stage: Stage) -> None:
    with_right_digests(stage.hub, 1)
    dead, good = FakeSource(stage.hub, name="dead"), FakeSource(stage.hub, name="good")

    async def dies(part: FilePart, data: bytes) -> bytes:
        if len(dead.parts) > 2:
            raise UnreachableError("the connection was cut")
        return data

    dead.on_part = dies
    stage.sources.known = [dead, good]
    await stage.pull()
    assert same(stage)
    assert stage.sources.lost == ["dead"]
    asked = [(part.file, part.start) for part in (*dead.parts, *good.parts)]
    assert len(asked) == len(set(asked))
    assert [part for part in stage.upstream.parts if part in dead.parts] == dead.parts[2:]
    assert not stage.sources.wrong


async def test_a_relay_that_has_not_yet_got_a_block_is_asked_again_and_left_when_it_gets_no_further(
    stage: Stage,
) -> None:
    with_right_digests(stage.hub, 1)
    slow = FakeSource(stage.hub, name="slow")

    async def waits(part: FilePart, data: bytes) -> bytes:
        if part.start == 64 or slow.parts.count(part) < transfer.NOT_YET_TIMES:
            raise NotYetError("it has not come here yet")
        return data

    slow.on_part = waits
    stage.sources.known = [slow]
    await stage.pull()
    assert same(stage)
    assert slow.parts.count(slow.parts[0]) == transfer.NOT_YET_TIMES
    assert stage.sources.lost == ["slow"]
    assert any(part.start == 64 for part in stage.upstream.parts)


async def test_each_stripe_comes_from_its_own_relay_and_one_that_waits_holds_up_no_other(stage: Stage) -> None:
    with_right_digests(stage.hub, 1)
    may_go_on = asyncio.Event()
    slow, fast = FakeSource(stage.hub, name="slow"), FakeSource(stage.hub, name="fast")

    async def waits(part: FilePart, data: bytes) -> bytes:
        await may_go_on.wait()
        return data

    slow.on_part = waits
    stage.sources.known = [slow, fast]
    manifest_ = parse_manifest(await stage.upstream.manifest(V1))
    count = sum(max(1, -(-file.size // 64)) for file in manifest_.files.values())

    async def gives(part: FilePart, data: bytes) -> bytes:
        if len(fast.parts) == count // 2:  # the last of them, and nothing of the other stripe has come yet
            may_go_on.set()
        return data

    fast.on_part = gives
    await stage.pull()
    assert same(stage)
    assert len(slow.parts) == count - count // 2
    assert stage.upstream.parts == []


async def test_what_was_checked_is_handed_on_while_the_rest_still_comes_and_nothing_else_is(stage: Stage) -> None:
    with_right_digests(stage.hub, 1)
    held = asyncio.Event()

    async def holds(part: FilePart, data: bytes) -> bytes:
        if part.start == 128:
            await held.wait()
        return bytes(len(data)) if part.start == 64 and stage.upstream.parts.count(part) == 1 else data

    stage.upstream.on_part = holds
    pulling = asyncio.create_task(stage.pull())
    await stage.puller.began.wait_after(0)
    arrival = stage.puller.arrival(V1)
    assert arrival is not None
    name = "model-00001-of-00002.safetensors"
    assert await arrival.has(name, 0, 128, within=60)
    fd = arrival.opened(name)
    assert os.pread(fd, 128, 0) == (stage.hub / RUN / "v000001" / name).read_bytes()[:128]
    os.close(fd)
    assert not await arrival.has(name, 128, 1, within=0)
    assert not await arrival.has(name, 100, 64, within=0)
    held.set()
    await pulling
    assert await arrival.has(name, 128, 64, within=0)
    stage.puller.settled()
    assert stage.puller.arrival(V1) is None
    assert not await arrival.has(name, 0, 64, within=60)


async def test_an_upstream_that_has_relays_give_a_block_is_asked_again_and_the_relay_that_it_names_first(
    stage: Stage,
) -> None:
    with_right_digests(stage.hub, 1)
    relay = FakeSource(stage.hub, name="named later")

    async def refuses(part: FilePart, data: bytes) -> bytes:
        if part.length == 64:
            stage.sources.known = [relay]
            raise NotYetError("enough copies were sent")
        return data

    stage.upstream.on_part = refuses
    await stage.pull()
    assert same(stage)
    refused = [part for part in stage.upstream.parts if part.length == 64]
    assert 1 <= len(refused) <= transfer.PARTS
    assert all(relay.parts.count(part) == 1 for part in refused)
