"""A pull without HTTP: versions in a folder, a fake upstream that reads them, and the real puller."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from refitd_client.contract import manifest
from refitd_client.contract.manifest import digest_of_pieces, parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_hosts.follow.puller import Puller, PullTotals
from refitd_hosts.follow.upstream import FilePart
from support.published import leftovers, versions

RUN = "run"
V1 = "run~v000001"


@dataclass
class FakeSource:
    """Reads versions from a folder. `on_part` is called before each part: it may raise, or return other bytes."""

    root: Path
    name: str = "hub"
    parts: list[FilePart] = field(default_factory=list[FilePart])
    on_part: Callable[[FilePart, bytes], Awaitable[bytes]] | None = None

    def folder(self, version: str) -> Path:
        return self.root / version.replace("~", "/")

    async def manifest(self, version: str) -> bytes:
        return (self.folder(version) / MANIFEST_NAME).read_bytes()

    async def fill(self, part: FilePart, buffer: memoryview) -> None:
        self.parts.append(part)
        data = (self.folder(part.version) / part.file).read_bytes()[part.start : part.start + part.length]
        if self.on_part is not None:
            data = await self.on_part(part, data)
        buffer[:] = data

    async def aclose(self) -> None: ...


@dataclass
class FakeSources:
    """An upstream."""

    upstream: FakeSource


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
