"""A version is pulled whole or not at all, and no source is believed: every byte is held against the manifest."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from refitd.follow import transfer
from refitd.follow.puller import Puller, PullRefusedError
from refitd.follow.sources import RelaySource
from refitd.follow.upstream import FilePart, GoneError, NotYetError, UnreachableError, WrongError
from refitd_client import WeightPublisher
from refitd_client.contract import manifest
from refitd_client.contract.manifest import digest_of_pieces, parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME, ShardLayout, layout_of, slot_name, slots_path
from support.checkpoints import publish, tensors
from support.published import check, leftovers, versions

RUN = "run"
V1 = "run~v000001"


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 bytes, so that small files have several."""
    monkeypatch.setattr("refitd.follow.transfer.BLOCK", 64)
    monkeypatch.setattr(manifest, "BLOCK", 64)


@dataclass
class FakeSource:
    """Reads versions from a folder. `on_part` is called before each part: it may raise, or return other bytes."""

    root: Path
    name: str = "hub"
    knows_blocks: bool = True
    parts: list[FilePart] = field(default_factory=list[FilePart])
    on_part: Callable[[FilePart, bytes], Awaitable[bytes]] | None = None

    def folder(self, version: str) -> Path:
        return self.root / version.replace("~", "/")

    async def manifest(self, version: str) -> bytes:
        return (self.folder(version) / MANIFEST_NAME).read_bytes()

    async def blocks(self, version: str, file: str) -> Sequence[bytes] | None:
        data = (self.folder(version) / file).read_bytes()
        return [digest_of_pieces([data[at : at + 64]]) for at in range(0, len(data), 64)] if self.knows_blocks else None

    async def fill(self, part: FilePart, buffer: memoryview) -> None:
        self.parts.append(part)
        data = (self.folder(part.version) / part.file).read_bytes()[part.start : part.start + part.length]
        if self.on_part is not None:
            data = await self.on_part(part, data)
        buffer[:] = data

    async def aclose(self) -> None: ...


@dataclass
class FakeSources:
    """An upstream, and relays."""

    upstream: FakeSource
    known: list[FakeSource | None] = field(default_factory=list["FakeSource | None"])
    wrong: dict[str, str] = field(default_factory=dict[str, str])
    lost: list[str] = field(default_factory=list[str])
    early: bool = True

    def checks_blocks(self, version: str) -> bool:
        return self.early

    def stripes(self, version: str) -> int:
        return max(1, len(self.known))

    def relay(self, version: str, block: int) -> RelaySource | None:
        at = self.known[block % len(self.known)] if self.known else None
        return None if at is None or at.name in self.wrong or at.name in self.lost else RelaySource(at, at.name)

    def distrust(self, relay: RelaySource, why: str) -> None:
        self.wrong[relay.process] = why

    def failed(self, relay: RelaySource, why: str) -> None:
        self.lost.append(relay.process)


async def _no_sleep(_: float) -> None:
    await asyncio.sleep(0)


@dataclass
class Stage:
    hub: Path
    root: Path
    upstream: FakeSource
    sources: FakeSources
    puller: Puller

    async def pull(self, version: str = V1) -> None:
        await self.puller.pull(version, parse_manifest(await self.upstream.manifest(version)).digest)

    @property
    def here(self) -> list[str]:
        """The versions on this host, each held against its manifest."""
        run = self.root / RUN
        if not run.exists():
            return []
        assert leftovers(run) == []
        return versions(run)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    hub, root = tmp_path / "hub", tmp_path / "root"
    root.mkdir()
    publish(hub, RUN, 1, tensors(1))
    upstream = FakeSource(hub)
    sources = FakeSources(upstream)
    return Stage(hub, root, upstream, sources, Puller(root, sources, _no_sleep))


def _with_right_digests(hub: Path, step: int) -> None:
    """Write the manifest again with digests by the small blocks."""
    folder = hub / RUN / f"v{step:06d}"
    known = parse_manifest((folder / MANIFEST_NAME).read_bytes())
    for name in known.files:
        data = (folder / name).read_bytes()
        blocks = [digest_of_pieces([data[at : at + 64]]) for at in range(0, len(data), 64)]
        known.files[name] = manifest.ManifestFile(size=len(data), digest=manifest.joined(blocks))
    (folder / MANIFEST_NAME).write_bytes(known.to_json())


def same(stage: Stage, step: int = 1) -> bool:
    """Whether a version's files are byte by byte those of the hub."""
    name = f"{RUN}/v{step:06d}"
    theirs = {path.name: path.read_bytes() for path in (stage.hub / name).iterdir()}
    return theirs == {path.name: path.read_bytes() for path in (stage.root / name).iterdir()}


async def test_a_version_is_pulled_byte_by_byte_and_counts_only_when_whole(stage: Stage) -> None:
    _with_right_digests(stage.hub, 1)
    seen: list[list[str]] = []

    async def look(part: FilePart, data: bytes) -> bytes:
        seen.append(versions(stage.root / RUN))
        return data

    stage.upstream.on_part = look
    await stage.pull()
    assert not any(seen)
    assert same(stage)
    assert stage.here == ["v000001"]


