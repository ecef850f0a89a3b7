"""A few elements of each tensor that several ranks should hold alike, to find ranks that differ.

Each rank writes a part of a replicated tensor, and the file is whole whatever the parts are: nothing later would show
that two ranks had different tensors (ranks out of step, a tensor-parallel part that the trainer did not describe).
Reading all of it on every rank would undo what sharing the writing gains, so elements spread evenly are compared: a
guard against mistakes, not a proof.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash

from refitd_client.errors import InvalidWeightsError
from refitd_client.sharded.holdings import Holding, is_dtensor
from refitd_client.sharded.reading import flat_of
from refitd_client.tensors.source import refused

_ELEMENTS = 64


def samples_of(holdings: Iterable[Holding]) -> dict[str, int]:
    """A digest of some elements of each tensor that other ranks may hold, too. Each GPU is copied from once."""
    torch: Any = sys.modules["torch"]
    by_device: dict[Any, dict[str, Any]] = {}
    for holding in holdings:
        tensor = holding.tensor
        local = tensor.detach()
        if is_dtensor(tensor):
            if not any(type(placement).__name__ == "Replicate" for placement in tensor.placements):
                continue
            local = local.to_local()
        flat = flat_of(local)
        sample = flat[:: max(1, flat.numel() // _ELEMENTS)].contiguous().view(torch.uint8)
        if len(sample):
            by_device.setdefault(sample.device, {})[holding.claim.name] = sample
    digests: dict[str, int] = {}
    for samples in by_device.values():
        data = torch.cat(list(samples.values())).cpu().numpy()
        begin = 0
        for name, sample in samples.items():
            digests[name] = xxhash.xxh3_64_intdigest(data[begin : begin + len(sample)].data)
            begin += len(sample)
    return digests


def compare(samples: Sequence[Mapping[str, int]], shared: Mapping[str, list[list[int]]]) -> InvalidWeightsError | None:
    """The error for ranks that hold different samples; `shared` has, by name, the ranks that hold the same part."""
    for name, groups in shared.items():
        for first, *others in groups:
            for other in others:
                if samples[first].get(name) != samples[other].get(name):
                    return refused(
                        name,
                        f"differs between rank {first} and rank {other}, which should hold the same: if each has a "
                        "part of it, pass DTensors or say so with sharded={name: Sharded(dim, index, count)}; else the "
                        "ranks are not in step",
                    )
    return None
