"""An engine goes over to another run: the record before in, the record after out.

it serves a version of its old run    it goes on serving that, and keeps it from deletion, until it has loaded one
                                      of the new run
it loads one                          the load comes to its end; then it is brought to the new run's target
its contents are not known            it stays paused until it has loaded a version of the new run
the new run is paused                 it is brought to that run's last good version
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from refitd.state.records import EngineRecord
from refitd_client.contract.states import EngineState


class Books(Protocol):
    """Where it is written down: the store."""

    def put_engine(self, record: EngineRecord, text: str | None = None) -> None:
        """Take an engine as it is now."""
        ...


_STANDS = frozenset({EngineState.IN_SYNC, EngineState.BEHIND, EngineState.NACKED})
_NAMED = 3  # engines that a sentence names; the others it counts


def follows(engine: EngineRecord, run: str | None, *, named: bool) -> EngineRecord:
    """The engine with another run to follow. What it holds stays known; what it failed at was the old run's."""
    engine = replace(engine, run_named=named)
    if engine.run == run:
        return engine
    if engine.state in _STANDS:  # any other state, and its reason, are the engine's own
        engine = replace(engine, state=engine.state if run is None else EngineState.BEHIND, reason=None)
    return replace(engine, run=run, failures=0, strikes={})


def moved(engine: EngineRecord, run: str) -> EngineRecord:
    """The engine when somebody has moved it. Back to where its source has it is no move any more."""
    return replace(follows(engine, run, named=True), moved=engine.said != run)


def move(books: Books, engine: EngineRecord, run: str) -> None:
    """Move an engine, and say so in the log; nothing where it follows that run by name already."""
    after = moved(engine, run)
    if after != engine:
        left = "" if engine.run is None else f", and no longer {engine.run}"
        books.put_engine(after, f"moved: follows run {run}{left}")


def how_to_bring(engines: Sequence[EngineRecord], run: str, closed: Collection[str]) -> str:
    """How to bring some of these engines to a run, as a sentence without a full stop.

    Args:
        engines: the engines that could come; those that a sentence names stand first.
        run: the run.
        closed: the runs that are closed: engines of any other run are moved with --yes only.
    """
    if not engines:
        return f"'refitd engines add URL --run {run}' adds an engine"
    named = ", ".join(f"{engine.id} ({_whose(engine)})" for engine in engines[:_NAMED])
    more = f" and {len(engines) - _NAMED} more" if len(engines) > _NAMED else ""
    told = f"'refitd engines move ID --run {run}' brings an engine here: there are {named}{more}"
    kept = next((engine.run for engine in engines if engine.run is not None and engine.run not in closed), None)
    if kept is None:
        return told
    return f"{told} (add --yes, or first 'refitd runs close {kept}', while {kept} is not closed)"


def _whose(engine: EngineRecord) -> str:
    return "follows no run" if engine.run is None else f"follows {engine.run}"
