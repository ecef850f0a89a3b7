"""Which engines there are, which of them the operator named, and which run each follows. Pure.

`reconcile` holds the engines that the store knows against those that a source names now. What is known of an engine
(unknown contents, loads that may still read, a resume that is owed) belongs to its address and outlives restarts and
edits of the engines file. An engine with another address or other servers is another engine.

An engine's run is set by its source and by moves. The last one holds:

    the file says A, an operator moves it to B      B, whatever else changes in the file, and over restarts
    then the file says C                            C: the file was changed, and names a run
    then the file says nothing of a run any more    B, if that was moved to: the file names no other run
    the engine is taken out of the file             the move is forgotten with the engine

An engine that the operator binds to a run follows that run. Any other follows the only run there is and stays with it:
a second run in the same root takes no engines from the first. Closed runs do not count.

An engine that is moved goes on serving its old run's version, and keeps it from deletion, until it has loaded one of
the
new run. A load comes to its end first. An engine with unknown contents stays paused until then. If the new run is
paused, the engine is brought to that run's last good version.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from refitd.engine.address import Address, host_of, parse_allow_list, refusal
from refitd.engine.registry import EngineSpec
from refitd.state.records import EngineRecord, Naming, Source
from refitd.state.store import Store
from refitd.text import listed
from refitd_client.contract.states import EngineState


def follows(engine: EngineRecord, run: str | None, *, named: bool) -> EngineRecord:
    """The engine with another run to follow. What it holds stays known; what it failed at was the old run's."""
    engine = engine.having(run_named=named)
    if engine.run == run:
        return engine
    if engine.state.is_at_rest:  # any other state, and its reason, are the engine's own
        engine = engine.having(state=engine.state if run is None else EngineState.BEHIND, reason=None)
    return engine.having(run=run, failures=0, strikes={})


def moved(engine: EngineRecord, run: str) -> EngineRecord:
    """The engine after an operator moved it to a run. Back in the run that its source names it counts as not moved."""
    return follows(engine, run, named=True).having(moved=engine.naming.said != run)


def move(store: Store, engine: EngineRecord, run: str) -> None:
    """Move an engine and log it, unless it follows that run by name already."""
    after = moved(engine, run)
    if after != engine:
        left = "" if engine.run is None else f", and no longer {engine.run}"
        store.put_engine(after, f"moved: follows run {run}{left}")


def how_to_bring(engines: Sequence[EngineRecord], run: str, closed: Collection[str]) -> str:
    """How to bring some of these engines to a run, as a sentence without a full stop.

    Args:
        closed: the runs that are closed: engines of any other run are moved with --yes only.
    """
    if not engines:
        return f"'refitd engines add URL --run {run}' adds an engine"
    free = sorted(free_engines(engines, closed), key=lambda engine: engine.id)
    kept = sorted((each for each in engines if each not in free), key=lambda engine: engine.id)
    first, *_ = both = [*free, *kept]
    named = listed([f"{e.id} (follows {'no run' if e.run is None else e.run})" for e in both])
    command = f"refitd engines move {first.id} --run {run}" + ("" if free else " --yes")
    told, there = f"'{command}' brings an engine here", f"there are {named}"
    if not kept:
        return f"{told}; {there}"
    loser = kept[0].run
    if free:
        return f"{told}; {there}; to move one of {loser}, which is not closed, add --yes"
    return (
        f"{told}, and takes it from {loser}, which is not closed (if it has ended, first 'refitd runs close {loser}'); "
        f"{there}"
    )


def bind(bound: str | None, default: str | None, runs: Collection[str]) -> str | None:
    """The run that an engine follows: its own, else the service's, else the only one; None where that is not clear."""
    if bound is not None:
        return bound
    if default is not None:
        return default
    return next(iter(runs)) if len(runs) == 1 else None


def followed(engines: Iterable[EngineRecord], default: str | None, runs: Collection[str]) -> set[str | None]:
    """The runs that engines follow, or are about to, with `runs` in the root; None among them for those that cannot."""
    return {bind(None if default is not None and not e.naming.run_named else e.run, default, runs) for e in engines}


