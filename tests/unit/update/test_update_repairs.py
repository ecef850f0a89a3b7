"""An engine with unknown contents is told so with each load, because then a refusal is no reason to resume it."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from refitd.engine.port import Outcome, Refit, Stage, Target
from support.fleets import running
from support.records import version
from support.simulated_engine import SimulatedEngine

A = "a:1"


class Attentive(SimulatedEngine):
    """Remembers whether each load was a repair, and what its contents were not to be after it."""

    def __init__(self) -> None:
        super().__init__()
        self.repairs: list[bool] = []
        self.ruled_out: list[str | None] = []

    async def refit(self, target: Target, on_stage: Callable[[Stage], None]) -> Refit:
        self.repairs.append(target.repairs)
        self.ruled_out.append(target.not_fingerprint)
        return await super().refit(target, on_stage)


async def test_only_loads_of_an_engine_with_unknown_contents_are_repairs(tmp_path: Path) -> None:
    engine = Attentive()
    engine.script = [
        Refit(outcome=Outcome.NACK, resumed=True, reason="no such shard"),
        Refit(outcome=Outcome.TAINTED, resumed=False, reason="the reply was lost"),
    ]
    async with running(tmp_path, {"a": engine}) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: stage.store.engines[A].serving == version(1).id)
        stage.store.put_version(version(2))
        await stage.until(lambda: stage.store.engines[A].serving == version(2).id)
    assert engine.repairs == [False, False, True, False]


async def test_after_the_service_s_death_in_mid_load_an_engine_never_answers_from_an_older_step(tmp_path: Path) -> None:
    """It goes to the target at once, and is held against what it served before, as in any other load."""
    engine = Attentive()
    async with running(tmp_path, {"a": engine}) as stage:
        stage.store.put_version(version(1))
        await stage.until(lambda: stage.store.versions[version(1).id].served_at is not None)
        engine.gate = asyncio.Event()  # from here on no load ends
        stage.store.put_version(version(2))
        await stage.until(lambda: len(engine.loads) == 2)
    engine.gate = None
    async with running(tmp_path, {"a": engine}) as stage:
        await stage.until(lambda: stage.store.engines[A].serving == version(2).id)
        assert stage.store.engines[A].known
    assert engine.loads == [f"/root/run/v{step:06d}" for step in (1, 2, 2)]
    assert engine.repairs == [False, False, True]
    assert engine.ruled_out[-1] == "contents of /root/run/v000001"
