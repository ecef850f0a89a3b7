"""What is in a model's memory: a fingerprint of each tensor, and one digest of all of them.

Two replicas with the same digest hold the same bits. Parameters and buffers count, each memory once.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import xxhash

from refitd_sglang.plan import tensors_of


def contents_of(model: torch.nn.Module) -> dict[str, str]:
    """The fingerprint of each tensor, as hex digits."""
    named: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors_of(model):
        if tensor.numel():
            named.setdefault((tensor.data_ptr(), tuple(tensor.shape), tensor.stride()), (name, tensor.detach()))
    prints = _fingerprints([tensor for _, tensor in named.values()])
    return {name: f"{number:016x}" for (name, _), number in zip(named.values(), prints, strict=True)}


def digest(contents: dict[str, str]) -> str:
    """One digest of all fingerprints, `xxh3:` and 32 hex digits."""
    lines = "".join(f"{name}\0{number}\n" for name, number in sorted(contents.items()))
    return f"xxh3:{xxhash.xxh3_128(lines.encode()).hexdigest()}"


def _of_bytes(tensors: Sequence[torch.Tensor]) -> Iterable[int]:
    for tensor in tensors:
        flat = tensor.contiguous().reshape(-1).view(torch.uint8).cpu()
        yield xxhash.xxh3_64_intdigest(memoryview(flat.numpy()))


def _chosen() -> Callable[[Sequence[Any]], Iterable[int]]:
    try:  # the fingerprints that manifests and deltas have, computed where the tensors are
        from refitd_client.fingerprint import fingerprints
    except ImportError:
        return _of_bytes
    return fingerprints


_fingerprints = _chosen()
