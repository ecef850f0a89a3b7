"""refitd's plugin inside vLLM: updates of the weights as transactions, on every rank.

`vllm serve` finds it by its entry point (`vllm.general_plugins`) where refitd is installed beside it, and without that
by `--worker-extension-cls refitd_vllm.Worker`.
"""

from refitd_vllm.plugin import Worker

__all__ = ["Worker"]
