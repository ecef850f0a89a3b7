"""What the released AReaL's broadcasts do to a real engine behind the front, and a trainer that dies there."""

from collections.abc import Callable
from pathlib import Path

import httpx
from safetensors.torch import load_file

from refitd_client.contract.states import EngineState

from .areal import killed_areal, released_areal
from .front import FrontServer
from .jobs import PATIENCE, RUN, Job
from .published import versions


def broadcasts_are_served_and_a_killed_trainer_changes_nothing(
    kind: str, job: Job, models: list[Path], folder: Path, answer: Callable[[], list[int]]
) -> None:
    """Hold one engine to both, with the released AReaL's own client and group, over Gloo.

    Args:
        kind: the kind of AReaL's engine client: `sglang` or `vllm`.
        job: the service and the engine.
        models: two checkpoints of the engine's model.
        folder: where AReaL and the front keep what they keep.
        answer: asks the engine itself, past the front.
    """
    by_files: list[list[int]] = []
    for step, model in enumerate(models, start=1):
        job.serve(model, step)
        by_files.append(answer())
    assert by_files[0] != by_files[1]
    each = len(load_file(models[0] / "model.safetensors"))
    how, run = f"{kind}-xccl", job.root / RUN
    with FrontServer(folder, job, "--engine", f"{job.engine.url}=0") as front:
        mark = job.now
        # The first update in full, and of the second the first bucket and half of the other.
        killed_areal(each + each * 3 // 4, how, front.url, _made(folder / "killed"), *models)
        assert answer() == by_files[0]  # the engine is not paused
        assert versions(run)[-1] == "v000003"
        assert EngineState.TAINTED not in {e.data.get("state") for e in job.events if e.seq > mark}
        assert (job.engine_now.state, job.engine_now.version) == (EngineState.IN_SYNC, "exp~trial~v000003")
        way = "/areal_continue_generation" if kind == "vllm" else "/continue_generation"
        refused = httpx.post(f"{front.url}{way}", json={}, timeout=PATIENCE, trust_env=False)
        assert (refused.status_code, "weights of before" in refused.text) == (400, True), refused.text
        assert "has not arrived" in refused.text or "is missing" in refused.text, refused.text
        start, first = released_areal(how, front.url, _made(folder / "anew"), models[1])
    assert start["tokens"] == by_files[0][:8]
    assert first["tokens"] == by_files[1][:8]
    assert answer() == by_files[1]
    assert versions(run)[-1] == "v000004"
    assert job.engine_now.version == "exp~trial~v000004"


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
