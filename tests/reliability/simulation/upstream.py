"""The upstreams of a follower over made-up links: the product's own `HubUpstream` and routes, without HTTP between."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import unquote

from refitd.api.context import find_version
from refitd.api.health import faults_now
from refitd.api.overview import overview_of
from refitd.api.versions import presented
from refitd.problem import ProblemError, Slug
from refitd.state.journal.rows import read_versions
from refitd_client.contract.follow import HostReply, HostReport
from refitd_client.contract.manifest import Manifest
from refitd_client.contract.naming import parse_version_id
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import MAX_BARRED, Overview, VersionPage
from refitd_client.errors import ServiceProblemError, ServiceUnreachableError
from refitd_client.http.routes import Call
from refitd_hosts.follow.hub import HubUpstream
from refitd_hosts.follow.upstream import FilePart, GoneError, UnreachableError, WrongError
from refitd_hosts.hub.routes import take_report

from .disk import SimFolder, bytes_of, seen_at, templates
from .life import Life
from .links import STALL_SECONDS, Damage, Link

_PATH = re.compile(r"/v1/versions/([^/]+)/manifest")
EVENT_SECONDS = 0.3  # between two events that make a follower look


async def held(life: Life, version: str) -> tuple[SimFolder, Manifest]:
    """The folder that a service hands out as a version, and its manifest, as `hub/routes.py` decides it.
    A folder without one is not handed out here.
    """
    record = await find_version(life.service, version)
    if record.state is not VersionState.SEALED or not record.files.owned:
        raise ProblemError(Slug.FILES_NOT_HELD, f"{version} is {record.state}")
    try:
        folder = life.world.disk.at(record.path)
    except OSError as error:
        raise ProblemError(Slug.FILES_NOT_HELD, str(error)) from error
    manifest = seen_at(record.path, folder).structure.manifest
    if manifest is None:
        raise ProblemError(Slug.FILES_NOT_HELD, f"{version} has no manifest")
    return folder, manifest


class SimBytes:
    """A host that hands out bytes, at the end of a link."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def name(self) -> str:
        return f"http://{self._link.to.name}"

    async def get(self, path: str, most: int) -> bytes:
        match = _PATH.fullmatch(path)
        assert match is not None, f"nobody has told the simulation about {path}"
        version = unquote(match[1])

        async def answer(life: Life) -> bytes:
            _, manifest = await held(life, version)
            return manifest.to_json()

        damage = self._link.next_of(self._link.parts)
        return self._damaged(await self._asked(answer, damage), damage)

    async def fill(self, part: FilePart, buffer: memoryview) -> None:
        """As `HttpByteSource.fill`: half of the bytes comes later than the other."""

        async def opened(life: Life) -> tuple[Life, Callable[[], bytes]]:
            return life, await _reader(life, part)

        life, read = await self._asked(opened)
        damage, half = self._link.next_of(self._link.parts), len(buffer) // 2
        buffer[:half] = read()[:half]
        if damage is Damage.STALL:
            await asyncio.sleep(STALL_SECONDS)
        elif damage is Damage.SLOW:
            await asyncio.sleep(STALL_SECONDS / 2)
        else:
            await self._link.take_time()
        if damage in {Damage.STALL, Damage.CUT, Damage.LOST}:
            raise UnreachableError(f"{self.name} cut the connection")
        try:
            self._link.still(life)
        except ServiceUnreachableError as error:
            raise UnreachableError(str(error)) from error
        buffer[half:] = read()[half:]  # of the file that is open, whatever is written into it by now
        buffer[:] = self._damaged(bytes(buffer), damage)
        self._link.counts["parts"] += 1

    async def _asked(self, act, damage=None):  # noqa: ANN001, ANN202
        try:
            return await self._link.ask(act, damage)
        except ServiceUnreachableError as error:
            raise UnreachableError(str(error)) from error
        except ServiceProblemError as error:
            status = error.problem.status
            kind = GoneError if status in {404, 410} else UnreachableError if status >= 500 else WrongError
            raise kind(f"{self.name}: {error}") from error

    def _damaged(self, data: bytes, damage: Damage | None) -> bytes:
        half, at = len(data) // 2, self._link.somewhere_in(data)
        if damage is Damage.REORDERED:
            return data[half:] + data[:half]
        return data if damage is not Damage.WRONG else bytes([*data[:at], data[at] ^ 1, *data[at + 1 :]])

    async def aclose(self) -> None:
        pass