async def test_a_link_that_is_cut_loses_the_parts_under_way_and_no_others(stage: Stage) -> None:
    _with_right_digests(stage.hub, 1)
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


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("knows_blocks", [True, False])
async def test_a_relay_that_gives_wrong_bytes_is_found_named_and_not_used_again(
    stage: Stage, knows_blocks: bool, early: bool
) -> None:
    _with_right_digests(stage.hub, 1)
    stage.upstream.knows_blocks, stage.sources.early = knows_blocks, early

    async def lies(part: FilePart, data: bytes) -> bytes:
        return bytes(len(data)) if part.start == 128 else data

    relay = FakeSource(stage.hub, name="http://liar:8700", on_part=lies)
    stage.sources.known = [relay]
    await stage.pull()
    assert same(stage)
    if knows_blocks:
        assert "block 2 of " in stage.sources.wrong["http://liar:8700"]
        assert {part.start for part in relay.parts if part in stage.upstream.parts} == {128}  # nothing good came twice


async def test_an_upstream_whose_bytes_are_wrong_twice_gives_no_version(stage: Stage) -> None:
    _with_right_digests(stage.hub, 1)

    async def damaged(part: FilePart, data: bytes) -> bytes:
        return bytes(len(data)) if part.start == 64 else data

    stage.upstream.on_part = damaged
    with pytest.raises(WrongError, match="hub gave wrong bytes of"):
        await stage.pull()
    assert stage.here == []


async def test_a_version_that_is_collected_while_it_is_pulled_is_gone_and_nothing_stays_of_it(stage: Stage) -> None:
    _with_right_digests(stage.hub, 1)

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
    _with_right_digests(stage.hub, 1)
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


async def test_a_pull_whose_upstream_went_away_loses_only_the_parts_that_were_under_way(stage: Stage) -> None:
    _with_right_digests(stage.hub, 1)

    async def goes_away(part: FilePart, data: bytes) -> bytes:
        if len(stage.upstream.parts) > 8:
            raise UnreachableError("the connection was cut")
        return data

    stage.upstream.on_part = goes_away
    with pytest.raises(UnreachableError):
        await stage.pull()
    assert versions(stage.root / RUN) == []
    stage.upstream.on_part = None
    before, stage.upstream.parts = stage.upstream.parts[:8], []
    await stage.pull()
    assert same(stage)
    again = {(part.file, part.start) for part in before} & {(part.file, part.start) for part in stage.upstream.parts}
    assert len(again) < transfer.PARTS  # the one that broke was not among the first eight


async def test_what_a_lying_relay_gave_before_a_restart_is_found_out_after_it(stage: Stage) -> None:
    _with_right_digests(stage.hub, 1)

    async def lies(part: FilePart, data: bytes) -> bytes:
        if len(relay.parts) > 3:
            await asyncio.Event().wait()
        if len(relay.parts) == 3:
            came.set()
        return bytes(len(data))

    came = asyncio.Event()
    relay = FakeSource(stage.hub, name="http://liar:8700", on_part=lies)
    stage.sources.known = [relay]
    pulling = asyncio.create_task(stage.pull())
    await came.wait()
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    stage.sources.known = []
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


async def test_a_version_is_pulled_into_the_files_of_a_collected_one_of_the_same_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    hub, root = tmp_path / "hub", tmp_path / "root"
    root.mkdir()
    with WeightPublisher(hub, RUN) as publisher:
        publisher.publish(tensors(1), step=1)
        publisher.publish(tensors(2), step=2)
    upstream = FakeSource(hub)
    puller = Puller(root, FakeSources(upstream), _no_sleep)
    await puller.pull(V1, parse_manifest(await upstream.manifest(V1)).digest)
    first = root / RUN / "v000001"
    shard = next(first.glob("*.safetensors"))
    data = shard.read_bytes()
    layout = layout_of([_layout(shard.name, data)])
    slot = root / slots_path(RUN) / slot_name(layout, "0" * 32)
    slot.mkdir(parents=True)
    inode = shard.stat().st_ino
    shard.rename(slot / shard.name)
    await puller.pull("run~v000002", parse_manifest(await upstream.manifest("run~v000002")).digest)
    second = root / RUN / "v000002"
    assert (second / shard.name).stat().st_ino == inode
    check(second)


def _layout(name: str, data: bytes) -> ShardLayout:
    return ShardLayout(name=name, header=data[: 8 + int.from_bytes(data[:8], "little")], size=len(data))


async def test_a_relay_that_dies_in_the_middle_is_left_and_the_rest_comes_from_the_upstream(stage: Stage) -> None:
    _with_right_digests(stage.hub, 1)
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
    _with_right_digests(stage.hub, 1)
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
    _with_right_digests(stage.hub, 1)
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
    _with_right_digests(stage.hub, 1)
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
