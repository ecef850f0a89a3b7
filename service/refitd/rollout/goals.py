"""What a run's engines are to serve, and how far each of them may go now. Pure: records in, goals out."""

from collections.abc import Sequence
from dataclasses import replace

from refitd.catalog.record import VersionRecord
from refitd.rollout.carriage import NOTHING, Carriage
from refitd.rollout.plan import Goals
from refitd.rollout.record import EngineRecord, RolloutRecord
from refitd.rollout.strategy import Strategy, StrategyName, finished_first, has_given_up, released
from refitd.rollout.target import choose_target, last_good, loadable, wanted


def goals_of_run(
    strategy: Strategy,
    rollout: RolloutRecord | None,
    versions: Sequence[VersionRecord],
    engines: Sequence[EngineRecord],
    carriage: Carriage = NOTHING,
) -> Goals:
    """The same for all engines of a run. `versions` are the run's, newest first."""
    finish = finished_first(strategy, rollout, engines)
    held = {engine.serving for engine in engines if engine.known and engine.serving is not None}
    return Goals(
        target=choose_target(versions, finish, held, carriage),
        wanted=wanted(versions, finish, carriage),
        loadable=loadable(versions, finish, carriage),
        last_good=last_good(versions, carriage),
    )


def goals_of_engine(
    goals: Goals,
    engine: EngineRecord,
    strategy: Strategy,
    rollout: RolloutRecord | None,
    engines: Sequence[EngineRecord],
) -> Goals:
    """One engine's. Whose turn it is not, and who has given a version up, goes no further than the last good one.

    Nor does anyone while an operator has paused the run's rollouts: what serves goes on serving, and what was restarted
    or broke is brought to the last good version.
    """
    if goals.target is None:
        return goals
    if rollout is not None and rollout.paused_since is not None:
        return replace(goals, loadable=goals.last_good)
    if goals.loadable is not None and goals.last_good is not None and has_given_up(engine, goals.loadable):
        return replace(goals, loadable=goals.last_good)
    is_unchecked = strategy.name is StrategyName.CANARY and goals.loadable != goals.target
    if not is_unchecked and engine.id in released(strategy, goals.target, rollout, engines, goals.loadable):
        return goals
    return replace(goals, loadable=goals.last_good)  # where the target's files are lost, no canary went before


def on_the_way(goals: Goals, engine: EngineRecord, step: VersionRecord) -> Goals:
    """The goals of an engine that gets to what is wanted by `step` first, where it may go there."""
    if goals.loadable != goals.wanted:
        return goals
    given_up = goals.last_good is not None and has_given_up(engine, step)
    return replace(goals, loadable=goals.last_good if given_up else step)
