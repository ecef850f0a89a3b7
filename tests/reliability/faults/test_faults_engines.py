"""Engines that load by halves, say so in their own words, or are relabelled behind refitd's back."""

from pathlib import Path

from faults.stand import Subject, standing, until
from refitd_client.contract.states import EngineState
from support.jobs import served_by
from support.proxy import Proxy, Replaced

LOAD = "/update_weights_from_disk"
RESUME = "/continue_generation"
ROLLING_BACK = "Failed to update weights: injected.\nRolling back to original weights."
NO_FILES = "Failed to get weights iterator: nothing there"
SUCCEEDED = "Succeeded to update model weights."


def said(message: str) -> Replaced:
    """A failure, in SGLang's form."""
    return Replaced(400, {"success": False, "message": message, "num_paused_requests": 0})


def test_400_rolling_back_taints_and_a_full_load_repairs(engine: Subject, tmp_path: Path) -> None:
    """A load that breaks off in the middle and is then read again from the same files, as SGLang calls a rollback."""
    with Proxy(engine.server.port) as proxy, standing(tmp_path, engine, engines=[proxy.url]) as stand:
        stand.serve(engine.model(1), 1)
        engine.call("/embedded/interrupt_loads", {"after": 3, "times": 1})
        stand.publish(engine.model(2), 2)
        tainted = stand.until_engine(EngineState.TAINTED)
        assert "Rolling back" in tainted.text
        stand.is_served(2)
        assert engine.serves(2)
        assert proxy.count(LOAD) >= 3


def test_half_the_ranks_updated_taints_and_a_full_load_repairs(engine: Subject, tmp_path: Path) -> None:
    """SGLang joins what its ranks say; the one rank that there is here has loaded."""
    with Proxy(engine.server.port) as proxy, standing(tmp_path, engine, engines=[proxy.url]) as stand:
        stand.serve(engine.model(1), 1)
        proxy.plan(LOAD, said(f"{NO_FILES} | {SUCCEEDED}"))
        before = len(proxy.seen)
        stand.publish(engine.model(2), 2)
        stand.until_engine(EngineState.TAINTED)
        stand.is_served(2)
        failed, repaired = [at for at, call in enumerate(proxy.seen) if at >= before and call == LOAD][:2]
        assert RESUME not in proxy.seen[failed:repaired], "it was let go on with contents that nobody knows"
        assert engine.serves(2)


def test_the_rollback_target_fails_too_and_the_engine_is_quarantined_and_stays_paused(
    engine: Subject, tmp_path: Path
) -> None:
    with Proxy(engine.server.port) as proxy, standing(tmp_path, engine, engines=[proxy.url]) as stand:
        for step in (1, 2):
            stand.serve(engine.model(step), step)
        resumed = proxy.count(RESUME)
        proxy.plan(LOAD, *[said(ROLLING_BACK)] * 4)
        rolled_back = stand.client.rollback("exp/trial")
        stand.until_engine(EngineState.QUARANTINED)
        assert rolled_back.step == 1
        assert proxy.count(RESUME) == resumed, "it was let go on with contents that nobody knows"
        assert "refitd_engines" in (metrics := stand.get("/metrics").text)
        assert any("QUARANTINED" in line and line.endswith(" 1.0") for line in metrics.splitlines()), metrics
        stand.client.resync(stand.engine_now.id)
        until(lambda: stand.engine_now.state is EngineState.IN_SYNC and engine.serves(1))


def test_the_version_label_set_by_someone_else_is_not_believed_and_set_right(engine: Subject, tmp_path: Path) -> None:
    with Proxy(engine.server.port) as proxy, standing(tmp_path, engine, engines=[proxy.url]) as stand:
        stand.serve(engine.model(1), 1)
        engine.call("/update_weight_version", {"new_version": "7", "abort_all_requests": False})
        proxy.until(LOAD, 2)
        until(lambda: served_by(engine.server).label == "1" and stand.engine_now.state is EngineState.IN_SYNC)
        assert engine.serves(1)
