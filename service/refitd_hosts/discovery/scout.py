"""The scout asks all places again and again, and tells the fleet which engines there are.

`remember` decides, without I/O. A place that does not answer, or that suddenly has no engines, is more often broken
than right. So an engine that was found once stays until every place has answered, some engine was found, and it has
been missing for `GONE_SECONDS`. Any fault keeps all engines, and is reported as long as it lasts.

sglang-router   GET /workers. It has no routes for weights, so the service calls each worker itself.
DNS             A and AAAA records, with the port that the operator gives, or SRV records with their own
"""

import asyncio
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import dns.asyncresolver
import dns.exception
import dns.resolver
import msgspec
import structlog

from refitd.clock import Clock
from refitd.engine.address import AddressRefusedError, check_url
from refitd.engine.http import NoReply, Transport
from refitd_hosts.discovery import MOST, Answer, Dns, EnginesFound, Place, Router, Silent

SECONDS = 5.0
_RANK = re.compile(r"@\d+$")  # a router that knows data-parallel ranks names one engine once for each


async def ask(place: Place) -> Answer:
    return await ask_dns(place) if isinstance(place, Dns) else await ask_router(place)


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


ASK_EVERY_SECONDS = 5.0
GONE_SECONDS = 60.0

log = structlog.get_logger("refitd")


@dataclass(frozen=True, slots=True)
class Discovered:
    """Engines by URL, each with the time (monotonic seconds) since which no place has it; None while a place has it.

    `fault` is why no engine may be removed now; None where nothing is wrong.
    """

    missing_since: dict[str, float | None] = field(default_factory=dict[str, "float | None"])
    fault: str | None = None


def remember(before: Discovered, answers: Sequence[Answer], now: float) -> Discovered:
    """Return what is discovered after all places have answered.

    Args:
        before: what was discovered until now.
        answers: one for each place.
        now: monotonic seconds.
    """
    answers = [_believed(answer) for answer in answers]
    found = frozenset[str]().union(*(answer.urls for answer in answers if isinstance(answer, EnginesFound)))
    fault = _fault(answers, found, before)
    after: dict[str, float | None] = dict.fromkeys(sorted(found))
    for url, since in before.missing_since.items():
        if url in found:
            continue
        if fault is not None:
            after[url] = since  # how long it has been missing cannot be known
        elif since is None or now - since < GONE_SECONDS:
            after[url] = now if since is None else since
    return Discovered(after, fault)


def _believed(answer: Answer) -> Answer:
    if isinstance(answer, EnginesFound) and len(answer.urls) > MOST:
        return Silent(answer.place, f"it names {len(answer.urls)} engines, and at most {MOST} are believed")
    return answer


def _fault(answers: Sequence[Answer], found: frozenset[str], before: Discovered) -> str | None:
    silent = [f"{answer.place}: {answer.reason}" for answer in answers if isinstance(answer, Silent)]
    count = len(before.missing_since)
    stays = "1 engine that was found before stays" if count == 1 else f"{count} engines that were found before stay"
    kept = [stays] if count else []
    if not silent and not found and kept:
        silent = [f"{answer.place} names no engine" for answer in answers]
    return "engines cannot be found: " + "; ".join([*silent, *kept]) if silent else None


class Scout:
    """Asks places until it is cancelled."""

    def __init__(
        self,
        places: Sequence[Place],
        known: Collection[str],
        tell: Callable[[Collection[str], str | None], None],
        clock: Clock,
    ) -> None:
        """Ask nothing yet.

        Args:
            places: where engines can be found.
            known: URLs of the engines that were found before this start.
            tell: called after each round with the URLs of all engines, and with the fault that keeps any from being
                removed.
        """
        self._places = places
        self._discovered = Discovered(dict.fromkeys(known))
        self._tell = tell
        self._clock = clock

    async def run(self) -> None:
        while self._places:
            await self.look()
            await asyncio.sleep(ASK_EVERY_SECONDS)

    async def look(self) -> None:
        answers = await asyncio.gather(*map(ask, self._places))
        before, self._discovered = self._discovered, remember(self._discovered, answers, self._clock.monotonic())
        if self._discovered.fault is not None and self._discovered.fault != before.fault:
            log.warning("no engine is removed", reason=self._discovered.fault)
        self._tell(self._discovered.missing_since.keys(), self._discovered.fault)
