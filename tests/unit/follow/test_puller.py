"""A version is pulled whole or not at all, and no source is believed: every byte is held against the manifest."""

import asyncio

import pytest

from refitd_client import WeightPublisher
from refitd_client.contract.manifest import parse_manifest
from refitd_hosts.follow import puller
from refitd_hosts.follow.puller import Puller, PullRefusedError
from refitd_hosts.follow.upstream import FilePart, GoneError, UnreachableError, WrongError
from support.checkpoints import publish, tensors
from support.published import versions
from support.pulls import RUN, V1, Stage, no_sleep, same, with_right_digests


async def test_a_version_is_pulled_byte_by_byte_and_counts_only_when_whole(stage: Stage) -> None:
    with_right_digests(stage.hub, 1)
    seen: list[list[str]] = []

    async def look(part: FilePart, data: bytes) -> bytes:
        seen.append(versions(stage.root / RUN))
        return data

    stage.upstream.on_part = look
    await stage.pull()
    assert not any(seen)
    assert same(stage)
    assert stage.here == ["v000001"]


async def test_a_version_that_has_its_name_already_is_pulled_no_second_time(stage: Stage) -> None:
    """A host was killed between the rename and its journal, which says that an earlier version of the name is gone."""
    with_right_digests(stage.hub, 1)
    first = await stage.pull()
    again = await stage.pull()
    assert (dict(again.bytes_from), again.resumed) == ({}, sum(first.bytes_from.values()))
    assert same(stage)
    (stage.root / RUN / "v000001/refit.json").write_bytes(b"{}")  # another's
    with pytest.raises(PullRefusedError, match="cannot be written"):
        await stage.pull()


async def test_a_link_that_is_cut_loses_the_parts_under_way_and_no_others(stage: Stage) -> None:
    with_right_digests(stage.hub, 1)
    cut = 0

    async def cuts(part: FilePart, data: bytes) -> bytes:
        nonlocal cut
        if cut < 3 and len(stage.upstream.parts) > 5:
            cut += 1
            raise UnreachableError("the connection was cut")
        return data

    stage.upstream.on_part = cuts
    await stage.pull()
    assert same(stage)
    wanted = {(part.file, part.start) for part in stage.upstream.parts}
    assert len(stage.upstream.parts) == len(wanted) + 3


async def test_an_upstream_whose_bytes_are_wrong_twice_gives_no_version(stage: Stage) -> None:
    with_right_digests(stage.hub, 1)

    async def damaged(part: FilePart, data: bytes) -> bytes:
        return bytes(len(data)) if part.start == 64 else data

    stage.upstream.on_part = damaged
    with pytest.raises(WrongError, match="hub gave wrong bytes of"):
        await stage.pull()
    assert stage.here == []


async def test_a_version_that_is_collected_while_it_is_pulled_is_gone_and_nothing_stays_of_it(stage: Stage) -> None:
    with_right_digests(stage.hub, 1)

    async def collected(part: FilePart, data: bytes) -> bytes:
        if len(stage.upstream.parts) > 4:
            raise GoneError("its files are not handed out")
        return data

    stage.upstream.on_part = collected
    with pytest.raises(GoneError):
        await stage.pull()
    assert stage.here == []


async def test_a_pull_that_is_given_up_leaves_nothing_once_it_is_not_wanted_and_the_next_begins_at_once(
    stage: Stage,
) -> None:
    with_right_digests(stage.hub, 1)
    began = asyncio.Event()

    async def stalls(part: FilePart, data: bytes) -> bytes:
        began.set()
        await asyncio.Event().wait()
        return data

    stage.upstream.on_part = stalls
    pulling = asyncio.create_task(stage.pull())
    await began.wait()
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert versions(stage.root / RUN) == []
    await stage.puller.keep_only(RUN, ())
    assert stage.here == []
    stage.upstream.on_part = None
    await stage.pull()
    assert same(stage)


async def test_a_pull_whose_upstream_went_away_loses_only_the_files_that_were_under_way(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_right_digests(stage.hub, 1)

    async def goes_away(part: FilePart, data: bytes) -> bytes:
        if part.file.startswith("model-00002"):
            raise UnreachableError("the connection was cut")
        return data

    monkeypatch.setattr(puller, "PARTS", 1)
    stage.upstream.on_part = goes_away
    with pytest.raises(UnreachableError):
        await stage.pull()
    assert versions(stage.root / RUN) == []
    stage.upstream.on_part = None
    before, stage.upstream.parts = {part.file for part in stage.upstream.parts}, []
    took = await stage.pull()
    assert same(stage)
    again = {part.file for part in stage.upstream.parts}
    assert before & again == {file for file in before if file.startswith("model-00002")}
    assert took.resumed > 0


async def test_wrong_bytes_of_before_a_restart_are_found_out_after_it(stage: Stage) -> None:
    with_right_digests(stage.hub, 1)

    async def lies(part: FilePart, data: bytes) -> bytes:
        if len(stage.upstream.parts) > 3:
            await asyncio.Event().wait()
        if len(stage.upstream.parts) == 3:
            came.set()
        return bytes(len(data))

    came = asyncio.Event()
    stage.upstream.on_part = lies
    pulling = asyncio.create_task(stage.pull())
    await came.wait()
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    stage.upstream.on_part = None
    await stage.pull()
    assert same(stage)


async def test_a_manifest_of_another_version_is_refused(stage: Stage) -> None:
    publish(stage.hub, RUN, 2, tensors(2))
    digest = parse_manifest(await stage.upstream.manifest("run~v000002")).digest
    with pytest.raises(WrongError, match="another version"):
        await stage.puller.pull(V1, digest)
    assert stage.here == []


async def test_a_host_without_room_says_so_and_pulls_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refitd_client.write.version_folder.free_bytes", lambda _: 10)
    with pytest.raises(PullRefusedError, match="10 bytes free"):
        await stage.pull()
    assert stage.upstream.parts == []
    assert stage.here == []


async def test_a_run_that_a_publisher_on_this_host_holds_is_not_pulled_into(stage: Stage) -> None:
    with WeightPublisher(stage.root, RUN) as publisher:
        publisher.publish(tensors(5), step=5)
        with pytest.raises(PullRefusedError, match="run run is held by"):
            await stage.pull()


async def test_a_manifest_that_comes_in_two_ways_is_not_taken(stage: Stage) -> None:
    """Its digest is of the files that it names: a fingerprint that the link has damaged would not be noticed."""
    data = await stage.upstream.manifest(V1)
    given = [data.replace(b'"step": 1', b'"step":  1'), data]
    assert given[0] != data

    async def manifest(version: str) -> bytes:
        del version
        return given.pop(0)

    stage.upstream.manifest = manifest
    with pytest.raises(UnreachableError, match="two manifests"):
        await stage.puller.pull(V1, parse_manifest(data).digest)
    assert stage.here == []


async def test_a_root_that_is_not_the_followers_own_is_written_to_by_no_pull_and_tidied_by_none(stage: Stage) -> None:
    """Its file system may be unmounted, or another service's root may have come into its place."""
    with_right_digests(stage.hub, 1)
    left = stage.root / RUN / ".incoming-v000009"
    left.mkdir(parents=True)
    stage.puller = Puller(stage.root, stage.sources, no_sleep, guard=lambda: "/root is another root")
    with pytest.raises(PullRefusedError, match="/root is another root"):
        await stage.pull()
    assert not await stage.puller.keep_only(RUN, ())
    assert [path.name for path in (stage.root / RUN).iterdir()] == [left.name]
