"""torch tensors and modules as tensor sources, without importing torch: a caller with a tensor has imported it.

Nothing here can create a CUDA context: `torch.cuda` is not called, tensors in host memory are read where they are,
and one on a GPU comes with the context that it lives in.
"""

import sys
from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.tensors.source import HOST, Casts, TensorRef, TensorSource, entry_of, refused

_GATHER = (
    "gather it on this rank first, e.g. with torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
)


def is_tensor(value: object) -> bool:
    """Whether it is a torch tensor of any kind."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_module(value: object) -> bool:
    """Whether it is an `nn.Module`."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def source(name: str, tensor: Any, casts: Casts) -> TensorSource:
    """A tensor as a source.

    Args:
        name: the published one.
        tensor: the trainer's.
        casts: the dtypes to publish in.

    Raises:
        InvalidWeightsError: it has no bytes of its own to write, or none that can be served.
    """
    why = refusal(tensor)
    if why is not None:
        raise refused(name, why)
    own = str(tensor.dtype).removeprefix("torch.")
    dtype = casts.target(name, own)
    is_view = dtype == own and tensor.is_contiguous() and not tensor.is_neg()
    held = TensorRef(tensor)

    def published() -> Any:
        value = held.value.detach()
        return value if is_view else value.to(getattr(sys.modules["torch"], dtype)).resolve_neg()

    return TensorSource(
        entry=entry_of(name, dtype, tuple(tensor.shape)),
        read=lambda: _read(held, dtype),
        memory=memory_of(tensor),
        place=str(tensor.device) if on_gpu(tensor) else HOST,
        tensor=published,
        is_view=is_view,
        address=tensor.data_ptr() if is_view else 0,
        held=held,
    )


def on_gpu(tensor: Any) -> bool:
    """Whether its bytes are copied by a CUDA device."""
    return tensor.device.type == "cuda"


def tied_patterns(module: Any) -> list[str]:
    """Regular expressions for the names that the module declares to be second names of other weights.

    Hugging Face's models declare them in `_tied_weights_keys`, a list or (from transformers 5 on) a mapping; one
    that only has a configuration that says `tie_word_embeddings` ties its head.
    """
    patterns: list[str] = []
    for prefix, part in module.named_modules():
        keys = getattr(part, "_tied_weights_keys", None) or ()
        patterns += [f"{prefix}.{key}" if prefix else key for key in keys]
    if not patterns and getattr(getattr(module, "config", None), "tie_word_embeddings", False) is True:
        patterns = [r"(^|\.)lm_head\.weight$"]
    return patterns


def refusal(tensor: Any) -> str | None:
    """Why a tensor cannot be published, None if it can."""
    torch: Any = sys.modules["torch"]
    kind: Any = tensor.__class__
    if kind.__name__ == "DTensor":
        return f"is a DTensor, of which this rank has a part: {_GATHER}"
    if tensor.device.type == "meta":
        return "is on the meta device and has no values: materialise it first"
    if tensor.is_quantized:
        return "is a torch.quantized tensor: pass its integers and scales as plain tensors, or dequantise it"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}: make it dense first (to_dense())"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # its bytes are in other tensors that it wraps
        return f"is a {kind.__module__}.{kind.__name__}, a wrapper around other tensors: pass those"
    return None


def _read(held: TensorRef, dtype: str) -> NDArray[np.uint8]:
    torch: Any = sys.modules["torch"]
    # Each call copies only where it has to.
    here = held.value.detach().to(device="cpu", dtype=getattr(torch, dtype)).resolve_neg().reshape(-1)
    return here.view(torch.uint8).numpy()


def memory_of(tensor: Any) -> Hashable | None:
    """Equal for tensors with the same bytes, dtype, shape and strides; None for one without bytes."""
    if tensor.numel() == 0:
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
