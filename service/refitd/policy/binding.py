"""Which run an engine follows. Pure.

An engine bound by hand follows that run. One that is not follows the only run there is, and stays with it: a second run
in the same root does not take engines away from the first. Runs that are closed do not count: they have ended.
"""

from collections.abc import Collection, Iterable

from refitd.state.records import EngineRecord


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


def free_engines(engines: Iterable[EngineRecord], closed: Collection[str]) -> list[EngineRecord]:
    """The engines that a new run may have for the asking ("mine"): those of no run, and those of closed runs."""
    return [engine for engine in engines if engine.run is None or engine.run in closed]
