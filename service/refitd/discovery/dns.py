"""Asking the DNS for engines: A and AAAA records with a port of the operator's, or SRV records with their own."""

import asyncio
from typing import Any

import dns.asyncresolver
import dns.exception
import dns.resolver

from refitd.discovery.memory import Answer, Named, Silent
from refitd.discovery.place import Dns
from refitd.engine.address import check_url

SECONDS = 5.0


async def ask_dns(place: Dns) -> Answer:
    """What the DNS says now. A name without records names nobody; what is no answer is silence."""
    told = f"dns:{place.name}"
    try:
        resolver = await asyncio.to_thread(_resolver, place)
        if place.port is None:
            return Named(told, frozenset(await _services(resolver, place.name)))
        found = [await _records(resolver, place.name, kind) for kind in ("A", "AAAA")]
        return Named(told, frozenset(_url(str(record.address), place.port) for record in [*found[0], *found[1]]))
    except (dns.exception.DNSException, OSError, ValueError) as error:
        return Silent(told, str(error) or type(error).__name__)


def _resolver(place: Dns) -> dns.asyncresolver.Resolver:
    """Reads /etc/resolv.conf, where no server is named."""
    resolver = dns.asyncresolver.Resolver(configure=place.server is None)
    if place.server is not None:
        resolver.nameservers = [place.server[0]]
        resolver.port = place.server[1]
    return resolver


async def _services(resolver: dns.asyncresolver.Resolver, name: str) -> list[str]:
    records = await _records(resolver, name, "SRV")
    targets = [(str(record.target).rstrip("."), int(record.port)) for record in records]
    return [_url(target, port) for target, port in targets if target]  # a target of "." offers none (RFC 2782)


async def _records(resolver: dns.asyncresolver.Resolver, name: str, kind: str) -> list[Any]:
    """The records of one kind; none where the name has none of them."""
    try:
        return list(await resolver.resolve(name, kind, search=True, lifetime=SECONDS, raise_on_no_answer=False))
    except dns.resolver.NXDOMAIN:
        return []


def _url(host: str, port: int) -> str:
    return check_url(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
