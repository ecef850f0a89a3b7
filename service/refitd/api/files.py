"""Routes of a version's files, from which followers pull: the manifest, parts of files, digests of blocks.

Every service has them, so a follower hands on what it has pulled, and blocks of what it still pulls. A follower
believes none of the bytes: it holds them against the manifest's digests.
"""

import asyncio
import os
import re
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import APIRouter, Header, Query
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from refitd.api.context import Service, ServiceOf, find_version
from refitd.api.sendfile import EXTENSION
from refitd.problem import ProblemError, Slug
from refitd.root.handle import below, parts_below, root_at
from refitd.state.version import VersionRecord
from refitd_client.contract.follow import FOLLOWER_HEADER, FileBlocks
from refitd_client.contract.manifest import BLOCK, MAX_MANIFEST_BYTES, digest_of_pieces
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.contract.states import VersionState
from refitd_client.files.plain_file import open_plain, read_at

router = APIRouter(prefix="/v1/versions/{version_id}", tags=["files"])
_CHUNK = 2**20  # bytes that are read and sent at a time where the server has no sendfile, as with TLS
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
_DIGESTING = asyncio.Semaphore(1)
_READERS = 4  # threads that read a file for the digests of its blocks
_MOST_BLOCKS = 200  # files whose blocks' digests are remembered: all followers ask for those of the newest versions
_BLOCKS: OrderedDict[tuple[str, str, int], list[str]] = OrderedDict()  # by a version's digest, a file's name, and size
_LEAST_BLOCK = 2**20  # bytes: what an answer takes has a limit
_HEAD = 2**20  # bytes: a smaller part, as of a file's header, is given to everyone
ARRIVES_SECONDS = 5.0  # for which a request waits for bytes that are on their way here: less than a stall takes
_OBJECT: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
_OCTETS: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_PARTS: dict[int | str, dict[str, Any]] = {
    200: {"content": _OCTETS, "description": "All of the file"},
    206: {"content": _OCTETS, "description": "The part that `Range` names"},
}


@router.get("/manifest", response_class=Response, responses={200: {"content": _OBJECT}})
async def get_manifest(version_id: str, service: ServiceOf) -> Response:
    """The manifest of a sealed version (`refit.json`), byte by byte as its publisher wrote it."""
    record = await _held(service, version_id)
    fd = await _opened(service, record, MANIFEST_NAME)
    try:
        data = await asyncio.to_thread(lambda: read_at(fd, min(os.fstat(fd).st_size, MAX_MANIFEST_BYTES), 0))
    finally:
        os.close(fd)
    return Response(data, media_type="application/json")


@router.get("/files/{name}", response_class=Response, responses=_PARTS)
async def get_file(
    version_id: str,
    name: str,
    service: ServiceOf,
    wanted: Annotated[str | None, Header(alias="range")] = None,
    follower: Annotated[str | None, Header(alias=FOLLOWER_HEADER)] = None,
) -> Response:
    """A file of a sealed version, or a part of it: `Range: bytes=0-16777215`. One range alone is understood.

    A follower also hands out blocks of what it still pulls, once it has checked them; it answers 503 (`not-yet`) where
    it has waited some seconds for a block in vain. So does a hub to a follower that names itself and has relays, once
    the hub has sent enough copies of the version.
    """
    fd, part = await _arriving(service, version_id, name, wanted) or await _sealed(service, version_id, name, wanted)
    if follower is not None and part.count > _HEAD and not _serves(service, follower, version_id):
        os.close(fd)
        text = f"this service has sent enough copies of {version_id}: ask the relays that it names"
        raise ProblemError(Slug.NOT_YET, text, {"Retry-After": "0"})
    if service.telemetry is not None:
        service.telemetry.meters.handed_out(part.count)
    return FileResponse(fd, part, service.handed_out.sending(version_id, part.count))


def _serves(service: Service, follower: str, version_id: str) -> bool:
    """Whether this service gives blocks of a version to a follower, which could have them from relays."""
    known = service.store.versions.get(version_id)
    if service.relays is None or known is None or not known.bytes:
        return True
    return service.relays.serves(
        unquote(follower), version_id, service.handed_out.bytes_of.get(version_id, 0) / known.bytes
    )


async def _arriving(
    service: Service, version_id: str, name: str, wanted: str | None
) -> "tuple[int, PartOfFile] | None":
    """An open file of a version that this service pulls itself, and the part of it; None where it pulls none such."""
    if service.follower is None:
        return None
    here = await service.follower.arrival(version_id)
    if here is not None:
        size = here.size_of(name)
        if size is None:
            return None
        part = part_of(wanted, size)
        if await here.has(name, part.start, part.count, within=ARRIVES_SECONDS):
            return here.opened(name), part
    if (here is None or not here.is_open) and not service.follower.expects(version_id):
        return None  # by now it is a version, or none will be
    raise ProblemError(Slug.NOT_YET, f"these bytes of {name} have not come here yet", {"Retry-After": "0"})


