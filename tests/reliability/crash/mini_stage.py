"""A vLLM of a few lines that services die on, stock or with refitd's plugin on two ranks."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
from safetensors.torch import save_file
from update_stage import Calls, Stage

from refitd_hosts.group.address import PostgresAddress
from support.mini_sglang import tiny_weights
from support.mini_vllm import MiniVllm, mini_vllm

MODELS = 3
VLLM_LOAD = "POST /collective_rpc"
VLLM_CALLS = (
    "POST /sleep?level=0&mode=keep",
    VLLM_LOAD,
    "GET /weight_info",
    "POST /reset_prefix_cache?reset_running_requests=true&reset_external=true",
    "POST /update_weight_version",
    "GET /is_paused",
    "POST /wake_up?tags=scheduling",
)


class MiniStage(Stage):
    """What its ranks hold can be looked at, so no answers are compared."""

    update = Calls((*VLLM_CALLS[:-1], "POST /weight_checker", VLLM_CALLS[-1]), VLLM_LOAD)
    engine: MiniVllm

    def check_engine(self) -> None:
        """See `Stage`."""
        assert (self.engine.label, self.engine.paused) == (str(self.step), False)
        assert self.engine.holds(1 + self.step % MODELS)


class PluggedMiniStage(MiniStage):
    """With refitd inside, whose word is the proof."""

    update = Calls(VLLM_CALLS, VLLM_LOAD, ("prepare",))


@contextmanager
def mini_stage(
    folder: Path, http: httpx.Client, load_seconds: float, *, plugged: bool, database: PostgresAddress | None = None
) -> Generator[MiniStage]:
    """One whose versions have the weights of the seeds 1 to `MODELS`. `database` is for its services' journal."""
    models = [folder / f"m{seed}" for seed in range(1, MODELS + 1)]
    for seed, model in enumerate(models, start=1):
        model.mkdir()
        save_file(tiny_weights(seed), model / "model.safetensors")
    root, ranks = (folder / "root", 2) if plugged else (None, 1)
    with mini_vllm(folder, root=root, size=ranks, load_seconds=load_seconds) as engine:
        yield (PluggedMiniStage if plugged else MiniStage)(folder, engine, models, [], http, database)
