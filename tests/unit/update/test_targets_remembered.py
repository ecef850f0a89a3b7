"""What is remembered of a run's goals is what a fresh look at everything finds, whatever engines do."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.clock import SystemClock
from refitd.policy import goals
from refitd.policy.strategy import Strategy, StrategyName
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.update import targets as targets_module
from refitd.update.targets import Targets
from refitd_client.contract.states import VersionState
from support.records import engine, version

SERVED = version(1, state=VersionState.LOST)  # the target only as long as an engine holds it
COMING = version(3, state=VersionState.VALIDATING, noticed=True)
CHANGES = st.fixed_dictionaries(
    {
        "serving": st.sampled_from([None, SERVED.id, version(2).id]),
        "known": st.booleans(),
        "plugin": st.sampled_from([None, "0.1.0"]),
        "run": st.sampled_from(["run", "other"]),
        "reason": st.sampled_from([None, "why"]),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    changes=st.lists(st.tuples(st.sampled_from("abc"), CHANGES), max_size=12),
    name=st.sampled_from([StrategyName.ALL, StrategyName.ROLLING]),
)
def test_remembered_goals_are_those_of_a_fresh_look(
    changes: list[tuple[str, dict[str, str]]], name: StrategyName
) -> None:
    with TemporaryDirectory() as folder:
        journal = Journal(Path(folder))
        store, strategy = Store(journal, SystemClock()), Strategy(name=name)
        targets = Targets(store, strategy)
        for each in (SERVED, version(2, state=VersionState.REJECTED), COMING):
            store.put_version(each)
        for each in "abc":
            store.put_engine(engine(each))
        for each, fields in changes:
            targets.of_run("run")  # remembers
            store.put_engine(store.engines[each].having(**fields))
            for run in ("run", "other"):
                assert targets.of_run(run) == Targets(store, strategy).of_run(run)
        journal.close()


async def test_a_thousand_engines_that_arrive_are_no_thousand_looks_at_the_goals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    store = Store(journal, SystemClock())
    targets = Targets(store)
    store.put_version(version(1))
    for number in range(1000):
        store.put_engine(engine(str(number)))
    looks: list[int] = []

    def counted(*arguments: object) -> object:
        looks.append(1)
        return goals.goals_of_run(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(targets_module, "goals_of_run", counted)
    for number in range(1000):
        store.put_engine(store.engines[str(number)].having(serving=version(1).id))
        targets.of_engine(store.engines[str(number)])
    assert len(looks) <= 2
    journal.close()
