"""What one rank of a vLLM engine takes. Pure; sizes in GiB.

vLLM takes `gpu_memory_utilization` of all of the GPU's memory, not of what is free, and does not start where less is
free. Weights, the largest forward pass, CUDA graphs and the process's own context come out of it, and the KV cache
takes the rest. What a forward pass takes at its peak is counted as SGLang's is, since vLLM measures it at its start.
"""

from refitd_plan.allocation import Parallel
from refitd_plan.job import JobSettings
from refitd_plan.machine import GIB
from refitd_plan.model import Model
from refitd_plan.rank_memory import CONFIG, CONTEXT, CONTEXT_GIB, WEIGHT_BYTES, EngineMemory, MemoryPart, forward_parts

VLLM_SHARE = "vLLM 0.32, v1/worker/utils.py, request_memory"
DEFAULT_UTILIZATION = 0.92
"""`gpu_memory_utilization` where it is not given."""


def vllm_memory(model: Model, parallel: Parallel, job: JobSettings, *, capacity: float) -> EngineMemory:
    """An engine rank's memory.

    Args:
        model: what it serves.
        parallel: the engine's parallelism.
        job: the settings; its `mem_fraction_static` is vLLM's `gpu_memory_utilization`.
        capacity: the GPU's memory, in GiB.
    """
    share = job.mem_fraction_static or DEFAULT_UTILIZATION
    weights = WEIGHT_BYTES * model.parameters / (parallel.t * parallel.p) / GIB
    cell = model.kv_bytes(parallel.t, parallel.p, job.kv_cache_bytes)
    before = max(0.0, share * capacity - CONTEXT_GIB - weights)
    fixed = (
        MemoryPart(name="CUDA context", size=CONTEXT_GIB, source=CONTEXT),
        MemoryPart(name="weights", size=weights, source=CONFIG),
        *forward_parts(model, parallel, job, capacity, int(before * GIB // cell)),
    )
    pool = share * capacity - sum(part.size for part in fixed)
    cache = MemoryPart(name="KV cache", size=max(0.0, pool), source=VLLM_SHARE)
    parts = tuple(part for part in (*fixed, cache) if part.size > 0)
    return EngineMemory(parts=parts, kv_tokens=int(pool * GIB // cell), fraction=share)
