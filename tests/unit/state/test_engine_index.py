"""Engines found by run and address are those that a look through all of them finds."""

from hypothesis import given
from hypothesis import strategies as st

from refitd.state.records import EngineRecord
from refitd.state.version_index import EngineIndex
from support.records import engine

RECORDS = st.builds(
    engine,
    st.sampled_from("abcd"),
    run=st.sampled_from([None, "one", "two"]),
    address=st.sampled_from([None, "h:1", "h:2"]),
    serving=st.sampled_from([None, "one~v000001", "one~v000002"]),
    known=st.booleans(),
    plugin=st.sampled_from([None, "0.1.0"]),
    configuration=st.sampled_from([None, "tp 2"]),
    proof=st.sampled_from([None, "plugin"]),
)


@given(steps=st.lists(st.one_of(RECORDS, st.sampled_from("abcd")), max_size=30))
def test_whatever_happened_to_engines_each_is_found_where_it_is_now(steps: list[EngineRecord | str]) -> None:
    index = EngineIndex()
    for step in steps:
        if isinstance(step, str):
            index.pop(step, None)
        else:
            index[step.id] = step
        everything = list(index.values())
        for run in (None, "one", "two"):
            mine = [each for each in everything if each.run == run]
            assert index.of_run(run) == mine
            assert index.plugged(run) == sum(each.seen.plugin is not None for each in mine)
            for version in ("one~v000001", "one~v000002"):
                assert index.serving(run, version) == sum(each.known and each.serving == version for each in mine)
        for address in ("h:1", "h:2"):
            assert sorted(each.id for each in index.at(address)) == sorted(
                each.id for each in everything if each.address == address
            )
        assert list(index.at(None)) == []
        for one in everything:
            proved = {each.id for each in index.proved(one.serving, one.seen.configuration, one.contents.proof)}
            alike = (one.serving, one.seen.configuration, one.contents.proof)
            assert proved == {e.id for e in everything if (e.serving, e.seen.configuration, e.contents.proof) == alike}


def test_a_record_that_takes_the_place_of_another_is_the_one_that_is_found() -> None:
    index = EngineIndex()
    index["a"] = engine("a")
    index["a"] = engine("a").having(reason="new")
    assert [each.reason for each in index.of_run("run")] == ["new"]


def test_versions_that_no_engine_serves_any_more_take_no_memory() -> None:
    index = EngineIndex()
    for step in range(1, 100):
        index["a"] = engine("a").having(known=True, serving=f"run~v{step:06d}")
    assert len(index._by) == 2, "what proves it, and what serves it"
