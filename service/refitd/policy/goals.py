"""What a run's engines are to serve, and how far each of them may go now. Pure: records in, goals out."""

from collections.abc import Sequence
from dataclasses import replace

from refitd.policy.coming import coming
from refitd.policy.in_place import Versions, step_in_place
from refitd.policy.loadable import NOTHING, Carriage
from refitd.policy.next_action import Goals
from refitd.policy.strategy import Strategy, StrategyName, finished_first, has_given_up, released
from refitd.policy.target import choose_target, last_good, loadable, wanted
from refitd.state.records import EngineRecord, RolloutRecord
from refitd.state.version import VersionRecord


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
        last_served=last_good(versions),
        coming=coming(versions, engines),
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


def in_place(goals: Goals, engine: EngineRecord, versions: Versions) -> Goals:
    """The goals of an engine that has the plugin: it gets to deltas by steps, whatever waits for a copy."""
    if goals.wanted is not None and step_in_place(engine, goals.wanted, versions) is not None:
        goals = replace(goals, loadable=goals.wanted)
    good = goals.last_served
    if good is None or good == goals.last_good or has_given_up(engine, good):
        return goals
    step = good if engine.serving == good.id else step_in_place(engine, good, versions)
    return goals if step is None or has_given_up(engine, step) else replace(goals, last_good=good)


def on_the_way(goals: Goals, engine: EngineRecord, versions: Versions) -> Goals:
    """The goals of an engine that gets to what it is to load by steps: the next one, where it may go there."""
    step = None if goals.loadable is None else step_in_place(engine, goals.loadable, versions)
    if step is None:
        return goals
    given_up = goals.last_good is not None and has_given_up(engine, step)
    return replace(goals, loadable=goals.last_good if given_up else step)