def why_unbound(runs: Collection[str]) -> str:
    if not runs:
        return "no run that is not closed has published a version yet"
    return (
        f"there are {len(runs)} runs ({', '.join(sorted(runs))}): name one with --run, bind it in the engines file, "
        "or say 'refitd engines move ID --run RUN'"
    )


def why_not_followed(engines: Sequence[EngineRecord], run: str, *, closed: Collection[str], mine: bool) -> str:
    """Why a run's notice is refused, and the one thing to do.

    Args:
        run: the run, which none of them follows.
        mine: the notice has asked for the engines that are free, and there are none.
    """
    if not engines:
        return f"no engine follows run {run}: 'refitd engines add URL --run {run}' adds one"
    if free := free_engines(engines, closed):
        ids = listed(sorted(engine.id for engine in free))
        return (
            f"no engine follows run {run}: publish with engines='mine' ('refitd publish --engines mine') to take {ids}"
        )
    first = min(engines, key=lambda engine: engine.id)
    if mine:
        why = f"no engine is free for run {run}: each follows a run that is not closed"
        return f"{why}. If run {first.run} has ended, say 'refitd runs close {first.run}'"
    move_one = f"'refitd engines move {first.id} --run {run} --yes' brings {first.id} here"
    return f"no engine follows run {run}: {move_one} from run {first.run}"


def free_engines(engines: Iterable[EngineRecord], closed: Collection[str]) -> list[EngineRecord]:
    """The engines that a new run may have for the asking ("mine"): those of no run, and those of closed runs."""
    return [engine for engine in engines if engine.run is None or engine.run in closed]


@dataclass(frozen=True, slots=True)
class NamedEngine:
    spec: EngineSpec
    source: Source


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What to drop (ids) and what to keep from now on."""

    drop: tuple[str, ...]
    keep: tuple[EngineRecord, ...]


def reconcile(
    records: Mapping[str, EngineRecord], named: Mapping[str, NamedEngine], sources: frozenset[Source]
) -> Reconciled:
    """Hold the records of engines that `sources` named against what they name now."""
    drop = [
        record.id
        for record in records.values()
        if (record.naming.source in sources and record.id not in named)
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
            run=spec.run,
            naming=Naming(source=entry.source, pair=spec.pair, run_named=named, said=spec.run),
        )
    heard = known.having(source=entry.source, said=spec.run)
    if known.naming.moved and spec.run in {None, known.naming.said}:
        return heard
    if spec.run is not None:
        return follows(heard.having(moved=False), spec.run, named=True)
    if known.naming.run_named:  # it is not said any more: the only run, or the service's, will do
        return follows(heard, None, named=False)
    return heard


@dataclass(frozen=True, slots=True)
class OperatorHosts:
    """What the settings say of engines: their URLs, and the allow list of hosts that may be called."""

    engines: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()


def guard_of(hosts: OperatorHosts, engines: Mapping[str, EngineRecord]) -> Callable[[str, Address | None], str | None]:
    """Why an engine may not be called, by the settings and by the engines file at the time of the call.

    `--engine` and the engines file are the operator's word. An allow list says which hosts the file may name.
    """
    allowed = parse_allow_list(list(hosts.allow))
    settled = frozenset(host_of(url) for url in hosts.engines)

    def guard(host: str, address: Address | None) -> str | None:
        reason = refusal(host, address, allowed, settled)
        if reason is None or allowed.is_set:
            return reason
        file = {
            host_of(url) for engine in engines.values() if engine.naming.source is Source.FILE for url in engine.urls
        }
        return refusal(host, address, allowed, settled | file)

    return guard


def named_by_operator(hosts: OperatorHosts, engines: Mapping[str, EngineRecord]) -> Callable[[str], bool]:
    """Return whether the operator named the engine with a URL, by what the engines file says at the time of the call.

    A discovered engine counts as named only where an allow list says on which hosts engines are: without one any
    process on
    loopback could be discovered. A POST to the API names none: its sender could register a server of his own, to be
    sent the
    key of the others.
    """
    settled = frozenset(hosts.engines)
    sources = {Source.FILE}
    if hosts.allow:
        sources |= {Source.DISCOVERED}

    def is_named(url: str) -> bool:
        return url in settled or any(e.url == url and e.naming.source in sources for e in engines.values())

    return is_named
