"""Routes of following: files that hosts pull, their reports at their upstream, what a host says of itself."""

import asyncio
import errno
import os
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from fastapi import APIRouter, Depends, Header, Request
from fastapi import Path as InPath
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from refitd.api.auth import FOLLOWS_BY
from refitd.api.connection import EXTENSION
from refitd.api.context import Service, ServiceOf, find_version
from refitd.problem import ProblemError, Slug
from refitd.root.handle import below, parts_below, root_at
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.follow import MAX_HOST_ENGINES, MAX_REPORTED, Following, HostReply, HostReport
from refitd_client.contract.manifest import MAX_MANIFEST_BYTES, ManifestRefusedError, parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME, InvalidNameError
from refitd_client.contract.states import EngineState, VersionState
from refitd_client.contract.wire import Page
from refitd_client.files.plain_file import open_plain, read_at
from refitd_client.validation.foreign import kept_manifest
from refitd_hosts.hub.followers import LEASE_SECONDS, SupersededError, TooManyFollowersError
from refitd_hosts.hub.hub import Follows, Hub
from refitd_hosts.hub.reported import NameTakenError
from refitd_hosts.policy.hosts import stands_of


async def _hub(request: Request) -> Hub:
    return request.app.state.service.hosts


HubOf = Annotated[Hub, Depends(_hub)]
files_routes = APIRouter(prefix="/v1/versions/{version_id}", tags=["files"])
_SENT_AT_ONCE = 2**20  # bytes that are read and sent at a time where the server has no sendfile, as with TLS
_NO_MANIFEST = "has no manifest, and the service keeps none of it: publish its folder with 'refitd publish'"
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
_OBJECT: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
_OCTETS: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_FILE_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": _OCTETS, "description": "All of the file"},
    206: {"content": _OCTETS, "description": "The part that `Range` names"},
}


# A follower believes none of the bytes: it holds them against the manifest's digests.
@files_routes.get("/manifest", response_class=Response, responses={200: {"content": _OBJECT}})
async def get_manifest(version_id: str, service: ServiceOf) -> Response:
    """The manifest of a sealed version (`refit.json`), byte by byte as its publisher wrote it. Of a folder without one
    it is the manifest that the service keeps.
    """
    record = await _held(service, version_id)
    if record.files.described:
        try:
            data = await asyncio.to_thread(
                kept_manifest, service.values.root, record.path, record.files.signature or ""
            )
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


@files_routes.get("/files/{name}", response_class=Response, responses=_FILE_ANSWERS)
async def get_file(
    version_id: str,
    name: str,
    service: ServiceOf,
    hub: HubOf,
    wanted: Annotated[str | None, Header(alias="range")] = None,
) -> Response:
    """A file of a sealed version, or a part of it: `Range: bytes=0-16777215`. One range alone is understood."""
    fd, part = await _sealed(service, version_id, name, wanted)
    return FileResponse(fd, part, hub.sent.sending(version_id))


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
    if record.state is not VersionState.SEALED or not (record.files.owned or record.files.described):
        why = f"is {record.state}" if record.state is not VersionState.SEALED else _NO_MANIFEST
        raise ProblemError(Slug.FILES_NOT_HELD, f"{record.id} {why}, so its files are not handed out")
    return record


async def _opened(service: Service, record: VersionRecord, name: str) -> int:
    """A descriptor of a plain file in the version's folder; no link is followed."""
    root: Path = service.values.root
    try:
        return await asyncio.to_thread(_open, root, record, name)
    except OSError as error:
        raise ProblemError(Slug.FILES_NOT_HELD, f"{record.id} has no file {name!a}: {error.strerror}") from error


def _open(root: Path, record: VersionRecord, name: str) -> int:
    # A trainer's own folder may hold more than the version, such as optimizer.pt: that is not handed out.
    if record.files.described and name not in _names_kept(root, record.path, record.files.signature or ""):
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


router = APIRouter(prefix="/v1", tags=["follow"])
_MAX_NAME = 200
_MAX_TEXT = 500


@router.put("/hosts/{name}")
async def report(
    name: Annotated[str, InPath(max_length=_MAX_NAME)], report: HostReport, hub: HubOf, request: Request
) -> HostReply:
    """A host says what it is at, and is told what it is to serve. What it pulls is kept until the lease ends, or it
    says otherwise.

    A token that only follows speaks for the hosts that its line names, else for the one that it was used by first. 409
    where another process has reported by the name since, or an engine has it.
    """
    claim = request.scope.get(FOLLOWS_BY)
    if claim is not None and (why := hub.names.refusal(claim, name)) is not None:
        hub.say_refused(name, Slug.FORBIDDEN, why)
        raise ProblemError(Slug.FORBIDDEN, why)
    return take_report(name, report, hub)


