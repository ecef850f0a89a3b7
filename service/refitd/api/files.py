"""Routes of a version's files, from which followers pull: the manifest, and parts of files.

A follower believes none of the bytes: it holds them against the manifest's digests.
"""

import asyncio
import errno
import os
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from refitd.api.context import Service, ServiceOf, find_version
from refitd.api.sendfile import EXTENSION
from refitd.problem import ProblemError, Slug
from refitd.root.handle import below, parts_below, root_at
from refitd.state.version import VersionRecord
from refitd_client.contract.manifest import MAX_MANIFEST_BYTES, ManifestRefusedError, parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.contract.states import VersionState
from refitd_client.files.plain_file import open_plain, read_at
from refitd_client.validation.sealed import kept_manifest

router = APIRouter(prefix="/v1/versions/{version_id}", tags=["files"])
_SENT_AT_ONCE = 2**20  # bytes that are read and sent at a time where the server has no sendfile, as with TLS
_NO_MANIFEST = "has no manifest, and the service keeps none of it: publish its folder with 'refitd publish'"
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
_OBJECT: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
_OCTETS: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_FILE_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": _OCTETS, "description": "All of the file"},
    206: {"content": _OCTETS, "description": "The part that `Range` names"},
}


@router.get("/manifest", response_class=Response, responses={200: {"content": _OBJECT}})
async def get_manifest(version_id: str, service: ServiceOf) -> Response:
    """The manifest of a sealed version (`refit.json`), byte by byte as its publisher wrote it. Of a folder without one
    it is the manifest that the service keeps.
    """
    record = await _held(service, version_id)
    if record.described:
        try:
            data = await asyncio.to_thread(kept_manifest, service.settings.root, record.path, record.signature or "")
        except OSError as error:
            text = f"{record.id} has no manifest now: {error.strerror}"
            raise ProblemError(Slug.FILES_NOT_HELD, text) from error
        return Response(data, media_type="application/json")
    fd = await _opened(service, record, MANIFEST_NAME)
    try:
        data = await asyncio.to_thread(lambda: read_at(fd, min(os.fstat(fd).st_size, MAX_MANIFEST_BYTES), 0))
    finally:
        os.close(fd)
    return Response(data, media_type="application/json")


@router.get("/files/{name}", response_class=Response, responses=_FILE_ANSWERS)
async def get_file(
    version_id: str,
    name: str,
    service: ServiceOf,
    wanted: Annotated[str | None, Header(alias="range")] = None,
) -> Response:
    """A file of a sealed version, or a part of it: `Range: bytes=0-16777215`. One range alone is understood."""
    fd, part = await _sealed(service, version_id, name, wanted)
    if service.telemetry is not None:
        service.telemetry.meters.handed_out(part.count)
    return FileResponse(fd, part, service.sent.sending(version_id))


async def _sealed(service: Service, version_id: str, name: str, wanted: str | None) -> "tuple[int, PartOfFile]":
    """An open file of a version that was found good here, and the part of it."""
    record = await _held(service, version_id)
    fd = await _opened(service, record, name)
    try:
        return fd, part_of(wanted, os.fstat(fd).st_size)
    except BaseException:
        os.close(fd)
        raise


async def _held(service: Service, version_id: str) -> VersionRecord:
    """The version, if its files are those that were found good."""
    record = await find_version(service, version_id)
    if record.state is not VersionState.SEALED or not (record.owned or record.described):
        why = f"is {record.state}" if record.state is not VersionState.SEALED else _NO_MANIFEST
        raise ProblemError(Slug.FILES_NOT_HELD, f"{record.id} {why}, so its files are not handed out")
    return record


async def _opened(service: Service, record: VersionRecord, name: str) -> int:
    """A descriptor of a plain file in the version's folder; no link is followed."""
    root: Path = service.settings.root
    try:
        return await asyncio.to_thread(_open, root, record, name)
    except OSError as error:
        raise ProblemError(Slug.FILES_NOT_HELD, f"{record.id} has no file {name!a}: {error.strerror}") from error


def _open(root: Path, record: VersionRecord, name: str) -> int:
    # A trainer's own folder may hold more than the version, such as optimizer.pt: that is not handed out.
    if record.described and name not in _names_kept(root, record.path, record.signature or ""):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    with root_at(root) as above, below(above, parts_below(record.path) or ()) as folder:
        return open_plain(name, within=folder)


@lru_cache(maxsize=16)
def _names_kept(root: Path, path: str, signature: str) -> frozenset[str]:
    """The files in the manifest that the service keeps of a folder, read once for all parts that hosts pull."""
    try:
        return frozenset(parse_manifest(kept_manifest(root, path, signature)).files)
    except ManifestRefusedError as error:
        raise OSError(errno.EIO, f"the service's manifest does not parse: {error}") from error


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
            data = await asyncio.to_thread(read_at, self._fd, min(_SENT_AT_ONCE, end - at), at)
            at += len(data)
            await send({"type": "http.response.body", "body": data, "more_body": at < end})
        if not self._part.count:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
