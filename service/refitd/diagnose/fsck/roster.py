"""Which engines there are, as settings, engines file and journal name them, and how to speak to each."""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from refitd.diagnose.fsck.facts import EngineFacts
from refitd.engine.address import check_url, engine_id
from refitd.engine.allow import Address, host_of, parse_allow_list, refusal
from refitd.engine.connect import connector, key_files
from refitd.engine.engines_file import EngineSpec, parse_engines
from refitd.engine.http import Reply, Transport
from refitd.engine.port import Engine, Reached
from refitd.settings import Settings
from refitd.state.records import EngineRecord, Source

READY_SECONDS = 5.0
_PAUSED = 503


@dataclass(frozen=True, slots=True)
class Roster:
    """The engines by id. `settled` are the hosts that settings and engines file name; `named` the URLs of the engines
    that get the default keys, as the service sends them (`policy/hosts.py`).
    """

    settings: Settings
    specs: Mapping[str, EngineSpec]
    settled: frozenset[str]
    named: frozenset[str]

    def connect(self, name: str) -> Engine:
        """The adapter for an engine. Close it afterwards."""
        return connector(self.settings.engine_access, self.guard, self.is_named)(self.specs[name])

    async def ask(self, names: list[str], *, contents: bool) -> list[EngineFacts]:
        """Ask engines, all at once, what they serve. `contents` also has them hash their tensors."""
        return await asyncio.gather(*(self._ask(name, contents=contents) for name in names))

    async def _ask(self, name: str, *, contents: bool) -> EngineFacts:
        engine = self.connect(name)
        try:
            seen = await engine.probe()
            reached = isinstance(seen, Reached)
            return EngineFacts(
                id=name,
                url=self.specs[name].url,
                root=self.specs[name].root or self.settings.path_map or str(self.settings.root.resolve()),
                seen=seen,
                fingerprint=await engine.fingerprint() if reached and contents else None,
                generates=await self._generates(name) if reached else None,
            )
        finally:
            await engine.aclose()

    async def _generates(self, name: str) -> bool | None:
        """Whether the server takes requests: SGLang's /ready is 503 while it is paused. None where it does not say."""
        spec, settings = self.specs[name], self.settings
        http = Transport(
            spec.url,
            **key_files(settings.engine_access, spec, self.is_named),
            guard=self.guard,
        )
        reply = await http.get("/ready", READY_SECONDS)
        if not isinstance(reply, Reply):
            return None
        return {True: True, False: False}.get(reply.ok) if reply.ok or reply.status == _PAUSED else None

    def is_named(self, url: str) -> bool:
        """Whether the engine gets the default keys."""
        return url in self.named

    def guard(self, host: str, address: Address | None) -> str | None:
        """The operator's own word is trusted, as the service trusts it (`policy/hosts.py`), and nobody else's.

        An allow list goes before the engines file. Keys must not go to a host that DNS or the API has named.
        """
        allowed = parse_allow_list(self.settings.engine_allow)
        said = frozenset(host_of(url) for url in self.settings.engines)
        return refusal(host, address, allowed, said if allowed.is_set else self.settled)


def roster_of(settings: Settings, records: Mapping[str, EngineRecord], found: Collection[str] = ()) -> Roster:
    """Read who there is. `records` are the journal's: those that the API named are nowhere else. `found` are URLs that
    were discovered just now.

    Raises:
        OSError, ValueError: the engines file or a URL cannot be used.
    """
    specs = {engine_id(url): EngineSpec(url=check_url(url)) for url in settings.engines}
    if settings.engines_file is not None:
        specs |= {spec.id or engine_id(spec.url): spec for spec in _parsed(settings.engines_file)}
    named = {spec.url for spec in specs.values()}
    settled = frozenset(host_of(url) for url in named)
    for record in records.values():
        if record.source in {Source.API, Source.DISCOVERED}:
            specs.setdefault(record.id, EngineSpec(url=record.url, id=record.id, run=record.run))
    if settings.engine_allow:
        named |= {*found, *(record.url for record in records.values() if record.source is Source.DISCOVERED)}
    known = {spec.url for spec in specs.values()}
    specs |= {engine_id(url): EngineSpec(url=url) for url in found if url not in known}
    return Roster(settings, specs, settled, frozenset(named))


def _parsed(file: Path) -> list[EngineSpec]:
    try:
        return parse_engines(file.read_text())
    except ValueError as error:
        raise ValueError(f"the engines file {file} cannot be used: {error}") from error
