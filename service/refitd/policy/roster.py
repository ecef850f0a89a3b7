"""Which engines there are, and which of them the operator named. Pure.

`reconcile` holds the engines that the store knows against those that a source names now. What is known of an engine
(unknown contents, loads that may still read, a resume that is owed) belongs to its address and outlives restarts and
edits of the engines file; `refitd.state.records.left_behind` says what is kept while no source names the address. An
engine with another address, or with other servers that are updated together with it, is another engine.

An engine's run is set by its source and by moves. The last one holds:

    the file says A, an operator moves it to B      B, whatever else changes in the file, and over restarts
    then the file says C                            C: the file was changed, and names a run
    then the file says nothing of a run any more    B, if that was moved to: the file names no other run
    the engine is taken out of the file             the move is forgotten with the engine

The operator's names also say which hosts may be called, and which engines get the default keys.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from refitd.engine.address import Address, host_of, parse_allow_list, refusal
from refitd.engine.engines_file import EngineSpec
from refitd.policy.binding import follows
from refitd.state.records import EngineRecord, Source


@dataclass(frozen=True, slots=True)
class NamedEngine:
    """An engine as the operator names it, and where."""

    spec: EngineSpec
    source: Source


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What to drop (ids) and what to keep from now on: new records, changed ones and those that stay as they are."""

    drop: tuple[str, ...]
    keep: tuple[EngineRecord, ...]


def reconcile(
    records: Mapping[str, EngineRecord], named: Mapping[str, NamedEngine], sources: frozenset[Source]
) -> Reconciled:
    """Hold the records of engines that `sources` named against what they name now."""
    drop = [
        record.id
        for record in records.values()
        if (record.source in sources and record.id not in named)
        or (record.id in named and named[record.id].spec.urls != record.urls)
    ]
    keep = [_record(name, entry, None if name in drop else records.get(name)) for name, entry in named.items()]
    return Reconciled(drop=tuple(drop), keep=tuple(keep))


def _record(name: str, entry: NamedEngine, known: EngineRecord | None) -> EngineRecord:
    spec = entry.spec
    if known is None:
        named = spec.run is not None
        return EngineRecord(
            id=name,
            url=spec.url,
            pair=spec.pair,
            run=spec.run,
            run_named=named,
            said=spec.run,
            source=entry.source,
        )
    heard = replace(known, source=entry.source, said=spec.run)
    if known.moved and spec.run in {None, known.said}:
        return heard
    if spec.run is not None:
        return follows(replace(heard, moved=False), spec.run, named=True)
    if known.run_named:  # it is not said any more: the only run, or the service's, will do
        return follows(heard, None, named=False)
    return heard


@dataclass(frozen=True, slots=True)
class OperatorHosts:
    """What the settings say of engines: their URLs, and the allow list of hosts that may be called."""

    engines: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()


def guard_of(hosts: OperatorHosts, engines: Mapping[str, EngineRecord]) -> Callable[[str, Address | None], str | None]:
    """Why an engine may not be called, by the settings and by what the engines file says at the time of the call.

    What `--engine` names is the operator's word. So is the engines file, unless there is an allow list: then it says
    which hosts the file may name.
    """
    allowed = parse_allow_list(list(hosts.allow))
    settled = frozenset(host_of(url) for url in hosts.engines)

    def guard(host: str, address: Address | None) -> str | None:
        reason = refusal(host, address, allowed, settled)
        if reason is None or allowed.is_set:
            return reason
        file = {host_of(url) for engine in engines.values() if engine.source is Source.FILE for url in engine.urls}
        return refusal(host, address, allowed, settled | file)

    return guard


def named_by_operator(hosts: OperatorHosts, engines: Mapping[str, EngineRecord]) -> Callable[[str], bool]:
    """Return whether the operator named the engine with a URL, by what the engines file says at the time of the call.

    `--engine` and the engines file name engines. A place of `--discover` does where an allow list says on which hosts
    engines are; without one any process on loopback could be discovered. A POST to the API names none: its sender could
    register a server of his own, to be sent the key of the others.
    """
    settled = frozenset(hosts.engines)
    sources = {Source.FILE}
    if hosts.allow:
        sources |= {Source.DISCOVERED}

    def is_named(url: str) -> bool:
        return url in settled or any(e.url == url and e.source in sources for e in engines.values())

    return is_named
