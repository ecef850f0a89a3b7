"""A few elements of each tensor that several ranks should hold alike, so that ranks that differ are found.

Each rank writes a part of a replicated tensor, and the file is whole whatever the parts are: nothing later would show
that two ranks had different tensors (ranks out of step, a tensor-parallel part that nobody described). Reading all of
it on every rank would undo what sharing the writing gains, so elements spread evenly are compared: a guard against
mistakes, not a proof.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash

from refitd_client.errors import InvalidWeightsError
from refitd_client.sharded import mesh
from refitd_client.sharded.holdings import Holding
from refitd_client.sharded.reading import flat_of
from refitd_client.tensors.source import refused

_ELEMENTS = 64


def samples_of(holdings: Iterable[Holding]) -> dict[str, int]:
    """A digest of some elements of each tensor that other ranks may hold, too. One copy from a GPU for all of them."""
    taken = {holding.claim.name: _sample(holding) for holding in holdings if _may_be_shared(holding)}
    taken = {name: sample for name, sample in taken.items() if len(sample)}
    if not taken:
        return {}
    sizes = [len(sample) for sample in taken.values()]
    torch: Any = sys.modules["torch"]
    by_device: dict[Any, list[Any]] = {}
    for sample in taken.values():
        by_device.setdefault(sample.device, []).append(sample)
    if len(by_device) == 1:
        data = torch.cat(list(taken.values())).cpu().numpy()
    else:
        data = torch.cat([sample.cpu() for sample in taken.values()]).numpy()
    digests: dict[str, int] = {}
    begin = 0
    for name, size in zip(taken, sizes, strict=True):
        digests[name] = xxhash.xxh3_64_intdigest(data[begin : begin + size].data)
        begin += size
    return digests


def compare(samples: Sequence[Mapping[str, int]], shared: Mapping[str, list[list[int]]]) -> InvalidWeightsError | None:
    """Hold what ranks hold alike against each other; `shared` gives, by name, the ranks that hold the same part."""
    for name, groups in shared.items():
        for first, *others in groups:
            for other in others:
                if samples[first].get(name) != samples[other].get(name):
                    return _difference(name, first, other)
    return None


def _may_be_shared(holding: Holding) -> bool:
    tensor = holding.tensor
    if not mesh.is_dtensor(tensor):
        return True
    return any(type(placement).__name__ == "Replicate" for placement in tensor.placements)


def _sample(holding: Holding) -> Any:
    torch: Any = sys.modules["torch"]
    tensor = holding.tensor.detach()
    flat = flat_of(tensor.to_local() if mesh.is_dtensor(tensor) else tensor)
    step = max(1, flat.numel() // _ELEMENTS)
    return flat[::step].contiguous().view(torch.uint8)


def _difference(name: str, one: int, other: int) -> InvalidWeightsError:
    return refused(
        name,
        f"differs between rank {one} and rank {other}, which should hold the same: if each has a part of it, pass "
        "DTensors or say so with sharded={name: Sharded(dim, index, count)}; else the ranks are not in step",
    )