async def _reader(life: Life, part: FilePart) -> Callable[[], bytes]:
    """What reads the bytes of a part from the file that a service has opened to hand it out."""
    folder, _ = await held(life, part.version)
    make = folder.make
    if part.file not in templates()[1][make].files:  # another version has the name since the host got its manifest
        raise ProblemError(Slug.FILES_NOT_HELD, f"{part.version} has no file {part.file}")
    return lambda: bytes_of(make, part.file, folder.content)[part.start : part.start + part.length]


def _is_back(life: Life, target: str) -> bool:
    """Whether a target is older than what hosts were to serve already: hosts follow a rollback also in a pause."""
    orders = [parsed[1] for parsed in map(parse_version_id, (target, *life.world.wanted)) if parsed is not None]
    return orders[0] < max(orders)


class _Client:
    """The calls of a refitd's client that a follower makes."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def overview(self) -> Overview:
        async def answer(life: Life) -> Overview:
            told = overview_of(life.store, life.targets, await faults_now(life.store), wants_token=False)
            for glance in told.runs:
                if glance.target is not None and (glance.paused_since is None or _is_back(life, glance.target)):
                    life.world.wanted.add(glance.target)
            return told

        return await self._link.ask(answer, self._link.next_of(self._link.answers))

    async def versions(self, run: str | None, state: VersionState, limit: int) -> VersionPage:
        async def answer(life: Life) -> VersionPage:
            await life.store.durable()  # as `list_versions`, which reads what is said here from the journal
            found = sorted(life.store.versions_of(run or ""), key=lambda version: version.order, reverse=True)
            gone = life.store.journal.read(
                lambda connection: read_versions(
                    connection, run=run, state=VersionState.DELETED, before=None, limit=MAX_BARRED
                )
            )
            return VersionPage(
                items=[presented(life.service, each) for each in found if each.state is state][:limit],
                barred=[each.id for each in gone if each.barred],
            )

        return await self._link.ask(answer)

    async def report(self, report: HostReport) -> HostReply:
        name, hub = report.told.follower, self._link.to
        is_new = False

        async def answer(life: Life) -> HostReply:
            nonlocal is_new
            reply = take_report(name, report, life.hosts)
            is_new = hub.heard_report(name, reply)
            return reply

        reply = await self._link.ask(answer, self._link.next_of(self._link.answers))
        hub.heard_reply(name, reply, is_new=is_new)
        return reply


class SimHub(HubUpstream):
    """A refitd at the end of a link, as the product follows it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.name = f"http://{link.to.name}"
        self._bytes = SimBytes(link)  # type: ignore[assignment]
        self._client = _Client(link)

    async def _exchange(self, call: Call[Any]) -> Any:
        if call.result is HostReply:
            return await self._client.report(call.body)
        if call.result is Overview:
            return await self._client.overview()
        return await self._client.versions(
            call.params["run"], VersionState(call.params["state"]), int(call.params["limit"])
        )

    async def changes(self, name: str) -> AsyncIterator[bool]:
        try:
            life = await self._link.reach()
            while True:
                seen = life.store.changed.count
                await life.store.changed.wait_after(seen, within=30.0)
                await asyncio.sleep(EVENT_SECONDS)
                self._link.still(life)
                yield self._link.chance() < 0.5
        except ServiceUnreachableError as error:
            raise UnreachableError(str(error)) from error

    async def aclose(self) -> None:
        pass
