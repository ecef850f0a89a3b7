"""Pulls a version from a folder, and is killed at its k-th change to the file system: the seam of a pull's crash tests.

    python killed_pulls.py ROOTS HUB

For each k, `ROOTS/<k>` is the root that a kill at change k leaves, until a pull comes through, and `ROOTS/<k>.parts`
has a line for each part that had arrived. One part is under way at a time, so that each k is the same change in each
run.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refitd_client.contract import manifest
from refitd_client.contract.manifest import digest_of_pieces, parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_hosts.follow import puller
from refitd_hosts.follow.puller import Puller
from refitd_hosts.follow.upstream import FilePart
from support.durable_effects import kill_at_each, on_each_effect

BLOCK = 64  # bytes of a part, so that small files have several
VERSION = "run~v000001"


@dataclass
class FolderSource:
    """An upstream that reads versions from a folder. `parts` are those that it gave, by file and offset."""

    root: Path
    name: str = "hub"
    log: Path | None = None
    parts: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    @property
    def upstream(self) -> "FolderSource":
        return self

    def folder(self, version: str) -> Path:
        return self.root / version.replace("~", "/")

    async def manifest(self, version: str) -> bytes:
        return (self.folder(version) / MANIFEST_NAME).read_bytes()

    async def fill(self, part: FilePart, buffer: memoryview) -> None:
        buffer[:] = (self.folder(part.version) / part.file).read_bytes()[part.start : part.start + part.length]
        self.parts.append((part.file, part.start))
        if self.log is not None:
            with self.log.open("a") as log:
                log.write(f"{part.file} {part.start}\n")

    async def aclose(self) -> None: ...


def small_blocks(hub: Path) -> None:
    """Have parts of a few bytes in this process, and the version's manifest with digests by them."""
    puller.BLOCK = manifest.BLOCK = BLOCK
    folder = hub / "run" / "v000001"
    known = parse_manifest((folder / MANIFEST_NAME).read_bytes())
    for name in known.files:
        data = (folder / name).read_bytes()
        blocks = [digest_of_pieces([data[at : at + BLOCK]]) for at in range(0, len(data), BLOCK)]
        known.files[name] = manifest.ManifestFile(size=len(data), digest=manifest.joined(blocks))
    (folder / MANIFEST_NAME).write_bytes(known.to_json())


def pull(root: Path, source: FolderSource) -> None:
    """Pull the version as a follower does that was (re)started."""
    with closing(Puller(root, source)) as made:
        digest = parse_manifest((source.folder(VERSION) / MANIFEST_NAME).read_bytes()).digest
        asyncio.run(_pulled(made, digest))


async def _pulled(made: Puller, digest: str) -> None:
    await made.keep_only("run", {VERSION})
    await made.pull(VERSION, digest)


def _kill_at(number: int) -> Callable[[int, str, Callable[..., Any], tuple[Any, ...]], None]:
    def act(count: int, name: str, original: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if count == number:
            if name in {"write", "write_at"}:
                target, data, *offset = args
                original(target, data[: len(data) // 2], *offset)
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def pull_until(number: int, root: Path, hub: Path) -> None:
    """Pull until the change of that number."""
    puller.PARTS = 1
    on_each_effect(_kill_at(number))
    pull(root, FolderSource(hub, log=root.with_suffix(".parts")))


if __name__ == "__main__":
    source = Path(sys.argv[2])
    small_blocks(source)
    kill_at_each(Path(sys.argv[1]), lambda number, root: pull_until(number, root, source))
