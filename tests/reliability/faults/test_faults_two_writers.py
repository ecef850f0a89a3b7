"""Two services of two roots on one engine, or anything else that loads weights into an engine of refitd's."""

from pathlib import Path

from faults.stand import Stand, Subject, standing, until
from refitd_client.contract.states import EngineState, Standing
from support.jobs import RUN, served_by
from support.proxy import Proxy

LOAD, PROBE = "/update_weights_from_disk", "/model_info"


def standing_of(stand: Stand) -> Standing:
    """How the run stands, in a word."""
    return next(run.standing for run in stand.client.overview().runs if run.run == RUN)


def test_two_services_on_one_engine_do_not_fight_for_ever_and_one_names_the_other(
    engine: Subject, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with (
        Proxy(engine.server.port) as proxy,
        standing(tmp_path / "one", engine, engines=[proxy.url]) as one,
        standing(tmp_path / "two", engine, engines=[proxy.url]) as two,
    ):
        one.serve(engine.model(1), 1)
        two.publish(engine.model(2), 2)
        until(lambda: EngineState.CONTESTED in {one.engine_now.state, two.engine_now.state})
        until(lambda: "resync" in (one.engine_now.reason or "") + (two.engine_now.reason or ""), "neither gives up")
        left, winner = (one, two) if "resync" in (one.engine_now.reason or "") else (two, one)
        until(lambda: winner.engine_now.state is EngineState.IN_SYNC)
        assert str(winner.root) in (left.engine_now.reason or "")
        assert standing_of(left) is Standing.TROUBLED
        assert standing_of(winner) is Standing.TROUBLED, "another writer was there a moment ago"
        assert any("stop the other writer" in line for line in left.client.explain(left.engine_now.id).sentences)
        loads, probes = proxy.count(LOAD), proxy.count(PROBE)
        until(lambda: proxy.count(PROBE) > probes + 20)
        assert proxy.count(LOAD) == loads <= 20
        assert not any("it was restarted" in event.text for stand in (one, two) for event in stand.events)
        left.client.resync(left.engine_now.id)
        until(lambda: left.engine_now.state is EngineState.IN_SYNC)
        assert served_by(engine.server).label == ("1" if left is one else "2")


def test_an_engine_that_is_named_twice_is_loaded_once_and_says_so(engine: Subject, tmp_path: Path) -> None:
    with Proxy(engine.server.port) as proxy:
        spellings = [proxy.url, proxy.url.replace("127.0.0.1", "localhost") + "/"]
        with standing(tmp_path, engine, engines=spellings) as stand:
            until(lambda: EngineState.CONTESTED in {each.state for each in stand.client.engines().items})
            stand.serve(engine.model(1), 1)
            one, other = sorted(stand.client.engines().items, key=lambda each: each.state is EngineState.CONTESTED)
            assert (one.state, one.step, other.step) == (EngineState.IN_SYNC, 1, None)
            assert one.url in (other.reason or "")
            assert other.url in (other.reason or "")
            assert proxy.count(LOAD) == 1
            assert standing_of(stand) is Standing.TROUBLED
