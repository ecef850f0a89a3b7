"""What ends in the middle of an update: the service by SIGTERM, an engine that is taken out of the fleet."""

import signal
from pathlib import Path

import pytest

from faults.stand import Stand, Subject, id_of, standing, until
from refitd_client.contract.states import EngineState
from support.jobs import served_by
from support.proxy import Hold, Proxy

LOAD = "/update_weights_from_disk"


def test_sigterm_in_mid_update_lets_it_end_and_leaves_no_engine_paused(engine: Subject, tmp_path: Path) -> None:
    loading = Hold(reply=True)
    with Proxy(engine.server.port) as proxy, standing(tmp_path, engine, engines=[proxy.url]) as stand:
        stand.serve(engine.model(1), 1)
        proxy.plan(LOAD, loading)
        stand.publish(engine.model(2), 2)
        loading.until_arrived()
        stand.refitd.process.send_signal(signal.SIGTERM)
        until(lambda: not _is_talked_to(stand), "it still takes requests")
        with pytest.raises(TimeoutError):  # it waits for the update, and for nothing else
            stand.refitd.process.wait(1)
        loading.release()
        assert stand.refitd.process.wait(60) == 0, stand.refitd.tail()
        assert served_by(engine.server).label == "2"
        assert engine.serves(2)
        stand.refitd.start()
        until(lambda: stand.engine_now.state is EngineState.IN_SYNC)
        assert stand.engine_now.step == 2
        assert proxy.count(LOAD) == 2, "what had been proved was loaded again"


def _is_talked_to(stand: Stand) -> bool:
    """Whether anybody has a connection to the service, or could have one."""
    return any(each.laddr.port == stand.refitd.port for each in stand.process.net_connections("tcp"))


def test_an_engine_removed_in_mid_update_ends_its_load_and_goes_on_and_its_version_stays_meanwhile(
    engine: Subject, tmp_path: Path
) -> None:
    flags = ("--keep-last", "1")
    file = tmp_path / "engines.yaml"
    with Proxy(engine.server.port) as proxy:
        file.write_text(f"- {proxy.url}\n")
        with standing(tmp_path, engine, *flags, "--engines-file", str(file), engines=[]) as stand:
            removed_while_it_loads(stand, engine, proxy, file)


def removed_while_it_loads(stand: Stand, engine: Subject, proxy: Proxy, file: Path) -> None:
    loading, named = Hold(), file.read_text()
    stand.serve(engine.model(1), 1)
    proxy.plan(LOAD, loading)
    stand.publish(engine.model(2), 2)
    loading.until_arrived()
    file.write_text("[]\n")
    until(lambda: stand.client.engines().items == [])
    stand.publish(engine.model(3), 3).wait(timeout=60, wait_for="sealed")
    stand.client.reclaim()
    assert "v000002" in stand.folders(), "what an engine reads was deleted"
    loading.release()
    until(lambda: served_by(engine.server).label == "2" and engine.serves(2), "the engine was left paused")
    until(lambda: "v000002" not in stand.folders(), "what nobody reads any more was kept")
    assert stand.version(3).engines == []
    file.write_text(named)
    until(lambda: stand.client.engines().items != [])
    stand.is_served(3)
    assert engine.serves(3)
    assert id_of(3) == stand.version(3).id
