"""A version is pulled whole or not at all, and no source is believed: every byte is held against the manifest."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from refitd.follow.puller import Puller, PullRefusedError
from refitd.follow.upstream import ByteSource, FilePart, GoneError, UnreachableError, WrongError
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
    monkeypatch.setattr("refitd.follow.puller.BLOCK", 64)
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
    known: list[FakeSource] = field(default_factory=list[FakeSource])
    wrong: dict[str, str] = field(default_factory=dict[str, str])

    def relays(self, version: str) -> Sequence[ByteSource]:
        return [relay for relay in self.known if relay.name not in self.wrong]

    def distrust(self, relay: str, why: str) -> None:
        self.wrong[relay] = why

    def failed(self, version: str, relay: str) -> None:
        self.known = [each for each in self.known if each.name != relay]


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


@pytest.mark.parametrize("knows_blocks", [True, False])
async def test_a_relay_that_gives_wrong_bytes_is_found_named_and_not_used_again(
    stage: Stage, knows_blocks: bool
) -> None:
    _with_right_digests(stage.hub, 1)
    stage.upstream.knows_blocks = knows_blocks

    async def lies(part: FilePart, data: bytes) -> bytes:
        return bytes(len(data)) if part.start == 128 else data

    relay = FakeSource(stage.hub, name="http://liar:8700", on_part=lies)
    stage.sources.known = [relay]
    await stage.pull()
    assert same(stage)
    if knows_blocks:
        assert "wrong bytes" in stage.sources.wrong["http://liar:8700"]
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


async def test_a_pull_whose_upstream_went_away_goes_on_where_it_was(stage: Stage) -> None:
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
    assert not {(part.file, part.start) for part in before} & {(part.file, part.start) for part in stage.upstream.parts}


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
