"""Where a model lies: its devices, the stretches of memory that its tensors take, and whether that memory is there."""

from weakref import WeakKeyDictionary

import torch

from refitd_plugin import driver
from refitd_plugin.plan import tensors_of
from refitd_plugin.spans import Span

_devices: WeakKeyDictionary[torch.nn.Module, frozenset[torch.device]] = WeakKeyDictionary()


def span_of(tensor: torch.Tensor) -> Span:
    """The stretch of memory that a tensor lies in."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


def idle(model: torch.nn.Module) -> None:
    """Wait until the device has nothing to do: a forward pass on another stream may still read the weights."""
    if next(model.parameters()).device.type == "cuda":
        for device in devices_of(model):
            torch.cuda.synchronize(device)


def devices_of(model: torch.nn.Module) -> frozenset[torch.device]:
    """Where it is. A model stays where it is put."""
    if model not in _devices:
        _devices[model] = frozenset(tensor.device for _, tensor in tensors_of(model) if tensor.device.type == "cuda")
    return _devices[model]


def released(model: torch.nn.Module) -> str | None:
    """The name of a tensor whose memory is released; None where all is there.

    SGLang's `/release_memory_occupation` gives the memory to the trainer: torch_memory_saver takes it from behind the
    addresses, which stay. To touch them then ends the process, so the driver is asked before each update. When the
    memory is back, its contents are not: the fingerprints say so, and a delta is refused.
    """
    for name, tensor in tensors_of(model):
        if tensor.device.type == "cuda" and tensor.numel() and not driver.is_mapped(tensor.data_ptr()):
            return name
    return None
