"""Which run an engine follows, and what a move to another run changes. Pure.

An engine that the operator binds to a run follows that run. Any other follows the only run there is and stays with it:
a second run in the same root takes no engines from the first. Closed runs do not count.

When an engine is moved to another run:

    it serves a version of its old run    it goes on serving that, and keeps it from deletion, until it has loaded one
                                          of the new run
    it loads one                          the load comes to its end; then it is brought to the new run's target
    its contents are not known            it stays paused until it has loaded a version of the new run
    the new run is paused                 it is brought to that run's last good version
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from refitd.state.records import EngineRecord
from refitd.text import listed
from refitd_client.contract.states import EngineState


class EngineWriter(Protocol):
    """Where it is written down: the store."""

    def put_engine(self, record: EngineRecord, text: str | None = None) -> None:
        """Take an engine as it is now."""
        ...


def follows(engine: EngineRecord, run: str | None, *, named: bool) -> EngineRecord:
    """The engine with another run to follow. What it holds stays known; what it failed at was the old run's."""
    engine = replace(engine, run_named=named)
    if engine.run == run:
        return engine
    if engine.state.is_at_rest:  # any other state, and its reason, are the engine's own
        engine = replace(engine, state=engine.state if run is None else EngineState.BEHIND, reason=None)
    return replace(engine, run=run, failures=0, strikes={})


def moved(engine: EngineRecord, run: str) -> EngineRecord:
    """The engine after an operator moved it to a run. Back in the run that its source names it counts as not moved."""
    return replace(follows(engine, run, named=True), moved=engine.said != run)


def move(books: EngineWriter, engine: EngineRecord, run: str) -> None:
    """Move an engine and log it, unless it follows that run by name already.

    Args:
        books: writes the engine: the store.
        engine: the engine.
        run: the run to follow.
    """
    after = moved(engine, run)
    if after != engine:
        left = "" if engine.run is None else f", and no longer {engine.run}"
        books.put_engine(after, f"moved: follows run {run}{left}")


def how_to_bring(engines: Sequence[EngineRecord], run: str, closed: Collection[str]) -> str:
    """How to bring some of these engines to a run, as a sentence without a full stop.

    Args:
        engines: the engines that could come. Those that no open run would lose are named first.
        run: the run.
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
    return {bind(None if default is not None and not e.run_named else e.run, default, runs) for e in engines}


def why_unbound(runs: Collection[str]) -> str:
    """Why an engine follows no run, and what to do."""
    if not runs:
        return "no run that is not closed has published a version yet"
    return (
        f"there are {len(runs)} runs ({', '.join(sorted(runs))}): name one with --run, bind it in the engines file, "
        "or say 'refitd engines move ID --run RUN'"
    )


def why_not_followed(engines: Sequence[EngineRecord], run: str, *, closed: Collection[str], mine: bool) -> str:
    """Why a run's notice is refused, and the one thing to do.

    Args:
        engines: all engines.
        run: the run, which none of them follows.
        closed: the runs that are closed.
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