def _why_it_leads_none(follower: Follows, report: HostReport, upstream: str) -> str:
    """Why a host that is led takes no reports. It would say later what its own hub says, and two hosts that follow
    each other would wait for each other for ever.
    """
    if report.told.process == follower.following().process:
        return f"{upstream} is this service itself: --follow names the hub's URL"
    return f"this service is led by {upstream} and leads no hosts: follow {upstream}, or start it with --follow-freely"


def take_report(name: str, report: HostReport, hub: Hub) -> HostReply:
    """Take a report that may be made, and reply.

    Raises:
        ProblemError: it is not as it should be, or comes from a host whose name another has.
    """
    _check_report(name, report, hub)
    try:
        is_newest = hub.followers.reported(report)
        reply = HostReply(lease_seconds=LEASE_SECONDS)
        if hub.led is not None:
            reply = hub.led.reported(report, is_newest=is_newest)
        return _with_what_is_known(reply, report.told, hub.store)
    except TooManyFollowersError:
        raise ProblemError(Slug.TOO_MANY, "there are as many hosts as one service takes") from None
    except SupersededError as error:
        if error.is_first:
            hub.store.say("follower", name, str(error), is_fault=True)
        raise ProblemError(Slug.HOST_NAME_TAKEN, str(error)) from error
    except NameTakenError as error:
        if hub.led is None or hub.led.refuse(name, Slug.HOST_NAME_TAKEN.slug, str(error)):
            hub.store.say("follower", name, str(error), is_fault=True)
        raise ProblemError(Slug.HOST_NAME_TAKEN, str(error)) from error
    except InvalidNameError as error:
        raise ProblemError(Slug.BAD_NAME, str(error)) from error


def _check_report(name: str, report: HostReport, hub: Hub) -> None:
    if report.told.follower != name:
        raise ProblemError(
            Slug.BAD_REQUEST, f"the report is {report.told.follower!a}'s, and the address names {name!a}"
        )
    if max(len(report.holds), len(report.pulls), len(report.told.upstreams)) > MAX_REPORTED:
        raise ProblemError(Slug.BAD_REQUEST, f"each list of a report has at most {MAX_REPORTED} entries")
    host = report.told.host
    if host is not None and (len(host.engines) > MAX_HOST_ENGINES or len(host.states) > len(EngineState)):
        raise ProblemError(Slug.BAD_REQUEST, f"a report names at most {MAX_HOST_ENGINES} engines")
    if _has_long_text(msgspec.to_builtins(report)):
        raise ProblemError(Slug.BAD_REQUEST, f"each text of a report has at most {_MAX_TEXT} characters")
    if hub.follower is not None and hub.follower.is_led and not report.freely:
        raise ProblemError(Slug.RUN_FOLLOWED, _why_it_leads_none(hub.follower, report, hub.follower.urls[0]))


def _with_what_is_known(reply: HostReply, told: Following, store: Store) -> HostReply:
    """A reply with what this service knows of what the host is to serve, and of the run that it follows."""
    runs = {*reply.serve, told.run}
    stands = stands_of(told)
    newest = {each: store.newest_known(each, told.follower, stands) for each in runs if each is not None}
    wanted = [store.versions.get(version or "") for version in reply.serve.values()]
    return replace(
        reply,
        knows={each: version for each, version in newest.items() if version is not None},
        digests={version.id: version.digest for version in wanted if version is not None and version.digest},
    )


def _has_long_text(value: Any) -> bool:
    left: list[Any] = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            if len(each) > _MAX_TEXT:
                return True
        elif isinstance(each, dict):
            left.extend(cast("dict[str, Any]", each))
            left.extend(cast("dict[str, Any]", each).values())
        elif isinstance(each, list | tuple):
            left.extend(cast("list[Any]", each))
    return False


@router.get("/hosts")
async def list_hosts(hub: HubOf) -> Page[HostReport]:
    """The hosts that have reported within the last 30 seconds, each as it reported itself last."""
    return Page(items=[known.report for _, known in sorted(hub.followers.known.items())])


@router.get("/follow")
async def following(hub: HubOf) -> Following:
    """What this service follows, and how far it is. 404 where it follows no upstream."""
    if hub.follower is None:
        raise ProblemError(Slug.NOT_FOUND, "this service follows no upstream (refitd serve --follow URL)")
    return hub.follower.following()
