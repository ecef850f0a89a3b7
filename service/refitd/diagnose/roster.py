"""The engines that settings, engines file and journal name, and how to call each."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from refitd.engine.address import Address, engine_id, host_of, parse_allow_list, refusal
from refitd.engine.connect import connector
from refitd.engine.engines_file import EngineSpec, parse_engines
from refitd.engine.port import EnginePort
from refitd.settings import Settings
from refitd.state.records import EngineRecord, Source


@dataclass(frozen=True, slots=True)
class Roster:
    """The engines by id.

    `settled` are the hosts that settings and engines file name; `named` the URLs of the engines that are sent the
    default keys, by the service's own rules (`policy/roster.py`).
    """

    settings: Settings
    specs: Mapping[str, EngineSpec]
    settled: frozenset[str]
    named: frozenset[str]

    def connect(self, name: str) -> EnginePort:
        """The adapter for an engine. Close it afterwards."""
        return connector(self.settings.engine_access, self.guard, self.is_named)(self.specs[name])

    def root_of(self, name: str) -> str:
        """Where an engine sees the root."""
        return self.specs[name].root or self.settings.path_map or str(self.settings.root.resolve())

    def is_named(self, url: str) -> bool:
        """Whether the engine gets the default keys."""
        return url in self.named

    def guard(self, host: str, address: Address | None) -> str | None:
        """Return why an address may not be called, by the service's own rules (`policy/roster.py`).

        An allow list goes before the engines file. Keys must not go to a host that DNS or the API has named.
        """
        allowed = parse_allow_list(self.settings.engine_allow)
        said = frozenset(host_of(spec.url) for spec in self.settings.engine_specs.values())
        return refusal(host, address, allowed, said if allowed.is_set else self.settled)


def roster_of(settings: Settings, records: Mapping[str, EngineRecord], found: Collection[str] = ()) -> Roster:
    """Return the engines that there are.

    Args:
        settings: those of the service.
        records: the journal's; engines that were added by the API are nowhere else.
        found: URLs that were discovered just now.

    Raises:
        OSError, ValueError: the engines file or a URL cannot be used.
    """
    specs = settings.engine_specs
    if settings.engines_file is not None:
        specs |= {spec.id or engine_id(spec.url): spec for spec in _read_engines_file(settings.engines_file)}
    named = {spec.url for spec in specs.values()}
    settled = frozenset(host_of(url) for spec in specs.values() for url in spec.urls)
    for record in records.values():
        if record.source in {Source.API, Source.DISCOVERED}:
            specs.setdefault(record.id, EngineSpec(url=record.url, id=record.id, run=record.run))
    if settings.engine_allow:
        named |= {*found, *(record.url for record in records.values() if record.source is Source.DISCOVERED)}
    known = {spec.url for spec in specs.values()}
    specs |= {engine_id(url): EngineSpec(url=url) for url in found if url not in known}
    return Roster(settings, specs, settled, frozenset(named))


def _read_engines_file(file: Path) -> list[EngineSpec]:
    try:
        return parse_engines(file.read_text())
    except ValueError as error:
        raise ValueError(f"the engines file {file} cannot be used: {error}") from error
