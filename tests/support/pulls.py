"""A pull without HTTP: versions in a folder, a fake upstream and fake relays that read them, and the real puller."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from refitd.follow.puller import Puller, PullTotals
from refitd.follow.sources import RelaySource
from refitd.follow.upstream import FilePart
from refitd_client.contract import manifest
from refitd_client.contract.manifest import digest_of_pieces, parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME
from support.published import leftovers, versions

RUN = "run"
V1 = "run~v000001"


@dataclass
class FakeSource:
    """Reads versions from a folder. `on_part` is called before each part: it may raise, or return other bytes."""

    root: Path
    name: str = "hub"
    says_blocks: bool = True
    knows_blocks: bool = True
    parts: list[FilePart] = field(default_factory=list[FilePart])
    on_part: Callable[[FilePart, bytes], Awaitable[bytes]] | None = None

    def folder(self, version: str) -> Path:
        return self.root / version.replace("~", "/")

    async def manifest(self, version: str) -> bytes:
        return (self.folder(version) / MANIFEST_NAME).read_bytes()

    async def blocks(self, version: str, file: str, size: int) -> Sequence[bytes] | None:
        data = (self.folder(version) / file).read_bytes()
        found = [digest_of_pieces([data[at : at + size]]) for at in range(0, len(data), size)]
        return found if self.says_blocks else None

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


async def no_sleep(_: float) -> None:
    await asyncio.sleep(0)


@dataclass
class Stage:
    hub: Path
    root: Path
    upstream: FakeSource
    sources: FakeSources
    puller: Puller

    async def pull(self, version: str = V1) -> PullTotals:
        return await self.puller.pull(version, parse_manifest(await self.upstream.manifest(version)).digest)

    @property
    def here(self) -> list[str]:
        """The versions on this host, each held against its manifest."""
        run = self.root / RUN
        if not run.exists():
            return []
        assert leftovers(run) == []
        return versions(run)


def with_right_digests(hub: Path, step: int) -> None:
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