async def _sealed(service: Service, version_id: str, name: str, wanted: str | None) -> "tuple[int, PartOfFile]":
    """An open file of a version that was found good here, and the part of it."""
    record = await _held(service, version_id)
    fd = await _opened(service, record, name)
    try:
        return fd, part_of(wanted, os.fstat(fd).st_size)
    except BaseException:
        os.close(fd)
        raise


@router.get("/files/{name}/blocks")
async def get_blocks(
    version_id: str, name: str, service: ServiceOf, size: Annotated[int, Query(ge=_LEAST_BLOCK, le=BLOCK)] = BLOCK
) -> FileBlocks:
    """The digests of a file's blocks: which block is wrong, where a file's digest is. Reads all of the file.

    Those of blocks of 16 MiB, joined, are the file's digest in the manifest. Others (`size`, in bytes) are for hosts
    that hand blocks on to others.
    """
    record = await _held(service, version_id)
    key = record.digest or record.id, name, size
    async with _DIGESTING:
        if key not in _BLOCKS:
            fd = await _opened(service, record, name)
            try:
                _BLOCKS[key] = await asyncio.to_thread(_digests, fd, size)
            finally:
                os.close(fd)
        _BLOCKS.move_to_end(key)
        while len(_BLOCKS) > _MOST_BLOCKS:
            _BLOCKS.popitem(last=False)
        return FileBlocks(blocks=_BLOCKS[key], size=size)


def _digests(fd: int, block: int) -> list[str]:
    """The digests of a file's blocks, which are read by a few threads at once."""
    size = os.fstat(fd).st_size
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1), "refitd-digest") as threads:
        return list(threads.map(partial(_digest, fd, size, block), range(0, max(size, 1), block)))


def _digest(fd: int, size: int, block: int, start: int) -> str:
    end = min(start + block, size)
    pieces = (read_at(fd, min(_CHUNK, end - at), at) for at in range(start, end, _CHUNK))
    return digest_of_pieces(pieces).hex()


async def _held(service: Service, version_id: str) -> VersionRecord:
    """The version, if its files are those that were found good."""
    record = await find_version(service, version_id)
    if record.state is not VersionState.SEALED or not record.owned:
        why = f"is {record.state}" if record.owned else "has no manifest: refitd's publisher did not write it"
        raise ProblemError(Slug.FILES_NOT_HELD, f"{record.id} {why}, so its files are not handed out")
    return record


async def _opened(service: Service, record: VersionRecord, name: str) -> int:
    """A descriptor of a plain file in the version's folder; no link is followed."""
    root: Path = service.settings.root
    try:
        return await asyncio.to_thread(_open, root, record.path, name)
    except OSError as error:
        raise ProblemError(Slug.FILES_NOT_HELD, f"{record.id} has no file {name!a}: {error.strerror}") from error


def _open(root: Path, path: str, name: str) -> int:
    with root_at(root) as above, below(above, parts_below(path) or ()) as folder:
        return open_plain(name, within=folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOfFile:
    """`count` bytes from byte `start` on, of `size`. `is_whole`: no part was asked for."""

    start: int
    count: int
    size: int
    is_whole: bool = False


def part_of(header: str | None, size: int) -> PartOfFile:
    """Return the part that a `Range` header asks for; all of the file where there is none, or one not understood.

    Raises:
        ProblemError: it begins behind the file's end.
    """
    match = None if header is None else _RANGE.fullmatch(header.strip())
    if match is None:
        return PartOfFile(start=0, count=size, size=size, is_whole=True)
    start, end = int(match[1]), min(int(match[2] or size), size - 1)
    if start > end:
        headers = {"Content-Range": f"bytes */{size}"}
        raise ProblemError(Slug.BAD_RANGE, f"the file has {size} bytes: {header} is no part of it", headers)
    return PartOfFile(start=start, count=end - start + 1, size=size)


class FileResponse(Response):
    """Sends a part of an open file, and closes it."""

    def __init__(self, fd: int, part: PartOfFile, sending: AbstractContextManager[None]) -> None:
        """Take the descriptor over. `sending` is entered while it is sent."""
        self._fd = fd
        self._sending = sending
        self._part = part
        headers = {"Content-Length": str(part.count), "Accept-Ranges": "bytes"}
        if not part.is_whole:
            headers["Content-Range"] = f"bytes {part.start}-{part.start + part.count - 1}/{part.size}"
        super().__init__(None, 200 if part.is_whole else 206, headers, "application/octet-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, by the kernel alone where the server can."""
        del receive
        try:
            with self._sending:
                await self._send(scope, send)
        finally:
            os.close(self._fd)

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        at, end = self._part.start, self._part.start + self._part.count
        if EXTENSION in scope.get("extensions", {}):
            await send({"type": EXTENSION, "file": self._fd, "offset": at, "count": end - at, "more_body": False})
            return
        while at < end:
            data = await asyncio.to_thread(read_at, self._fd, min(_CHUNK, end - at), at)
            at += len(data)
            await send({"type": "http.response.body", "body": data, "more_body": at < end})
        if not self._part.count:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
