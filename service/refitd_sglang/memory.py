"""Whether a model's memory is there: `/release_memory_occupation` gives it to the trainer, addresses and all stay.

torch_memory_saver takes the memory from behind the addresses. To touch them then ends the process, so the driver is
asked before each update. When the memory is back, its contents are not: the fingerprints say so, and a delta is
refused.
"""

from typing import Any

from refitd_sglang import driver
from refitd_sglang.plan import tensors_of


def released(model: Any) -> str | None:
    """The name of a tensor whose memory is released; None where all is there."""
    for name, tensor in tensors_of(model):
        if tensor.device.type == "cuda" and tensor.numel() and not driver.is_mapped(tensor.data_ptr()):
            return name
    return None
