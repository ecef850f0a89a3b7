"""A folder that an engine's server may read again stays, whatever the keep rules say."""

from pathlib import Path

from refitd.engine.port import Outcome, Reached, Refit
from refitd.policy.observe import after_probe, after_refit
from support.records import engine
from support.services import serving


async def test_a_folder_that_a_server_may_read_again_is_not_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path, keep_last=1) as stage:

        def kept() -> set[str]:
            return {path.name for path in (stage.root / "run").glob("v*")}

        simulated = stage.engines["a"]
        await stage.served(1)
        simulated.may_read = (f"{stage.root}/run/v000001",)
        for step in (2, 3, 4):
            await stage.served(step)
        while not stage.store.engines["a:1"].debts.may_read:
            await stage.store.changed.wait_after(stage.store.changed.count, within=0.05)
        await stage.sweep()
        assert "v000001" in kept()
        simulated.may_read = ()
        while stage.store.engines["a:1"].debts.may_read:
            await stage.store.changed.wait_after(stage.store.changed.count, within=0.05)
        await stage.sweep()
        assert "v000001" not in kept()


def test_what_may_be_read_is_known_from_a_load_or_a_probe_until_the_next_one() -> None:
    loaded = after_refit(engine(), "v7", Refit(outcome=Outcome.ACK, resumed=True, may_read=("/root/run/v6",)), 0.0)
    assert "/root/run/v6" in loaded.paths
    refused = after_refit(loaded, "v8", Refit(outcome=Outcome.NACK, resumed=True), 0.0)
    assert "/root/run/v6" in refused.paths
    seen = Reached(model_path="/v7", weight_version="7", server_version="1", configuration="c", startup_path=None)
    assert "/root/run/v6" not in after_probe(refused, seen, None, None, 0.0).paths
