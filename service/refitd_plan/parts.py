"""What memory is made of: named parts of a process, each with the source of its formula. Sizes are in GiB."""

from dataclasses import dataclass

ZERO = "Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), section 3"
RECOMPUTE = "Korthikanti et al. 2022 (arXiv 2205.05198), section 4, counted again for SwiGLU and RMSNorm"
EIGHT_BIT = "Dettmers et al. 2022, 8-bit Optimizers (arXiv 2110.02861)"
LORA = "Hu et al. 2021, LoRA (arXiv 2106.09685), section 4.1"
REFERENCE = (
    "TRL 1, grpo_trainer.py: a second model in the trainer's dtype, cut as the trainer is; none with adapters, "
    "which are switched off in its place"
)
GMLAKE = "Guo et al. 2024, GMLake (arXiv 2401.08156): 15 % of PyTorch's memory is lost in fragments on average"
SGLANG_POOL = "SGLang 0.5, kv_cache_configurator.py, _profile_available_bytes"
SGLANG_MEMORY = "SGLang 0.5, arg_groups/memory_hook.py, handle_gpu_memory_settings"
SGLANG_REQUESTS = "SGLang 0.5, mem_cache/memory_pool.py, ReqToTokenPool"
SGLANG_LORA = "SGLang 0.5, lora/mem_pool.py, LoRAMemoryPool: max_loras_per_batch (8) adapters of the largest rank"
CONFIG = "the model's config.json"
CONTEXT = "calibrated: what CUDA, PyTorch's kernels and cuBLAS take before the first tensor"
STAGING = "refitd_client: two chunks of 64 MiB with a shadow in host memory"

CONTEXT_GIB = 0.5
"""A process's CUDA context. It differs by driver and GPU (0.4 to 0.6 were seen in reports of RTX 4090 and H200)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part. `size` is in GiB."""

    name: str
    size: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process on one GPU. `title` says which; `gpu` counts over all nodes."""

    title: str
    role: str
    gpu: int
    parts: tuple[Part, ...]

    @property
    def total(self) -> float:
        """The peak, in GiB."""
        return sum(part.size for part in self.parts)
