"""Asking a place which engines it has: an sglang-router, the DNS, or AReaL's record.

sglang-router   GET /workers. It has no routes for weights, so the service calls each worker itself.
DNS             A and AAAA records, with the port that the operator gives, or SRV records with their own
AReaL           its name-resolve record of kind `nfs`, a tree of files:
                {record root}/{user}/{experiment}/{trial}/gen_servers/{any}/ENTRY holds `host:port`
"""

import asyncio
import os
import re
from functools import partial
from typing import Any, assert_never

import dns.asyncresolver
import dns.exception
import dns.resolver
import msgspec

from refitd.discovery.place import MOST, Answer, Areal, Dns, EnginesFound, Place, Router, Silent
from refitd.engine.address import AddressRefusedError, check_url
from refitd.engine.http import NoReply, Transport
from refitd.root.handle import LOOK_TIMEOUT_SECONDS, RootHangsError, RootThreads
from refitd_client.files.plain_file import open_plain

SECONDS = 5.0
_ENTRY_BYTES = 1024  # of an ENTRY
_RANK = re.compile(r"@\d+$")  # a router that knows data-parallel ranks names one engine once for each


async def ask(place: Place, threads: RootThreads) -> Answer:
    """Ask one place. `threads` are for places that are files."""
    match place:
        case Dns():
            return await ask_dns(place)
        case Router():
            return await ask_router(place)
        case Areal():
            return await ask_areal(place, threads)
        case _:
            assert_never(place)


class _Worker(msgspec.Struct):
    url: str


class _Workers(msgspec.Struct):
    workers: list[_Worker]


async def ask_router(place: Router) -> Answer:
    """The workers that it lists, healthy or not: the service probes each engine itself."""
    reply = await Transport(place.url, api_key=place.key_file, admin_key=None).get("/workers", SECONDS)
    if isinstance(reply, NoReply):
        return Silent(place.url, reply.reason)
    if not reply.ok:
        return Silent(place.url, f"/workers answered {reply.status}: is it an sglang-router?")
    try:
        listed = reply.read_as(_Workers).workers
        return EnginesFound(place.url, frozenset(check_url(_RANK.sub("", worker.url)) for worker in listed))
    except (msgspec.ValidationError, AddressRefusedError) as error:
        return Silent(place.url, f"/workers says what cannot be used: {error}")


async def ask_dns(place: Dns) -> Answer:
    """The records as they are now. A name without records has no engines; an error is no answer."""
    told = f"dns:{place.name}"
    try:
        resolver = await asyncio.to_thread(_resolver, place)
        if place.port is None:
            records = await _records(resolver, place.name, "SRV")
            targets = [(str(record.target).rstrip("."), int(record.port)) for record in records]
            # A target of "." offers none (RFC 2782).
            return EnginesFound(told, frozenset(_url(target, port) for target, port in targets if target))
        found = [*await _records(resolver, place.name, "A"), *await _records(resolver, place.name, "AAAA")]
        return EnginesFound(told, frozenset(_url(str(record.address), place.port) for record in found))
    except (dns.exception.DNSException, OSError, ValueError) as error:
        return Silent(told, str(error) or type(error).__name__)


def _resolver(place: Dns) -> dns.asyncresolver.Resolver:
    """Reads /etc/resolv.conf where the place names no server, so it runs in a thread."""
    resolver = dns.asyncresolver.Resolver(configure=place.server is None)
    if place.server is not None:
        resolver.nameservers = [place.server[0]]
        resolver.port = place.server[1]
    return resolver


async def _records(resolver: dns.asyncresolver.Resolver, name: str, kind: str) -> list[Any]:
    """The records of one kind; none where the name has none of them."""
    try:
        return list(await resolver.resolve(name, kind, search=True, lifetime=SECONDS, raise_on_no_answer=False))
    except dns.resolver.NXDOMAIN:
        return []


def _url(host: str, port: int) -> str:
    return check_url(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")


async def ask_areal(place: Areal, threads: RootThreads) -> Answer:
    """The servers that have registered. Launchers remove their entries when they end."""
    try:
        return await threads.run(f"reading {place.trial}", partial(_read_record, place), within=LOOK_TIMEOUT_SECONDS)
    except RootHangsError as error:
        return Silent(str(place.trial), str(error))


def _read_record(place: Areal) -> Answer:
    folder = place.trial / "gen_servers"
    urls: set[str] = set()
    try:
        for name in sorted(os.listdir(folder))[: MOST + 1]:
            try:
                fd = open_plain(folder / name / "ENTRY", follow=True)
            except (FileNotFoundError, NotADirectoryError):
                continue  # removed just now, or being written: AReaL renames it into place
            try:
                urls.add(check_url(f"http://{os.read(fd, _ENTRY_BYTES).decode().strip()}"))
            finally:
                os.close(fd)
    except (OSError, UnicodeDecodeError, AddressRefusedError) as error:
        return Silent(str(folder), str(error))
    return EnginesFound(str(folder), frozenset(urls))
