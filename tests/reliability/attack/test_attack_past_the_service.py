"""Somebody with an engine's admin key loads weights past the service. No version has been published yet."""

from pathlib import Path

import httpx
import pytest

from refitd_client.contract.states import EngineState
from support.jobs import PATIENCE, running
from support.servers import ADMIN_KEY, EmbeddedServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.parametrize("lora", [False, True])
def test_an_engine_with_other_weights_than_it_was_found_with_is_not_in_sync(
    models: Path, tmp_path: Path, *, lora: bool
) -> None:
    """Of an engine that gets adapters, it is the model beneath them."""
    engine_flags, flags = (["--enable-lora"], ["--lora", "actor"]) if lora else ([], [])
    with (
        EmbeddedServer(tmp_path, models / "model_a", *engine_flags) as engine,
        running(tmp_path, engine, *flags) as job,
    ):
        job.until_engine(EngineState.IN_SYNC)
        loaded = httpx.post(
            f"{engine.url}/update_weights_from_disk",
            json={"model_path": str(models / "model_b")},
            headers={"Authorization": f"Bearer {ADMIN_KEY}"},
            timeout=PATIENCE,
            trust_env=False,
        )
        assert loaded.json()["success"]
        job.until_engine(EngineState.CONTESTED)
        assert f"another writer loads {models / 'model_b'}" in (job.engine_now.reason or "")
