"""A version that leaves out tensors of the engines' model: what may be missing is named, what is missing is shown."""

import asyncio
from pathlib import Path

import numpy as np

from refitd_client.contract.states import EngineState
from support.checkpoints import Tensors, publish, tensors, write_model
from support.services import Stage, serving

ONE, TWO, THREE = (f"run~v{step:06d}" for step in (1, 2, 3))
MTP: Tensors = {f"mtp.{name}.weight": np.ones((2, 2), np.float32) for name in ("fc", "norm")}


def model(folder: Path) -> Path:
    return write_model(folder, tensors() | MTP)


async def announced(stage: Stage, step: int, weights: Tensors, *patterns: str) -> None:
    publish(stage.root, "run", step, weights)
    body = {"run": "run", "step": step, "allow_missing": list(patterns)}
    assert (await stage.http.post("/v1/versions", json=body)).status_code in {200, 202}


async def test_what_a_version_leaves_out_is_in_its_record_and_its_explanation(tmp_path: Path) -> None:
    async with serving(tmp_path, base_model=model(tmp_path / "mtp")) as stage:
        await announced(stage, 1, tensors(1), "mtp.*")
        await stage.until(ONE, lambda record: record.served_at is not None)
        told = (await stage.http.get(f"/v1/versions/{ONE}")).json()
        assert (told["allow_missing"], told["left_out"]) == (["mtp.*"], sorted(MTP))
        assert told["left_out_count"] == len(MTP)
        explained = (await stage.http.get(f"/v1/explain/{ONE}")).text
        assert "leaves out 2 of the model's tensors (mtp.fc.weight, mtp.norm.weight)" in explained


async def test_an_engine_that_has_tensors_of_another_version_takes_none_that_leaves_them_out_before_a_restart(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, base_model=model(tmp_path / "mtp")) as stage:
        await announced(stage, 1, tensors(1) | MTP)
        await stage.until(ONE, lambda record: record.served_at is not None)
        await announced(stage, 2, tensors(2), "mtp.*")
        store, engine = stage.store, stage.engines["a"]
        seen = store.changed.count
        async with asyncio.timeout(10):
            while "restart it" not in (next(iter(store.engines.values())).reason or ""):
                seen = await store.changed.wait_after(seen, within=0.05)
        (record,) = store.engines.values()
        assert (record.serving, record.state, len(engine.loads)) == (ONE, EngineState.BEHIND, 1)
        engine.restart()
        await stage.until(TWO, lambda record: record.served_at is not None)
        await announced(stage, 3, tensors(3), "mtp.*")
        await stage.until(THREE, lambda record: record.served_at is not None)
        assert len(engine.loads) == 3
